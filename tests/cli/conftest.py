"""Fixtures: the command line in this process and in a subprocess, and a tiny model."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import interrupt_at_step
import pytest
import torch.nn.functional as F
from click.testing import CliRunner, Result

from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.commands import ChatCommands
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.main import main

Invoke = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def invoke() -> Invoke:
    """Run `kvkeep` in this process. `input` is its standard input."""

    def call(*arguments: object, input: str | bytes = b"") -> Result:
        result = CliRunner().invoke(main, [str(a) for a in arguments], input=input)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def ctrl_c_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Send SIGINT, or another signal, during the n-th evaluated step from now on."""
    real = F.embedding

    def arm(step: int, number: int = signal.SIGINT) -> None:
        monkeypatch.setattr(F, "embedding", real)
        monkeypatch.setattr(F, "embedding", interrupt_at_step.interrupting(step, number))

    return arm


@pytest.fixture
def tiny(tiny_folder: Path) -> list[str]:
    """Options that make a command fast and deterministic."""
    return ["-m", str(tiny_folder), "--dtype", "float32"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `python -m kvkeep` in a subprocess, which is killed at the end if it still runs.

    ctrl_c_at: the step of the model with which Ctrl-C comes. environment: variables besides.
    """
    running: list[subprocess.Popen[bytes]] = []

    def call(
        *arguments: object,
        ctrl_c_at: int | None = None,
        environment: dict[str, str] | None = None,
        **options: object,
    ) -> "subprocess.Popen[bytes]":
        program = (
            ["-m", "kvkeep"] if ctrl_c_at is None else [interrupt_at_step.__file__, str(ctrl_c_at)]
        )
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


class BranchCommands(ChatCommands):
    """Chat commands that need nothing but branches."""

    def ask(self, message: str, line: str | None = None) -> None:
        raise AssertionError("no command here asks the model")

    def compact(self, target: float) -> str:
        raise AssertionError("no command here compacts")


def run_on_branches(line: str, branches: Branches) -> str:
    """Run a chat command that needs nothing but the branches; return its message."""
    return BranchCommands(branches, cast(ChatSettings, None)).run_command(line)
