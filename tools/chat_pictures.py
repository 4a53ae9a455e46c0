"""Record pictures of a terminal chat for the documentation: `python -m tools.chat_pictures docs`.

The default model answers. Each picture is the content of a terminal at that moment.
"""

import argparse
import tempfile
from pathlib import Path

from kvkeep.models.hub.library import home
from tools.terminal import Terminal

TIMEOUT = 120.0  # seconds
TAB, CTRL_C, CTRL_D, ENTER = "\t", "\x03", "\x04", "\r"
PASTED = """\
Say in one sentence what this does:

def gcd(a, b):
    while b:
        a, b = b, a % b
    return a"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="output folder of chat-*.svg")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as home_folder:
        for kind in ("models", "packed", "unpacked"):
            if (home() / kind).is_dir():
                (Path(home_folder) / kind).symlink_to(home() / kind)
        environment = {"KVKEEP_HOME": home_folder}
        _record_first_chat(folder, environment)
        _record_resumed_chat(folder, environment)


def _record_first_chat(folder: Path, environment: dict[str, str]) -> None:
    options = ("--temperature", 0, "--max-kv-size", 512, "--session", "ada")
    with _start_chat(environment, *options) as terminal:
        terminal.paste(PASTED)
        _save_picture(terminal, folder / "chat-paste.svg", "What is pasted is one message")
        terminal.type(ENTER)
        terminal.wait("1 turn", TIMEOUT)
        terminal.type("List three fruits as a Markdown list, each name in bold.", ENTER)
        terminal.wait("2 turns", TIMEOUT)
        terminal.type("/pin 1.", TAB)
        _save_picture(
            terminal, folder / "chat-complete.svg", "Tab completes commands, turns and files"
        )
        terminal.type("q", TAB, ENTER)
        terminal.wait("never forgotten", TIMEOUT)
        terminal.type("/memory", ENTER)
        terminal.wait("policy sliding", TIMEOUT)
        _save_picture(terminal, folder / "chat-memory.svg", "What is held, and what that takes")
        terminal.type(CTRL_D)
        terminal.ended(TIMEOUT)


def _record_resumed_chat(folder: Path, environment: dict[str, str]) -> None:
    with _start_chat(environment, "--session", "ada") as terminal:
        terminal.type(CTRL_C)
        terminal.type("/regenrate", ENTER)
        terminal.wait("did you mean", TIMEOUT)
        _save_picture(
            terminal, folder / "chat-resumed.svg", "Another day: the last exchange is there"
        )


def _start_chat(environment: dict[str, str], *options: object) -> Terminal:
    terminal = Terminal("chat", *options, environment=environment)
    terminal.wait(" cells", TIMEOUT)
    return terminal


def _save_picture(terminal: Terminal, file: Path, title: str) -> None:
    terminal.settle()
    file.write_text(terminal.svg(title), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
