"""Where the user's words come from: a terminal, or lines of a pipe or file."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.cli.output import say
from kvkeep.cli.signals import termination_signal
from kvkeep.cli.text_input import require_utf8
from kvkeep.cli.type_ahead import type_ahead
from kvkeep.errors import InvalidArgument
from kvkeep.models.hub.library import home, home_is_set
from kvkeep.storage.files.text import decode_text

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

QUOTES = '"""'
_HINT = "Ctrl-D ends the chat, and so does /quit; /help lists what else can be done"


class Prompt:
    """Standard input, line by line. interactive: whether somebody sits there."""

    interactive = False

    def read(self, bar: str = "") -> str | None:
        """What is said next, or None at the end. bar: stays at the foot of a terminal meanwhile."""
        content = sys.stdin.buffer.readline()
        return decode_text(content, "standard input").rstrip("\r\n") if content else None

    def offer(self, words: str) -> None:
        """What was said and not taken in is there to be said again."""

    def busy(self) -> AbstractContextManager[None]:
        """While the block runs nothing is read: keys typed meanwhile are for the next prompt."""
        return nullcontext()


class PlainPrompt(Prompt):
    """Somebody at a terminal of which standard output is no part, and which cannot be drawn on."""

    interactive = True

    def read(self, bar: str = "") -> str | None:
        while True:
            say("> ", end="")
            try:
                line = sys.stdin.readline()
            except KeyboardInterrupt:
                say("")
                if termination_signal():
                    raise
                say(_HINT)
                continue
            except OSError:  # the terminal is gone
                return None
            if not line:
                say("")
                return None
            if _is_text(line):
                return line.rstrip("\n")


class EditedPrompt(Prompt):
    """Somebody at a terminal: with lines to be edited, a history, and completion.

    What is pasted is one message, however many lines it has.
    """

    interactive = True

    def __init__(self, completer: "Completer"):
        self._offered, self._bar = "", ""
        self._session = self._made(completer)

    def _made(self, completer: "Completer") -> "PromptSession[str]":
        from prompt_toolkit import PromptSession
        from prompt_toolkit.formatted_text import ANSI
        from prompt_toolkit.output.defaults import create_output
        from prompt_toolkit.styles import Style

        return PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            completer=completer,
            complete_while_typing=False,
            history=_history(),
            key_bindings=_keys(),
            bottom_toolbar=lambda: ANSI(self._bar) if self._bar else None,
            style=Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack"}),
            output=None if sys.stdout.isatty() else create_output(sys.stderr),
        )

    def read(self, bar: str = "") -> str | None:
        self._bar = bar
        while True:
            default, self._offered = self._offered, ""
            try:
                # Ctrl-C is a key here; as a signal it comes from another program.
                words = self._session.prompt(default=default, handle_sigint=False)
            except _EmptyLineInterrupted:
                say(_HINT)
            except KeyboardInterrupt:
                if termination_signal():
                    raise
                say(_HINT)
            except (EOFError, OSError):  # Ctrl-D, or the terminal is gone
                return None
            else:
                if _is_text(words):
                    return _unquoted(words)

    def offer(self, words: str) -> None:
        self._offered = words

    def busy(self) -> AbstractContextManager[None]:
        return type_ahead()


class _EmptyLineInterrupted(Exception):
    """Ctrl-C where nothing was typed."""


def prompt(completer: Callable[[], "Completer"]) -> Prompt:
    """The one for this standard input. completer: of what is typed, where that can be shown."""
    if not sys.stdin.isatty():
        return Prompt()
    drawable = os.environ.get("TERM", "") not in ("", "dumb")
    if not drawable or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return PlainPrompt()
    return EditedPrompt(completer())


def _keys() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: "KeyPressEvent") -> None:
        buffer = event.current_buffer
        state = buffer.complete_state
        if state is not None and state.current_completion is not None:
            buffer.complete_state = None  # it is taken, and not yet sent
        elif _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def _(event: "KeyPressEvent") -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=_EmptyLineInterrupted())

    return keys


def _history() -> "History":
    """Of all chats. In memory alone where it cannot be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()

    class LenientHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError, ValueError):  # a full disk; bytes that are no text
                super().store_string(string)

    return LenientHistory(str(path))


def history_file() -> Path:
    """What was typed in chats."""
    if home_is_set():
        return home() / "history"
    from platformdirs import user_state_path

    return Path(user_state_path("kvkeep")) / "history"


def _is_open(text: str) -> bool:
    """Whether a text between three quotes has not come to its end."""
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) < 2


def _unquoted(text: str) -> str:
    bare = text.strip()
    quoted = len(bare) >= 2 * len(QUOTES) and bare.startswith(QUOTES) and bare.endswith(QUOTES)
    return bare[len(QUOTES) : -len(QUOTES)].strip("\n") if quoted else text


def _is_text(line: str) -> bool:
    """Says so where it is not: bytes that are no UTF-8 end no chat."""
    try:
        require_utf8(line, "the line")
    except InvalidArgument as error:
        say(str(error))
        return False
    return True
