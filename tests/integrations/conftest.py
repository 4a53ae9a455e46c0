"""Models of transformers and kvkeep: the default model in bfloat16, a small one in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.peers.unpacked import unpacked_folder as unpack
from kvkeep.integrations.transformers import unhook
from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.models.hub.library import home


@pytest.fixture(scope="session")
def unpacked_folder(smollm2_folder: Path) -> Path:
    """The default model in the layout of Hugging Face; unpacked once."""
    with FileLock(home() / "unpacking.lock"):
        return unpack(smollm2_folder, progress=False)


@pytest.fixture(scope="session")
def loaded_fp32(tiny_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def loaded_bf16(unpacked_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(unpacked_folder, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="session")
def own_fp32(tiny_folder: Path) -> Model:
    """The same weights in kvkeep's own forward."""
    return load_model(str(tiny_folder), dtype="float32")


@pytest.fixture(scope="session")
def own_bf16(unpacked_folder: Path) -> Model:
    return load_model(str(unpacked_folder))


@pytest.fixture
def model(loaded_fp32: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A small model in float32, in which both implementations sample the same tokens."""
    yield loaded_fp32
    unhook(loaded_fp32)


@pytest.fixture
def bf16_model(loaded_bf16: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The default model in bfloat16, as users run it."""
    yield loaded_bf16
    unhook(loaded_bf16)


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    return tokenizer
