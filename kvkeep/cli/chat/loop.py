"""The loop of a local or remote chat: read a message or command, and answer or run it."""

import sys
from abc import abstractmethod
from contextlib import suppress

from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.commands import ChatCommands, LeaveChat, is_command
from kvkeep.cli.chat.message_reader import MessageReader, make_message_reader
from kvkeep.cli.chat.printer import make_printer
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.output import TextPrinter, plural, say
from kvkeep.cli.terminal import termination_signal
from kvkeep.errors import InvalidArgument, KvkeepError

_MAX_SHOWN_LINES = 20  # of the last question, shown when a chat is resumed
_STOPPED = "[stopped]"


class PrefillAborted(Exception):
    """Raised if a question was not prefilled, because of `cause`. It can be asked again."""

    def __init__(self, cause: BaseException):
        super().__init__(str(cause))
        self.cause = cause


class ChatLoop(ChatCommands):
    """A chat at the prompt. Subclasses implement it for local and for remote sessions."""

    def __init__(
        self, branches: Branches, settings: ChatSettings, reader: MessageReader | None = None
    ):
        """reader: of the user's messages; None for a new one."""
        super().__init__(branches, settings)
        self.message_reader = reader or make_message_reader()
        self.message_reader.branches = branches
        self.is_interactive = self.message_reader.is_interactive

    @abstractmethod
    def title(self) -> str:
        """Return the model or session, and the tokens so far, to be shown at the start."""

    @abstractmethod
    def run_turn(self, message: str) -> None:
        """Prefill a question and print its answer. Raises `PrefillAborted`."""

    @abstractmethod
    def regenerate_turn(self, number: int) -> None:
        """Generate the newest turn's answer again. Raises KvkeepError if this is impossible."""

    @abstractmethod
    def do_save(self, argument: str) -> str:
        """Save the session. argument: its new name; "" for the current one."""

    @abstractmethod
    def memory_status(self) -> str:
        """Return the status line: how full the memory is, and the number of turns."""

    def after_input(self) -> None:
        """Run after each turn and each command, for example to save."""

    @abstractmethod
    def close(self) -> None:
        """End the chat: save its branches, and delete temporary sessions."""

    def new_printer(self) -> TextPrinter:
        return make_printer(self.settings.renders_markdown)

    def run_loop(self) -> None:
        """Handle the user's messages and commands until the chat ends; then close it."""
        try:
            if self.is_interactive:
                say(f"{self.title()}: /help lists commands, Ctrl-D ends")
                self._show_last_turn()
            self._handle_input()
        finally:
            self.close()

    def _handle_input(self) -> None:
        status = self._status_line()
        while (message := self.message_reader.read(status)) is not None:
            with self.message_reader.hold_keys():
                try:
                    if self.message_reader.ctrl_c_pressed():
                        self.message_reader.put_back(message)
                        say(_STOPPED)
                    elif is_command(message):
                        self._run_command(message)
                    elif message.strip():
                        self.ask(message)
                    self.after_input()
                    status = self._status_line()
                except LeaveChat:
                    return
                except KeyboardInterrupt:
                    self._report_stop()

    def ask(self, message: str, line: str | None = None) -> None:
        try:
            self.run_turn(message)
        except PrefillAborted as aborted:
            if not self.is_interactive or termination_signal():
                raise aborted.cause from None
            self.message_reader.put_back(message if line is None else line)
            cause = aborted.cause
            say(_STOPPED if isinstance(cause, KeyboardInterrupt) else str(cause))
        except KeyboardInterrupt:
            self._report_stop()
        except KvkeepError as error:
            if not self.is_interactive:
                raise
            say(f"{error}; /undo removes the last turn")
        finally:
            if self.is_interactive and sys.stdout.isatty():
                with suppress(OSError):  # the terminal was closed
                    print(flush=True)  # a line between turns

    def do_regenerate(self, argument: str) -> str:
        turns = self.branches.current.turns
        if not turns:
            raise InvalidArgument("there is no answer to regenerate")
        self.regenerate_turn(turns[-1])
        return ""

    def warn_if_forgotten(self) -> None:
        """Print a warning if the newest question alone did not fit in the cache."""
        session, turns = self.branches.current.session, self.branches.current.turns
        spans = session.span_ranges
        span_name = f"turn {turns[-1]} question" if turns else ""
        if span_name not in spans:
            return
        start, end = spans[span_name]
        lost_tokens = end - start - session.remembered(start, end)
        if lost_tokens > 0:
            earlier_turns = plural(len(turns) - 1, "turn")
            earlier = f", and the {earlier_turns} before it" if len(turns) > 1 else ""
            say(
                f"the cache was too small for this question: {lost_tokens:,} of its "
                f"{end - start:,} tokens were evicted or compressed{earlier}; raise --max-kv-size"
            )

    def _show_last_turn(self) -> None:
        """Print the last question and answer of a chat that is resumed."""
        conversation = self.branches.current
        turns = conversation.turns
        if not turns:
            return
        spans = conversation.session.span_ranges
        start, end = spans.get(f"turn {turns[-1]} question", (0, 0))
        question = conversation.codec.decode(conversation.session.tokens[start:end]).strip()
        say("\n".join(f"> {line}" for line in question.splitlines()[:_MAX_SHOWN_LINES]))
        printer = self.new_printer()
        printer.write(self.answer_text(*spans.get(f"turn {turns[-1]} answer", (0, 0))).strip())
        with suppress(OSError):
            printer.end()
        say("")

    def answer_text(self, start: int, end: int) -> str:
        """Return the text of an answer, tokens `start ... end - 1`, as it is shown."""
        conversation = self.branches.current
        return conversation.codec.decode(conversation.session.tokens[start:end])

    def _run_command(self, line: str) -> None:
        try:
            message = self.run_command(line)
            if message:
                say(message)
        except KvkeepError as error:
            say(str(error))
        except KeyboardInterrupt:
            self._report_stop()

    def _report_stop(self) -> None:
        """Handle Ctrl-C, in an except block: print a note at a terminal, else re-raise."""
        if not self.is_interactive or termination_signal():
            raise
        say(_STOPPED)

    def _status_line(self) -> str:
        if not (self.is_interactive and self.settings.shows_status_line):
            return ""
        try:
            return self.memory_status()
        except KvkeepError as error:
            return str(error)
