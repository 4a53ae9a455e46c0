"""Reading of the user's messages from a terminal, a pipe or a file."""

import os
import re
import sys
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.styles import Style

from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.completer import ChatCompleter
from kvkeep.cli.options import require_utf8
from kvkeep.cli.output import say
from kvkeep.cli.terminal import hold_typed_keys, is_foreground, termination_signal
from kvkeep.errors import InvalidArgument
from kvkeep.models.hub.library import home, home_is_set
from kvkeep.storage.files.text import decode_text

_TRIPLE_QUOTES = '"""'
_FIRST_DRAWING_SECONDS = 0.02
_EXIT_HINT = "Ctrl-D or /quit ends the chat; /help lists all commands"


class MessageReader:
    """Reads messages from a pipe or file: each line is one. Subclasses read from a terminal.

    branches: whose parts a terminal completes; None until the chat is loaded.
    """

    is_interactive = False  # whether standard input is a terminal
    can_read_early = False  # whether `read_during` shows a prompt
    branches: Branches | None = None

    def read(self, status: str = "") -> str | None:
        """Return the next message, None at the end of the input. status: shown below the prompt."""
        line = sys.stdin.buffer.readline()
        return decode_text(line, "standard input").rstrip("\r\n") if line else None

    def read_during(self, start: Callable[[], Future[Any]], status: str) -> bool:
        """Let the user type until a future is done; the next `read` continues with the input.

        A message that is sent meanwhile is what the next `read` returns. Returns False if the user
        ended the chat. start: called once, when the prompt is there. status: shown below it.
        """
        wait([start()])
        return True

    def put_back(self, message: str) -> None:
        """Put a message back into the input line, so that the user can edit and send it again."""

    def hold_keys(self) -> AbstractContextManager[None]:
        """Return a context manager: keys typed within its block go to the next prompt."""
        return nullcontext()

    def ctrl_c_pressed(self) -> bool:
        """Whether Ctrl-C was typed between the end of `read` and the block of `hold_keys`."""
        return False


class PlainTerminalReader(MessageReader):
    """Reads lines at a plain prompt, for terminals without cursor control."""

    is_interactive = True

    def read(self, status: str = "") -> str | None:
        while True:
            say("> ", end="")
            try:
                line = sys.stdin.readline()
            except KeyboardInterrupt:
                say("")
                if termination_signal():
                    raise
                say(_EXIT_HINT)
                continue
            except OSError:  # the terminal was closed
                return None
            if not line:
                say("")
                return None
            if _is_utf8(line):
                return line.rstrip("\n")


class LineEditingReader(MessageReader):
    """Reads at a prompt with line editing, history and completion. Pasted text is one message."""

    is_interactive = can_read_early = True

    def __init__(self) -> None:
        self._initial_text, self._status = "", ""
        self._sent_early: str | None = None
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            completer=ChatCompleter(lambda: self.branches),
            complete_while_typing=False,
            history=_history(),
            key_bindings=_key_bindings(),
            bottom_toolbar=lambda: ANSI(self._status) if self._status else None,
            style=Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack"}),
            output=None if sys.stdout.isatty() else create_output(sys.stderr),
        )

    def read(self, status: str = "") -> str | None:
        if self._sent_early is not None:
            message, self._sent_early = self._sent_early, None
            return message
        return self._read(status)

    def read_during(self, start: Callable[[], Future[Any]], status: str) -> bool:
        start_once = cache(start)

        def follow(loop: AbstractEventLoop) -> None:
            def when_loaded(_: Future[Any]) -> None:
                with suppress(RuntimeError):  # the loop is closed: the user has sent a message
                    loop.call_soon_threadsafe(self._leave_prompt)

            start_once().add_done_callback(when_loaded)

        def at_start() -> None:
            # Not before the prompt is drawn: importing torch leaves other threads little time.
            loop = get_running_loop()
            loop.call_later(_FIRST_DRAWING_SECONDS, follow, loop)

        try:
            with patch_stdout(raw=True):  # messages of the other thread appear above the prompt
                message = self._read(status, at_start)
        except _Loaded:
            return True
        finally:
            self._session.app.erase_when_done = False
        if message is None:
            return False
        self._sent_early = message
        loading = start_once()
        with self.hold_keys():
            if self.ctrl_c_pressed():  # between the prompt and this block it is a typed key
                raise KeyboardInterrupt
            wait([loading])
        return True

    def _leave_prompt(self) -> None:
        """Remove the prompt from the screen, and keep what is typed for the next one."""
        app = self._session.app
        if app.is_running and not app.is_done:
            self._initial_text = self._session.default_buffer.text
            app.erase_when_done = True
            app.exit(exception=_Loaded)

    def _read(self, status: str, at_start: Callable[[], None] | None = None) -> str | None:
        """Read a message, None at the end. at_start: called when the prompt is there."""
        self._status = status
        while True:
            default, self._initial_text = self._initial_text, ""
            try:
                # Ctrl-C is a key here. A SIGINT comes from another program.
                message = self._session.prompt(
                    default=default, handle_sigint=False, pre_run=at_start
                )
            except _EmptyLineInterrupted:
                say(_EXIT_HINT)
            except KeyboardInterrupt:
                if termination_signal():
                    raise
                say(_EXIT_HINT)
            except (EOFError, OSError):  # Ctrl-D, or the terminal was closed
                return None
            else:
                if _is_utf8(message):
                    return _without_triple_quotes(message)

    def put_back(self, message: str) -> None:
        self._initial_text = message

    def hold_keys(self) -> AbstractContextManager[None]:
        return hold_typed_keys()

    def ctrl_c_pressed(self) -> bool:
        # The terminal is in raw mode then: Ctrl-C is a typed key, which is removed here.
        terminal_input = self._session.input
        keys = get_typeahead(terminal_input)
        with suppress(OSError):
            if is_foreground(terminal_input.fileno()):
                keys += terminal_input.read_keys()
        other_keys = [key_press for key_press in keys if key_press.key != Keys.ControlC]
        store_typeahead(terminal_input, other_keys)
        return len(other_keys) < len(keys)


class _EmptyLineInterrupted(Exception):
    """Raised by Ctrl-C if nothing is typed."""


class _Loaded(Exception):
    """Raised at the prompt of `read_during` when the chat is loaded, or that has failed."""


def make_message_reader() -> MessageReader:
    if not sys.stdin.isatty():
        return MessageReader()
    has_cursor_control = os.environ.get("TERM", "") not in ("", "dumb")
    if has_cursor_control and (sys.stdout.isatty() or sys.stderr.isatty()):
        return LineEditingReader()
    return PlainTerminalReader()


def _key_bindings() -> KeyBindings:
    """Return the actions of Enter (send), Alt-Enter (new line) and Ctrl-C (clear the input)."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer, text = event.current_buffer, event.current_buffer.text
        completion_state = buffer.complete_state
        if completion_state is not None and completion_state.current_completion is not None:
            buffer.complete_state = None  # Enter accepts the completion without sending the message
        elif text.lstrip().startswith(_TRIPLE_QUOTES) and text.count(_TRIPLE_QUOTES) < 2:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=_EmptyLineInterrupted())

    return bindings


class _LenientHistory(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError, ValueError):  # the disk is full, or the text is not valid UTF-8
            super().store_string(string)


def _history() -> History:
    """Return the input history of all chats, in memory if its file cannot be written."""
    from platformdirs import user_state_path

    path = (home() if home_is_set() else Path(user_state_path("kvkeep"))) / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return _LenientHistory(str(path))


def _without_triple_quotes(text: str) -> str:
    """Remove the three quotes around a message, if any."""
    match = re.fullmatch(rf"\s*{_TRIPLE_QUOTES}(.*){_TRIPLE_QUOTES}\s*", text, re.DOTALL)
    return match[1].strip("\n") if match else text


def _is_utf8(line: str) -> bool:
    """Whether a line is UTF-8. If not, prints a message."""
    try:
        require_utf8(line, "the line")
    except InvalidArgument as error:
        say(str(error))
        return False
    return True
