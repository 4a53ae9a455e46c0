"""The command line in this process and in one of its own, and a model small enough for both."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ctrl_c
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from kvkeep.cli.main import main
from kvkeep.models.config import read_spec
from kvkeep.models.weights import tensor_shapes

Invoke = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny model on several threads mostly waits for them, the more so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers that reads and writes with the default model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (smollm2_folder / name).exists():
            shutil.copy(smollm2_folder / name, folder)
    config = json.loads((smollm2_folder / "config.json").read_text())
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


@pytest.fixture
def invoke() -> Invoke:
    """Runs `kvkeep` with these arguments in this process; `input` is what is piped in."""

    def call(*arguments: object, input: str | bytes = b"") -> Result:
        result = CliRunner().invoke(main, [str(a) for a in arguments], input=input)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def ctrl_c_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets Ctrl-C, or another signal, come with the n-th step that a model evaluates from here."""
    real = F.embedding

    def arm(step: int, number: int = signal.SIGINT) -> None:
        monkeypatch.setattr(F, "embedding", real)
        monkeypatch.setattr(F, "embedding", ctrl_c.interrupting(step, number))

    return arm


@pytest.fixture
def tiny(tiny_folder: Path) -> list[str]:
    """Options that make any command fast and exactly repeatable."""
    return ["-m", str(tiny_folder), "--dtype", "float32"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `python -m kvkeep` with these arguments; whatever still runs at the end is killed.

    ctrl_c_at: the step of the model with which Ctrl-C comes. environment: variables besides.
    """
    running: list[subprocess.Popen[bytes]] = []

    def call(
        *arguments: object,
        ctrl_c_at: int | None = None,
        environment: dict[str, str] | None = None,
        **options: object,
    ) -> "subprocess.Popen[bytes]":
        program = ["-m", "kvkeep"] if ctrl_c_at is None else [ctrl_c.__file__, str(ctrl_c_at)]
        command = [sys.executable, *program, *map(str, arguments)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
        process = subprocess.Popen(command, env=variables, **(pipes | options))  # type: ignore[call-overload]
        running.append(process)
        return process

    yield call
    for process in running:
        process.kill()
        process.wait()
