"""What can be done at the chat's prompt besides talking: one row of `COMMANDS` each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.cli.report import counted, megabytes
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Session
    from kvkeep.cli.conversation import Conversation


def run_command(line: str, session: "Session", conversation: "Conversation") -> str:
    """Does what a line that begins with "/" asks for; what to tell the user.

    Raises InvalidArgument for a command that does not exist or cannot be done now.
    """
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidArgument(f"there is no command {name}; /help lists them")
    return command.do(session, conversation, argument.strip())


def _help(session: "Session", conversation: "Conversation", argument: str) -> str:
    return "\n".join(f"  {command.usage:<9}  {command.meaning}" for command in COMMANDS.values())


def _keep(session: "Session", conversation: "Conversation", argument: str) -> str:
    if not argument.isdecimal():
        raise InvalidArgument(f"/keep takes a number of tokens; found {argument!r}")
    session.keep = int(argument)
    return _memory(session, conversation, "")


def _undo(session: "Session", conversation: "Conversation", argument: str) -> str:
    count = conversation.undo()
    left = counted(conversation.turns, "turn")
    return f"took {counted(count, 'token')} back; {left} before this"


def _memory(session: "Session", conversation: "Conversation", argument: str) -> str:
    cache = session.cache
    kept = min(session.keep, cache.cells)
    return (
        f"{cache.cells} of {session.max_kv_size} cells, {megabytes(cache.nbytes)}: {kept} kept for "
        f"ever, {cache.cells - kept} in the window; policy {session.policy}, "
        f"{counted(cache.time, 'token')} so far"
    )


@dataclass(frozen=True)
class _Command:
    usage: str
    meaning: str
    do: Callable[["Session", "Conversation", str], str]


COMMANDS = {
    "/help": _Command("/help", "this list", _help),
    "/keep": _Command("/keep N", "never forget the first N tokens", _keep),
    "/undo": _Command("/undo", "take the last turn back, as far as memory still holds it", _undo),
    "/memory": _Command("/memory", "what is held, and what that takes", _memory),
    "/exit": _Command("/exit", "end the chat, as Ctrl-D does", lambda *_: ""),
}
