"""Models on a GPU. Its tests are skipped where PyTorch finds none.

`KVKEEP_TEST_DEVICE=cpu` runs them on the CPU, with the graph's code but no graph: that checks the
tests themselves.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import small_model

from kvkeep.executors import new_decoder
from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.models.hub.library import find_model
from kvkeep.models.hub.source import DEFAULT_MODEL
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import GraphExecutor
from kvkeep.models.layers.network import Network
from kvkeep.models.spec.model_spec import ModelSpec

Placed = Callable[..., Model]


@pytest.fixture(scope="session")
def device() -> torch.device:
    name = os.environ.get("KVKEEP_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch can use")
    return torch.device(name)


@pytest.fixture(scope="session")
def placed(device: torch.device) -> Placed:
    """Return small models of given specs on the GPU, in float32."""

    def make(spec: ModelSpec | None = None, plain: bool = False, seed: int = 0) -> Model:
        """plain: without a graph."""
        model = small_model(seed, spec=spec)
        tensors = {name: x.to(device) for name, x in model.decoder.tensors.items()}
        spec = model.spec
        if plain:
            model.decoder = Decoder(spec, tensors)
        elif device.type == "cpu" and not spec.experts and not spec.states:
            model.decoder = Decoder(spec, tensors, executor=GraphExecutor(Network(spec, tensors)))
        else:
            model.decoder = new_decoder(spec, tensors)
        return model

    return make


@pytest.fixture(scope="session")
def default_folder(device: torch.device) -> Path:
    model = find_model(DEFAULT_MODEL)
    if model is None:
        pytest.skip("needs the default model: kvkeep pull")
    return model.path


@pytest.fixture(scope="session")
def default_model(default_folder: Path, device: torch.device) -> Model:
    return load_model(DEFAULT_MODEL, device=str(device))


@pytest.fixture(scope="session")
def default_fp32(default_folder: Path, device: torch.device) -> Model:
    return load_model(DEFAULT_MODEL, dtype="float32", device=str(device))
