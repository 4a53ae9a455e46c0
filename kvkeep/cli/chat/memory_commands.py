"""The chat commands that show or change memory; each is a row of `COMMANDS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvkeep.cli.output import counted
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep.cli.chat.branches import Branches
    from kvkeep.cli.chat.passages import Passage

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Command(Generic[Subject]):
    """A command at the prompt.

    usage, meaning: its line in help. run: called with the target (the chat or its branches) and
    the words after the name; returns the message for the user.
    """

    usage: str
    meaning: str
    run: Callable[[Subject, str], str]


def run_command(line: str, branches: "Branches") -> str:
    """Run a memory command line and return the message for the user.

    Raises KvkeepError for a command that does not exist or that fails; nothing has changed then.
    """
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise InvalidArgument(f"there is no command {name}; /help lists them")
    return command.run(branches, argument.strip())


def _pin(branches: "Branches", argument: str) -> str:
    from kvkeep.cli.chat.passages import whole

    part = whole(branches.current, argument)
    branches.current.session.pin(part.start, part.end)
    return f"{part.what} is never forgotten: {counted(part.tokens, 'token')}"


def _unpin(branches: "Branches", argument: str) -> str:
    from kvkeep.cli.chat.passages import whole

    part = whole(branches.current, argument)
    branches.current.session.unpin(part.start, part.end)
    return f"{part.what} may be forgotten"


def _forget(branches: "Branches", argument: str) -> str:
    from kvkeep.cli.chat.passages import whole

    conversation = branches.current
    part = whole(conversation, argument)
    remaining = part.with_words("") if part.words else ""
    before = len(conversation.session.tokens)
    if remaining.strip():
        conversation.session.replace(part.start, part.end, remaining)
    else:
        conversation.session.delete(part.start, part.end)
    _update_system(branches, part)
    gone = counted(before - len(conversation.session.tokens), "token")
    return f"{part.what} is forgotten: {gone}"


def _edit(branches: "Branches", argument: str) -> str:
    from kvkeep.cli.chat.passages import content, split

    what, text = split(argument)
    exact = what == "--exact"
    if exact:
        what, text = split(text)
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1]
    if not text:
        raise InvalidArgument("/edit takes what to change and its new text, as /help shows")
    conversation = branches.current
    part = content(conversation, what)
    session, before = conversation.session, len(conversation.session.tokens)
    new = part.with_words(text)
    report = session.replace(part.start, part.end, new, "suffix" if exact else "none")
    _update_system(branches, part)
    tokens = part.tokens + len(session.tokens) - before
    return (
        f"{part.what} is changed: {counted(tokens, 'token')} in the place of {part.tokens}, "
        f"{report.tokens_evaluated} evaluated in {report.seconds:.2f} s"
    )


def _update_system(branches: "Branches", part: "Passage") -> None:
    """Store an edited system prompt in the conversation: `--system` is compared with it."""
    conversation = branches.current
    if not part.what.endswith("the system prompt"):
        return
    start, end = conversation.session.places.get("system text", (0, 0))
    ids = conversation.session.tokens[start:end]
    conversation.system = conversation.codec.decode(ids) or None


def _branch(branches: "Branches", argument: str) -> str:
    branches.branch(argument)
    return f"now in {branches.name}; /switch goes back"


def _branches(branches: "Branches", argument: str) -> str:
    return "\n".join(branches.lines())


def _switch(branches: "Branches", argument: str) -> str:
    branches.switch(argument)
    return f"now in {branches.name}, {counted(len(branches.current.turns), 'turn')}"


def _keep(branches: "Branches", argument: str) -> str:
    if not argument.isdecimal():
        raise InvalidArgument(f"/keep takes a number of tokens; found {argument!r}")
    branches.current.session.keep = int(argument)
    return f"the first {counted(int(argument), 'token')} are never forgotten"


def _undo(branches: "Branches", argument: str) -> str:
    count = branches.current.undo()
    left = counted(len(branches.current.turns), "turn")
    return f"took {counted(count, 'token')} back; {left} before this"


def _memory(branches: "Branches", argument: str) -> str:
    from kvkeep.cli.memory_map import memory_map

    return memory_map(branches.current.session)


COMMANDS: dict[str, "Command[Branches]"] = {
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
}
