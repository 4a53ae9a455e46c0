"""What can be done at the chat's prompt besides talking; those that change memory: `slash.py`."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep.cli.chat.memory_commands import COMMANDS as OF_MEMORY
from kvkeep.cli.chat.memory_commands import Command
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.text import read_text_file

if TYPE_CHECKING:
    from kvkeep.cli.chat.branches import Branches
    from kvkeep.cli.chat.prompt import Prompt
    from kvkeep.cli.chat.settings import ChatSettings


class CommandTarget(Protocol):
    """What commands ask of a chat; see `loop.ChatLoop`."""

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
    """The user ends the chat."""


def is_command(words: str) -> bool:
    """Whether what was typed is to be done, rather than said.

    Not where it has several lines, as what is pasted has, nor where it begins with a path.
    """
    line = words.strip()
    if not line.startswith("/") or "\n" in line:
        return False
    first = line.split()[0]
    return first in every_command() or first == "/" or not ("/" in first[1:] or _exists(first))


def run_chat_command(line: str, talk: "CommandTarget") -> str:
    """Does it; what to tell the user, if anything. Raises KvkeepError, Leave."""
    name, _, argument = line.strip().partition(" ")
    if name in _LEAVING:
        raise LeaveChat
    own = COMMANDS.get(name)
    if own is not None:
        return own.do(talk, argument.strip())
    of_memory = OF_MEMORY.get(name)
    if of_memory is not None:
        replaced = talk.commands.get(name)
        return replaced(argument) if replaced else of_memory.do(talk.branches, argument.strip())
    near = difflib.get_close_matches(name, every_command(), 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise InvalidArgument(f"there is no command {name}; {meant}/help lists them")


def every_command() -> "dict[str, Command[Any]]":
    """In the order of help."""
    return {**COMMANDS, **OF_MEMORY, **dict.fromkeys(_LEAVING, _QUIT)}


def _help(talk: "CommandTarget", argument: str) -> str:
    shown: dict[str, Command[Any]] = {**COMMANDS, **OF_MEMORY, "/quit": _QUIT}
    rows = [f"  {command.usage:<21}  {command.meaning}" for command in shown.values()]
    return "\n".join([*rows, _WHAT, *([_KEYS] if talk.prompt.interactive else [])])


def _regenerate(talk: "CommandTarget", argument: str) -> str:
    talk.again()
    return ""


def _clear(talk: "CommandTarget", argument: str) -> str:
    session = talk.branches.current.session
    session.rewind(len(session.tokens))
    return "all turns are forgotten; the chat begins anew"


def _save(talk: "CommandTarget", argument: str) -> str:
    return talk.save(argument)


def _set(talk: "CommandTarget", argument: str) -> str:
    name, _, value = argument.partition(" ")
    if not name:
        return "\n".join(talk.settings.lines())
    talk.settings.set(name, value.strip())
    return next(line.strip() for line in talk.settings.lines() if line.split()[0] == name)


def _file(talk: "CommandTarget", argument: str) -> str:
    found = _FILE.match(argument)
    if found is None:
        raise InvalidArgument("/file takes the path of a text, and what is asked about it, if any")
    path = Path(found[1] or re.sub(r"\\(.)", r"\1", found[2])).expanduser()
    try:
        text = read_text_file(path)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error
    question = argument[found.end() :].strip()
    if not text.strip():
        raise InvalidArgument(f"{path} is empty")
    talk.ask(f"{text.rstrip()}\n\n{question}" if question else text, line=f"/file {argument}")
    return ""


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a zero byte
        return False


_WHAT = """\
WHAT is a turn's number (3), a part of it (3.question, 3.answer), last, system, or "quoted words".
With --session NAME, the branch that is current is saved under it, the others as NAME-BRANCH."""
_KEYS = """\
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
