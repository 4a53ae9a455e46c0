"""Commands at the chat's prompt; those that change memory are in `memory_commands.py`."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep.cli.chat.memory_commands import COMMANDS as MEMORY_COMMANDS
from kvkeep.cli.chat.memory_commands import Command
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import read_text_file

if TYPE_CHECKING:
    from kvkeep.cli.chat.branches import Branches
    from kvkeep.cli.chat.prompt import Prompt
    from kvkeep.cli.chat.settings import ChatSettings


class CommandTarget(Protocol):
    """The parts of a chat that commands use. `loop.ChatLoop` implements it, above this module."""

    branches: "Branches"
    settings: "ChatSettings"
    prompt: "Prompt"
    commands: Mapping[str, Callable[[str], str]]

    def ask(self, words: str, line: str | None = None) -> None: ...
    def again(self) -> None: ...
    def save(self, name: str) -> str: ...


_LEAVING = ("/quit", "/exit", "/bye")
_FILE = re.compile(r'"([^"]+)"|((?:\\.|\S)+)')


class LeaveChat(Exception):
    """Raised by commands that end the chat."""


def is_command(message: str) -> bool:
    """Whether the input is a command rather than a message.

    Input of several lines, such as pasted text, is a message, and so is input that begins with a
    path.
    """
    line = message.strip()
    if not line.startswith("/") or "\n" in line:
        return False
    first = line.split()[0]
    return first in every_command() or first == "/" or not ("/" in first[1:] or _exists(first))


def run_chat_command(line: str, chat: "CommandTarget") -> str:
    """Run a command line and return the message for the user, "" for none.

    Raises LeaveChat for commands that end the chat, KvkeepError for failed or unknown ones.
    """
    name, _, argument = line.strip().partition(" ")
    if name in _LEAVING:
        raise LeaveChat
    command = COMMANDS.get(name)
    if command is not None:
        return command.run(chat, argument.strip())
    memory_command = MEMORY_COMMANDS.get(name)
    if memory_command is not None:
        override = chat.commands.get(name)
        return (
            override(argument) if override else memory_command.run(chat.branches, argument.strip())
        )
    near = difflib.get_close_matches(name, every_command(), 1)
    suggestion = f"did you mean {near[0]}? " if near else ""
    raise InvalidArgument(f"there is no command {name}; {suggestion}/help lists them")


def every_command() -> "dict[str, Command[Any]]":
    """Return all commands by name, in the order of help."""
    return {**COMMANDS, **MEMORY_COMMANDS, **dict.fromkeys(_LEAVING, _QUIT)}


def _help(chat: "CommandTarget", argument: str) -> str:
    shown: dict[str, Command[Any]] = {**COMMANDS, **MEMORY_COMMANDS, "/quit": _QUIT}
    rows = [f"  {command.usage:<21}  {command.meaning}" for command in shown.values()]
    return "\n".join([*rows, _HELP_PASSAGES, *([_HELP_KEYS] if chat.prompt.interactive else [])])


def _regenerate(chat: "CommandTarget", argument: str) -> str:
    chat.again()
    return ""


def _clear(chat: "CommandTarget", argument: str) -> str:
    session = chat.branches.current.session
    session.rewind(len(session.tokens))
    return "all turns are forgotten; the chat begins anew"


def _save(chat: "CommandTarget", argument: str) -> str:
    return chat.save(argument)


def _set(chat: "CommandTarget", argument: str) -> str:
    name, _, value = argument.partition(" ")
    if not name:
        return "\n".join(chat.settings.lines())
    chat.settings.set(name, value.strip())
    return next(line.strip() for line in chat.settings.lines() if line.split()[0] == name)


def _file(chat: "CommandTarget", argument: str) -> str:
    match = _FILE.match(argument)
    if match is None:
        raise InvalidArgument(
            "/file takes the path of a text file, and optionally a question about it"
        )
    path = Path(match[1] or re.sub(r"\\(.)", r"\1", match[2])).expanduser()
    try:
        text = read_text_file(path)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    question = argument[match.end() :].strip()
    if not text.strip():
        raise InvalidArgument(f"{path} is empty")
    chat.ask(f"{text.rstrip()}\n\n{question}" if question else text, line=f"/file {argument}")
    return ""


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a null byte in the path
        return False


_HELP_PASSAGES = """\
WHAT is a turn's number (3), a part of it (3.question, 3.answer), last, system, or "quoted words".
With --session NAME, the branch that is current is saved under it, the others as NAME-BRANCH."""
_HELP_KEYS = """\
Alt-Enter begins another line, and so does Enter within three quotes (\"\"\"). Tab completes. Ctrl-C
stops an answer or clears the line; Ctrl-D ends the chat."""
_QUIT: Command[Any] = Command("/quit", "end the chat, as Ctrl-D and /exit do", lambda *_: "")

COMMANDS: dict[str, "Command[CommandTarget]"] = {
    "/help": Command("/help", "this list", _help),
    "/file": Command("/file PATH [TEXT]", "say what is in a file, and TEXT after it", _file),
    "/regenerate": Command("/regenerate", "have the last answer written anew", _regenerate),
    "/clear": Command("/clear", "forget all turns; the system prompt stays", _clear),
    "/save": Command("/save [NAME]", "save now, under a name from now on", _save),
    "/set": Command("/set [NAME VALUE]", "show or change temperature, markdown...", _set),
}
