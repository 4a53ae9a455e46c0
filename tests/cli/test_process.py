"""The command as a subprocess: streaming, Ctrl-C, closed pipes, and a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from timeouts import PATIENCE

from kvkeep import Snapshot

LONG = "The sea is wide and the night is long. " * 4000
PROMPT = "\x1b[?2004h"  # from here on the terminal marks pasted text (bracketed paste)
ENDLESS = ["-n", "-1", "--ignore-eos", "--max-kv-size", "64"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a pseudo-terminal: the user's and the program's."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def _read_until(handle: int, *wanted: str) -> str:
    """Read until all of the texts have come, in this order. What came after them is lost."""
    seen, deadline = "", time.monotonic() + PATIENCE
    os.set_blocking(handle, False)
    while not re.search(".*".join(map(re.escape, wanted)), seen, re.DOTALL):
        assert time.monotonic() < deadline, f"waited for {wanted!r}, saw {seen!r}"
        try:
            seen += os.read(handle, 4096).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.02)
    return seen


def test_text_streams_and_ctrl_c_ends_it_with_a_report(start, tiny, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    process = start("generate", "-p", "Once", *ENDLESS, "--report", file, *tiny)
    first = process.stdout.read(20)
    assert process.poll() is None, "text came before the end"
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    report = json.loads(file.read_text())
    assert report["finish_reason"] == "interrupt"
    assert report["generated_tokens"] > 0
    closing = said.decode().splitlines()[-1]
    assert closing.startswith("prompt 1 at")
    assert closing.endswith(" | interrupted")
    assert (first + rest).endswith(b"\n")


def test_ctrl_c_during_prefill_reports_the_evaluated_tokens(
    start, tiny, terminal, tmp_path: Path
) -> None:
    ours, theirs = terminal
    file, text = tmp_path / "report.json", tmp_path / "long.txt"
    text.write_text(LONG)
    options = ["--prefill-step", 8, "--max-kv-size", 64, "--report", file]
    process = start("generate", "-f", text, *options, *tiny, ctrl_c_at=20, stderr=theirs)
    assert "loading weights:" in _read_until(ours, "generated 0 tokens")
    assert process.wait(timeout=PATIENCE) == 130
    report = json.loads(file.read_text())
    assert report["finish_reason"] == "interrupt"
    assert report["prompt_tokens"] == 4 + 4 + 18 * 8  # 4 anchors, the rest of 8, then steps of 8
    assert report["kv_cells"] == 64


def test_an_interrupted_prompt_is_prefilled_to_the_end_later(
    invoke, tiny, ctrl_c_at, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    text = tmp_path / "long.txt"
    text.write_text(LONG[:1000])
    asked = ["--max-kv-size", 24, "--prefill-step", 4, "--temperature", 0, "--ignore-eos", *tiny]
    ctrl_c_at(20)
    interrupted = invoke("generate", "--session", "s", "-f", text, *asked)
    assert interrupted.exit_code == 130
    assert "session s saved" in interrupted.stderr
    invoke("generate", "--session", "whole", "-f", text, "-n", 5, *asked)
    file, whole = (tmp_path / "sessions" / f"{name}.kvkeep" for name in ("s", "whole"))
    expected, read = Snapshot.load(whole), Snapshot.load(file)
    assert read.notes["unread"]
    assert read.tokens.tolist() + read.notes["unread"] == expected.tokens.tolist()[:-5]
    assert "generate --session NAME -n 0" in invoke("chat", "--session", "s", *tiny).stderr
    invoke("generate", "--session", "s", "-n", 5, *asked)
    assert Snapshot.load(file).tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(Snapshot.load(file).logits, expected.logits)
    assert "unread" not in Snapshot.load(file).notes


def test_ctrl_c_while_scoring_keeps_the_perplexity(invoke, tiny, ctrl_c_at, tmp_path: Path) -> None:
    file, text = tmp_path / "report.json", tmp_path / "long.txt"
    text.write_text(LONG[:20_000])
    options = ["--prefill-step", 64, "--max-kv-size", 64, "--report", file]
    ctrl_c_at(10)
    interrupted = invoke("perplexity", text, *options, *tiny)
    assert interrupted.exit_code == 130
    report = json.loads(file.read_text())
    assert report["finish_reason"] == "interrupt"
    assert report["perplexity"] > 1
    assert interrupted.stdout.startswith(f"perplexity {report['perplexity']:.4f} of ")


def test_a_closed_pipe_ends_the_command_quietly(start, tiny, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    process = start("generate", "-p", "Once", *ENDLESS, "--report", file, *tiny)
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 141
    said = process.stderr.read().decode().splitlines()
    assert len(said) == 1
    assert said[0].startswith("prompt 1 at")
    assert json.loads(file.read_text())["finish_reason"] == "closed"


def test_piped_text_is_continued(start, tiny) -> None:
    process = start("generate", "-n", 3, "--ignore-eos", "--temperature", 0, *tiny)
    text, said = process.communicate(b"Once upon a time", timeout=PATIENCE)
    assert process.returncode == 0
    assert text.strip()
    assert b"prompt 4 at" in said


def test_without_a_prompt_a_terminal_is_an_error(start, terminal) -> None:
    _, theirs = terminal
    process = start("generate", stdin=theirs)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert b"no prompt" in said


def test_chat_in_a_terminal(start, tiny, terminal, tmp_path: Path) -> None:
    """Ctrl-C stops an answer, but not the chat. At the prompt it does nothing."""
    ours, theirs = terminal
    file = tmp_path / "report.json"
    process = start(
        *("chat", "-n", -1, "--temperature", 0, "--max-kv-size", 64, "--report", file, *tiny),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    _read_until(ours, PROMPT)
    for _ in range(2):
        os.write(ours, b"Tell me a story.\n")
        assert process.stdout.read(300)
        process.send_signal(signal.SIGINT)
        _read_until(ours, PROMPT)
    os.write(ours, b"/memory\n")
    assert "kept             4 tokens" in _read_until(ours, PROMPT)
    process.send_signal(signal.SIGINT)
    _read_until(ours, "ends the chat", PROMPT)
    os.write(ours, b"\x04")
    assert process.wait(timeout=PATIENCE) == 0
    assert "cells 64 of 64" in _read_until(ours, "peak RAM")
    assert json.loads(file.read_text())["finish_reason"] == "end"
