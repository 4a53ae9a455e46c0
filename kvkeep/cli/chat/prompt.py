"""Sources of the user's messages: a terminal, or lines of a pipe or file."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.cli.options import require_utf8
from kvkeep.cli.output import say
from kvkeep.cli.terminal import termination_signal, type_ahead
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
    """Standard input from a pipe or file, line by line. interactive: whether it is a terminal."""

    interactive = False

    def read(self, bar: str = "") -> str | None:
        """Return the next message, or None at the end of input.

        bar: a status line, shown at the foot of a terminal meanwhile.
        """
        content = sys.stdin.buffer.readline()
        return decode_text(content, "standard input").rstrip("\r\n") if content else None

    def offer(self, message: str) -> None:
        """Put a message that was not prefilled into the next prompt, for editing."""

    def busy(self) -> AbstractContextManager[None]:
        """Hold keys that are typed during the block for the next prompt."""
        return nullcontext()


class PlainPrompt(Prompt):
    """A plain prompt, for terminals without cursor control and for redirected output."""

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
            except OSError:  # the terminal was closed
                return None
            if not line:
                say("")
                return None
            if _is_text(line):
                return line.rstrip("\n")


class EditedPrompt(Prompt):
    """A prompt with line editing, history and completion, by prompt_toolkit.

    Pasted text is one message, however many lines it has.
    """

    interactive = True

    def __init__(self, completer: "Completer"):
        self._offered, self._bar = "", ""
        self._session = self._make_session(completer)

    def _make_session(self, completer: "Completer") -> "PromptSession[str]":
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
                # Ctrl-C is a key here. A SIGINT comes from another program.
                message = self._session.prompt(default=default, handle_sigint=False)
            except _EmptyLineInterrupted:
                say(_HINT)
            except KeyboardInterrupt:
                if termination_signal():
                    raise
                say(_HINT)
            except (EOFError, OSError):  # Ctrl-D, or the terminal was closed
                return None
            else:
                if _is_text(message):
                    return _unquoted(message)

    def offer(self, message: str) -> None:
        self._offered = message

    def busy(self) -> AbstractContextManager[None]:
        return type_ahead()


class _EmptyLineInterrupted(Exception):
    """Ctrl-C at an empty prompt."""


def prompt(completer: Callable[[], "Completer"]) -> Prompt:
    """Return the prompt for standard input.

    completer: makes the completer, if the terminal supports completion.
    """
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
            buffer.complete_state = None  # Enter accepts the completion without sending the message
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
    """Return the input history of all chats; in memory only if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()

    class LenientHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError, ValueError):  # the disk is full, or the text is not valid UTF-8
                super().store_string(string)

    return LenientHistory(str(path))


def history_file() -> Path:
    """Return the file with the input history of chats."""
    if home_is_set():
        return home() / "history"
    from platformdirs import user_state_path

    return Path(user_state_path("kvkeep")) / "history"


def _is_open(text: str) -> bool:
    """Whether a text begins with three quotes that are not closed yet."""
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) < 2


def _unquoted(text: str) -> str:
    """Remove the three quotes around a message, if any."""
    bare = text.strip()
    quoted = len(bare) >= 2 * len(QUOTES) and bare.startswith(QUOTES) and bare.endswith(QUOTES)
    return bare[len(QUOTES) : -len(QUOTES)].strip("\n") if quoted else text


def _is_text(line: str) -> bool:
    """Whether a line is UTF-8. Prints a message if not: invalid bytes do not end the chat."""
    try:
        require_utf8(line, "the line")
    except InvalidArgument as error:
        say(str(error))
        return False
    return True
