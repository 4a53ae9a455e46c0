"""A chat's prompt is there while the model is loaded."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from timeouts import PATIENCE

from tools.terminal import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"
# Loading ends when the file "go" is there, and fails if it has a text.
PROGRAM = """
import sys, time
from pathlib import Path
import kvkeep.cli.memory
from kvkeep.errors import BadModelFile
load, go = kvkeep.cli.memory.load_by_name, Path(sys.argv.pop(1))
def load_later(*arguments, **options):
    while not go.exists():
        time.sleep(0.01)
    if text := go.read_text():
        raise BadModelFile(text)
    return load(*arguments, **options)
assert "torch" not in sys.modules
kvkeep.cli.memory.load_by_name = load_later
from kvkeep.cli.start import run
run()
"""


@pytest.fixture
def go(tmp_path: Path) -> Path:
    return tmp_path / "go"


@pytest.fixture
def terminal(tiny: list[str], go: Path, tmp_path: Path) -> Iterator[Terminal]:
    """A chat whose model is not loaded yet."""
    arguments = ("chat", *tiny, "--seed", "1", "-n", "5", "--max-kv-size", "256")
    environment = {"KVKEEP_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = ("-c", PROGRAM, str(go))
    wide = 200, 24  # the model's path and what follows it are on one line
    with Terminal(*arguments, environment=environment, program=program, size=wide) as chat:
        chat.wait("loading ", PATIENCE)
        yield chat


def test_what_is_typed_stays_when_the_chat_is_loaded(terminal: Terminal, go: Path) -> None:
    assert "Ctrl-D ends" not in terminal.text
    terminal.type("half a", CTRL_C, "Hello", " there")
    go.touch()
    terminal.wait("0 turns", PATIENCE)
    assert "loading" not in terminal.text
    assert terminal.text.count("Hello there") == 1
    assert terminal.text.index("Ctrl-D ends") < terminal.text.index("> Hello there")
    terminal.type("!", "\r")
    terminal.wait("1 turn", PATIENCE)
    assert "> Hello there!\n" in terminal.text
    terminal.type(CTRL_D)
    assert terminal.ended(PATIENCE) == 0


def test_a_message_that_was_sent_early_is_answered(terminal: Terminal, go: Path) -> None:
    terminal.type("Hello there", "\r", "next")
    go.touch()
    terminal.wait("1 turn", PATIENCE)
    text = terminal.wait("> next", PATIENCE)
    assert text.index("> Hello there") < text.index("Ctrl-D ends") < text.index("> next")
    terminal.type(CTRL_C, "/quit", "\r")
    assert terminal.ended(PATIENCE) == 0


def test_an_error_of_loading_ends_the_chat(terminal: Terminal, go: Path) -> None:
    terminal.type("Hello")
    go.with_suffix(".new").write_text("the file is broken")
    go.with_suffix(".new").rename(go)
    terminal.wait("kvkeep: error: the file is broken", PATIENCE)
    assert terminal.ended(PATIENCE) == 2
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("how", ["Ctrl-D", "Ctrl-C of a message", "Ctrl-C with Enter", "SIGTERM"])
def test_a_chat_can_be_left_while_it_is_loaded(terminal: Terminal, how: str) -> None:
    if how == "Ctrl-D":
        terminal.type(CTRL_C)
        terminal.wait("/quit ends the chat", PATIENCE)
        terminal.type(CTRL_D)
        expected = 0
    elif how == "SIGTERM":
        os.kill(terminal.process.pid, signal.SIGTERM)
        expected = 128 + signal.SIGTERM
    else:
        terminal.type("Hello", *(["\r" + CTRL_C] if "with" in how else ["\r", CTRL_C]))
        expected = 128 + signal.SIGINT
    assert terminal.ended(PATIENCE) == expected
    assert "Traceback" not in terminal.text
