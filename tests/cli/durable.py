"""Shared by tests of saved sessions: prompts, options, and comparisons of snapshots."""

import time
from pathlib import Path

import torch
from timeouts import PATIENCE

from kvkeep import Snapshot

GREEDY = ["--temperature", "0", "--repetition-penalty", "1"]
TEXT = "One two three four five six seven eight nine ten big small."
QUIET = ["--no-progress", "--ignore-eos"]


def saved(home: Path, name: str) -> Snapshot:
    return Snapshot.load(home / "sessions" / f"{name}.kvkeep")


def require_same(one: Snapshot, other: Snapshot) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert torch.equal(one.logits, other.logits)
    assert one.sampler == other.sampler
    assert one.cells == other.cells


def refused(result, *said: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("kvkeep: error: ")
    for text in said:
        assert text in lines[0]


def wait_for(happened) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)
