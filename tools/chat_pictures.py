"""Pictures of a chat in a terminal, for the documentation: `python -m tools.chat_pictures docs`.

The default model says what it says. Each picture is what a terminal showed at that moment.
"""

import argparse
import tempfile
from pathlib import Path

from kvkeep.models.hub.library import home
from tools.terminal import Terminal

PATIENCE = 120.0  # seconds
TAB, CTRL_C, CTRL_D, ENTER = "\t", "\x03", "\x04", "\r"
PASTED = """\
Say in one sentence what this does:

def gcd(a, b):
    while b:
        a, b = b, a % b
    return a"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where chat-*.svg go")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as place:
        for kind in ("models", "packed", "unpacked"):
            if (home() / kind).is_dir():
                (Path(place) / kind).symlink_to(home() / kind)
        environment = {"KVKEEP_HOME": place}
        _talked(folder, environment)
        _taken_up(folder, environment)


def _talked(folder: Path, environment: dict[str, str]) -> None:
    options = ("--temperature", 0, "--max-kv-size", 512, "--session", "ada")
    with _begun(environment, *options) as terminal:
        terminal.paste(PASTED)
        _kept(terminal, folder / "chat-paste.svg", "What is pasted is one message")
        terminal.type(ENTER)
        terminal.wait("1 turn", PATIENCE)
        terminal.type("List three fruits as a Markdown list, each name in bold.", ENTER)
        terminal.wait("2 turns", PATIENCE)
        terminal.type("/pin 1.", TAB)
        _kept(terminal, folder / "chat-complete.svg", "Tab completes commands, turns and files")
        terminal.type("q", TAB, ENTER)
        terminal.wait("never forgotten", PATIENCE)
        terminal.type("/memory", ENTER)
        terminal.wait("policy sliding", PATIENCE)
        _kept(terminal, folder / "chat-memory.svg", "What is held, and what that takes")
        terminal.type(CTRL_D)
        terminal.ended(PATIENCE)


def _taken_up(folder: Path, environment: dict[str, str]) -> None:
    with _begun(environment, "--session", "ada") as terminal:
        terminal.type(CTRL_C)
        terminal.type("/regenrate", ENTER)
        terminal.wait("did you mean", PATIENCE)
        _kept(terminal, folder / "chat-resumed.svg", "Another day: the last exchange is there")


def _begun(environment: dict[str, str], *options: object) -> Terminal:
    terminal = Terminal("chat", *options, environment=environment)
    terminal.wait(" cells", PATIENCE)
    return terminal


def _kept(terminal: Terminal, file: Path, title: str) -> None:
    terminal.settle()
    file.write_text(terminal.svg(title), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
