"""Fixtures and settings that all tests share."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as transports
import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings
from safetensors.torch import save_file
from third_tier import BEFORE_RELEASES, IN_CI
from tiers import (
    BEFORE_OTHERS,
    EXTENDED,
    FIRST,
    beyond_samples,
    has_tests_of,
    is_extended,
    is_slow,
)

from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.models.hub.source import DEFAULT_MODEL, KNOWN_MODELS, fetch_known_model, resolve
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.spec.config import read_spec

# A shell without job control makes background jobs ignore SIGINT, and the processes that tests
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # `nohup` makes them ignore SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Examples are the same in each run and on each machine. Each run with `--hypothesis-profile=new`
# draws new ones. The duration of an example is not limited.
SLOW = [HealthCheck.too_slow]
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("new", deadline=None, print_blob=True, suppress_health_check=SLOW)
settings.load_profile("same")

# Parallel test processes and their child processes share the cores: more threads than cores make a
# run ten times as slow.
THREADS = max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
os.environ["OMP_NUM_THREADS"] = str(THREADS)

# In tokens. Loading the full vocabulary of 49,152 takes longer than most tests.
TINY_VOCABULARY = 12_288

# One TLS context for all HTTP clients of a test process. httpx loads the system's certificates for
# each, which takes longer than most requests to a server of the tests.
transports.create_ssl_context = cache(httpx.create_ssl_context)  # type: ignore[attr-defined]

# A tiny model is slower on several threads, most of all on a busy machine.
torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of the tier that is run, before they are imported."""
    if not collection_path.match("test_*.py"):
        return None
    file = collection_path.relative_to(Path(__file__).parent).as_posix()
    source = collection_path.read_text(encoding="utf-8")
    return None if has_tests_of(config.option.markexpr, file, source) else True


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the second and third tier, and order the tests (`tests/tiers.py`)."""
    folder = Path(__file__).parent
    listed = (*EXTENDED, *FIRST, *BEFORE_RELEASES, *IN_CI)
    files = [name.partition("::")[0] for name in listed]
    assert [name for name in files if not (folder / name).exists()] == []
    tests = {item: f"{item.path.relative_to(folder).as_posix()}::{item.name}" for item in items}
    beyond = beyond_samples(
        test for item, test in tests.items() if item.get_closest_marker("slow") is None
    )
    for item, test in tests.items():
        if is_extended(test):
            item.add_marker(pytest.mark.extended)
        if is_slow(test) or test in beyond:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not tests[item].startswith(BEFORE_OTHERS))


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use all threads for tests of the real model, and one thread otherwise."""
    if {"smollm2", "smollm2_fp32"} & set(request.fixturenames):
        torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The default model in the user's kvkeep home, downloaded once."""
    return resolve(DEFAULT_MODEL, progress=True, refresh_hub=True)


@pytest.fixture(scope="session")
def smollm2_gguf(request: pytest.FixtureRequest) -> Path:
    """The GGUF file of the default model, in pytest's cache."""
    folder = Path(request.config.cache.mkdir("smollm2"))  # type: ignore[union-attr]
    file = folder / "model.gguf"
    with FileLock(folder / "lock"):
        if not file.exists():
            fetch_known_model(KNOWN_MODELS[DEFAULT_MODEL], folder, progress=True).rename(file)
    return file


@pytest.fixture(scope="session")
def smollm2_fp32(smollm2_folder: Path) -> Model:
    return load_model(DEFAULT_MODEL, dtype="float32")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Model:
    return load_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with two layers, and the default model's chat template and first tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (smollm2_folder / name).exists():
            shutil.copy(smollm2_folder / name, folder)
    tokenizer = json.loads((smollm2_folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(cut_tokenizer(tokenizer, TINY_VOCABULARY)))
    config = json.loads((smollm2_folder / "config.json").read_text())
    config |= {"vocab_size": TINY_VOCABULARY}
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.3
        for name, shape in tensor_shapes(read_spec(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def hybrid_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LFM2 of two layers, of which one keeps a state, with the tokens of `tiny_folder`."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    folder = tmp_path_factory.mktemp("hybrid")
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    config = Lfm2Config(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    Lfm2ForCausalLM(config).save_pretrained(folder)
    return folder


def cut_tokenizer(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """Cut a byte-pair tokenizer.json to its first `size` tokens and their merges."""
    model = tokenizer["model"]
    vocabulary = {token: index for token, index in model["vocab"].items() if index < size}
    merges = [[left, right] for left, right in model["merges"] if left + right in vocabulary]
    return tokenizer | {"model": model | {"vocab": vocabulary, "merges": merges}}
