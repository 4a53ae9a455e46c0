"""Completion at the chat's prompt."""

from collections.abc import Callable, Iterable, Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.commands import COMMANDS
from kvkeep.cli.chat.file_paths import escape_path, unfinished_path
from kvkeep.cli.chat.settings import SETTINGS, SWITCHES


class ChatCompleter(Completer):
    """Completes commands, and arguments that name a file, setting, branch or part of the chat.

    branches: returns those of the chat, None if it is not loaded yet.
    """

    def __init__(self, branches: Callable[[], Branches | None]):
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
            for candidate, (_, meaning) in COMMANDS.items():
                if candidate.startswith(name):
                    yield Completion(candidate, -len(name), display_meta=meaning)
        elif name == "/file":
            yield from self._path_completions(argument, complete_event)
        else:
            *words, prefix = argument.split(" ")
            for candidate in self._candidates(name, words):
                if candidate.startswith(prefix):
                    yield Completion(candidate, -len(prefix))

    def _path_completions(
        self, argument: str, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """Complete a path, unless it has ended. Outside of quotes, its spaces are escaped."""
        if typed := unfinished_path(argument):
            path, is_quoted = typed
            document = Document(path, len(path))
            for completion in self._paths.get_completions(document, complete_event):
                text = completion.text if is_quoted else escape_path(completion.text)
                yield Completion(text, completion.start_position, completion.display)

    def _candidates(self, name: str, words: list[str]) -> Iterator[str]:
        """Yield candidates for the word that follows `words` in a command's argument."""
        if name == "/edit" and words == ["--exact"]:
            words = []
        branches = self._branches()
        if name in ("/pin", "/unpin", "/forget", "/edit") and not words:
            if branches is not None:
                yield from _passage_references(branches)
            if name == "/edit":
                yield "--exact"
        elif name == "/switch" and not words:
            yield from branches.other_names if branches else ()
        elif name == "/set" and not words:
            yield from SETTINGS
        elif name == "/set" and len(words) == 1 and words[0] in SWITCHES:
            yield from ("on", "off")


def _passage_references(branches: Branches) -> Iterator[str]:
    """Yield the names of parts of the chat: "system", "last", "3", "3.question", "3.answer"."""
    spans = branches.current.session.span_ranges
    if "system" in spans:
        yield "system"
    turns = branches.current.turns
    if turns:
        yield "last"
    for turn in reversed(turns):
        yield str(turn)
        for part in ("question", "answer"):
            if f"turn {turn} {part}" in spans:
                yield f"{turn}.{part}"
