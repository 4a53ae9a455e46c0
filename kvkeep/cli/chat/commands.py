"""Commands at the chat's prompt; each is a row of `COMMANDS`."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from kvkeep.cli.chat.passages import Passage, find_passage, split_passage
from kvkeep.cli.memory_map import memory_map
from kvkeep.cli.output import counted
from kvkeep.errors import InvalidArgument
from kvkeep.session.conversation import Conversation
from kvkeep.storage.files.text import read_text_file

if TYPE_CHECKING:
    from kvkeep.cli.chat.branches import Branches
    from kvkeep.cli.chat.settings import ChatSettings

_PATH = re.compile(r'"([^"]+)"|((?:\\.|\S)+)')
_HELP_PASSAGES = """\
WHAT is a turn's number (3), a part of it (3.question, 3.answer), last, system, or "quoted words".
With --session NAME, the branch that is current is saved under it, the others as NAME-BRANCH."""
_HELP_KEYS = """\
Alt-Enter begins another line, and so does Enter within three quotes (\"\"\"). Tab completes. Ctrl-C
stops an answer or clears the line; Ctrl-D ends the chat."""


class CommandTarget(Protocol):
    """The parts of a chat that commands use. `loop.ChatLoop` implements it, above this module."""

    branches: "Branches"
    settings: "ChatSettings"
    commands: "Mapping[str, Command]"

    @property
    def interactive(self) -> bool: ...
    def ask(self, message: str, line: str | None = None) -> None: ...
    def regenerate(self) -> None: ...
    def save(self, name: str) -> str: ...


@dataclass(frozen=True)
class Command:
    """A command at the prompt.

    usage, meaning: its line in help. run: called with the chat and the words after the command's
    name; returns the message for the user, "" for none.
    """

    usage: str
    meaning: str
    run: Callable[[CommandTarget, str], str]


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
    word = line.split()[0]
    return word in COMMANDS or word == "/" or not ("/" in word[1:] or _exists(word))


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a null byte in the path
        return False


def run_command(line: str, chat: CommandTarget) -> str:
    """Run a command line and return the message for the user, "" for none.

    Raises LeaveChat for commands that end the chat, KvkeepError for unknown ones, and for those
    that fail: nothing has changed then.
    """
    name, _, argument = line.strip().partition(" ")
    command = chat.commands.get(name)
    if command is not None:
        return command.run(chat, argument.strip())
    similar = difflib.get_close_matches(name, chat.commands, 1)
    suggestion = f"did you mean {similar[0]}? " if similar else ""
    raise InvalidArgument(f"there is no command {name}; {suggestion}/help lists them")


def _help(chat: CommandTarget, argument: str) -> str:
    commands = dict.fromkeys(chat.commands.values())  # without aliases
    rows = [f"  {command.usage:<21}  {command.meaning}" for command in commands]
    return "\n".join([*rows, _HELP_PASSAGES, *([_HELP_KEYS] if chat.interactive else [])])


def _regenerate(chat: CommandTarget, argument: str) -> str:
    chat.regenerate()
    return ""


def _clear(chat: CommandTarget, argument: str) -> str:
    session = chat.branches.current.session
    session.rewind(len(session.tokens))
    return "all turns are forgotten; the chat begins anew"


def _save(chat: CommandTarget, argument: str) -> str:
    return chat.save(argument)


def _set(chat: CommandTarget, argument: str) -> str:
    name, _, value = argument.partition(" ")
    if not name:
        return "\n".join(chat.settings.lines())
    chat.settings.set(name, value.strip())
    return next(line.strip() for line in chat.settings.lines() if line.split()[0] == name)


def _file(chat: CommandTarget, argument: str) -> str:
    match = _PATH.match(argument)
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


def _quit(chat: CommandTarget, argument: str) -> NoReturn:
    raise LeaveChat


def _memory(chat: CommandTarget, argument: str) -> str:
    return memory_map(chat.branches.current.session)


def _pin(chat: CommandTarget, argument: str) -> str:
    passage = find_passage(chat.branches.current, argument)
    chat.branches.current.session.pin(passage.start, passage.end)
    return f"{passage.what} is never forgotten: {counted(passage.tokens, 'token')}"


def _unpin(chat: CommandTarget, argument: str) -> str:
    passage = find_passage(chat.branches.current, argument)
    chat.branches.current.session.unpin(passage.start, passage.end)
    return f"{passage.what} may be forgotten"


def _forget(chat: CommandTarget, argument: str) -> str:
    conversation = chat.branches.current
    session, passage = conversation.session, find_passage(conversation, argument)
    remaining = passage.with_words("") if passage.words else ""
    count = len(session.tokens)
    if remaining.strip():
        session.replace(passage.start, passage.end, remaining)
    else:
        session.delete(passage.start, passage.end)
    _update_system(conversation, passage)
    return f"{passage.what} is forgotten: {counted(count - len(session.tokens), 'token')}"


def _edit(chat: CommandTarget, argument: str) -> str:
    what, text = split_passage(argument)
    exact = what == "--exact"
    if exact:
        what, text = split_passage(text)
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1]
    if not text:
        raise InvalidArgument("/edit takes what to change and its new text, as /help shows")
    conversation = chat.branches.current
    session, passage = conversation.session, find_passage(conversation, what, text_alone=True)
    count, new_text = len(session.tokens), passage.with_words(text)
    report = session.replace(passage.start, passage.end, new_text, "suffix" if exact else "none")
    _update_system(conversation, passage)
    new_tokens = counted(passage.tokens + len(session.tokens) - count, "token")
    return (
        f"{passage.what} is changed: {new_tokens} in the place of {passage.tokens}, "
        f"{report.tokens_evaluated} evaluated in {report.seconds:.2f} s"
    )


def _update_system(conversation: Conversation, passage: Passage) -> None:
    """Store an edited system prompt in the conversation: `--system` is compared with it."""
    if passage.what.endswith("the system prompt"):
        start, end = conversation.session.places.get("system text", (0, 0))
        text = conversation.codec.decode(conversation.session.tokens[start:end])
        conversation.system = text or None


def _undo(chat: CommandTarget, argument: str) -> str:
    count = chat.branches.current.undo()
    remaining = counted(len(chat.branches.current.turns), "turn")
    return f"took {counted(count, 'token')} back; {remaining} before this"


def _keep(chat: CommandTarget, argument: str) -> str:
    if not argument.isdecimal():
        raise InvalidArgument(f"/keep takes a number of tokens; found {argument!r}")
    chat.branches.current.session.keep = int(argument)
    return f"the first {counted(int(argument), 'token')} are never forgotten"


def _branch(chat: CommandTarget, argument: str) -> str:
    chat.branches.branch(argument)
    return f"now in {chat.branches.name}; /switch goes back"


def _branches(chat: CommandTarget, argument: str) -> str:
    return "\n".join(chat.branches.lines())


def _switch(chat: CommandTarget, argument: str) -> str:
    chat.branches.switch(argument)
    turns = counted(len(chat.branches.current.turns), "turn")
    return f"now in {chat.branches.name}, {turns}"


_QUIT = Command("/quit", "end the chat, as Ctrl-D and /exit do", _quit)
COMMANDS: Mapping[str, Command] = {
    "/help": Command("/help", "this list", _help),
    "/file": Command("/file PATH [TEXT]", "say what is in a file, and TEXT after it", _file),
    "/regenerate": Command("/regenerate", "have the last answer written anew", _regenerate),
    "/clear": Command("/clear", "forget all turns; the system prompt stays", _clear),
    "/save": Command("/save [NAME]", "save now, under a name from now on", _save),
    "/set": Command("/set [NAME VALUE]", "show or change temperature, markdown...", _set),
    "/memory": Command("/memory", "a picture of what is held, and what that takes", _memory),
    "/pin": Command("/pin WHAT", "never forget it", _pin),
    "/unpin": Command("/unpin WHAT", "let it be forgotten in its time", _unpin),
    "/forget": Command("/forget WHAT", "take it out of memory now", _forget),
    "/edit": Command(
        "/edit WHAT NEW TEXT",
        "change it where it is; --exact before WHAT evaluates what follows anew",
        _edit,
    ),
    "/undo": Command("/undo", "take the last turn back, as far as memory still holds it", _undo),
    "/keep": Command("/keep N", "never forget the first N tokens", _keep),
    "/branch": Command("/branch [NAME]", "go on in a copy; it shares memory", _branch),
    "/branches": Command("/branches", "list them", _branches),
    "/switch": Command("/switch NAME", "go on in another branch", _switch),
    **dict.fromkeys(("/quit", "/exit", "/bye"), _QUIT),
}
