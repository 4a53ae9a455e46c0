"""Tab completion at the chat's prompt: commands, turns, branches, settings and files."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from kvkeep.cli.chat.commands import every_command
from kvkeep.cli.chat.settings import setting_names

if TYPE_CHECKING:
    from kvkeep.cli.chat.branches import Branches

_PASSAGE_COMMANDS = ("/pin", "/unpin", "/forget", "/edit")
_SWITCHES = ("markdown", "bar")


class ChatCompleter(Completer):
    """Completes commands and their arguments. branches: the chat's, read when Tab is pressed."""

    def __init__(self, branches: "Branches"):
        self._branches = branches
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if "\n" in text or not text.startswith("/"):
            return
        name, space, argument = text.partition(" ")
        if not space:
            commands = every_command()
            for command in commands:
                if command.startswith(name):
                    meaning = commands[command].meaning
                    yield Completion(command, -len(name), display_meta=meaning)
        elif name == "/file":
            inner = Document(argument, len(argument))
            yield from self._paths.get_completions(inner, complete_event)
        else:
            word = argument.rpartition(" ")[2]
            for candidate in self._words(name, argument.split(" ")[:-1]):
                if candidate.startswith(word):
                    yield Completion(candidate, -len(word))

    def _words(self, name: str, before: list[str]) -> Iterator[str]:
        """Yield candidates for the next word of a command's argument, after the words before it."""
        if name == "/edit" and before == ["--exact"]:
            before = []
        if name in _PASSAGE_COMMANDS and not before:
            yield from self._passages()
            if name == "/edit":
                yield "--exact"
        elif name == "/switch" and not before:
            yield from self._branches.others
        elif name == "/set":
            if not before:
                yield from setting_names()
            elif len(before) == 1 and before[0] in _SWITCHES:
                yield from ("on", "off")

    def _passages(self) -> Iterator[str]:
        """Yield the names of passages: the system prompt, turns, and their parts."""
        places = self._branches.current.session.places
        if "system" in places:
            yield "system"
        turns = self._branches.current.turns
        if turns:
            yield "last"
        for turn in reversed(turns):
            yield str(turn)
            yield from (
                f"{turn}.{p}" for p in ("question", "answer") if f"turn {turn} {p}" in places
            )
