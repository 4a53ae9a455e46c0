"""The spinner of commands: it turns on a terminal, and leaves nothing there."""

import io
import sys
import time

import pytest
from tqdm import tqdm

from kvkeep.cli.output import spinner


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, shown: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with spinner("loading a model", shown), tqdm(total=2, desc="a bar", ncols=40) as bar:
        time.sleep(0.3)
        bar.update()
    time.sleep(0.3)
    return stream.getvalue()


def test_a_spinner_turns_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    text = _shown(_Terminal(), monkeypatch)
    assert "| loading a model" in text
    assert "/ loading a model" in text
    assert "a bar:  50%" in text
    assert not text.rsplit("\r", 2)[1].strip()  # the last line that was drawn is empty


def test_a_spinner_is_shown_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "loading" not in _shown(io.StringIO(), monkeypatch)
    assert "loading" not in _shown(_Terminal(), monkeypatch, shown=False)
