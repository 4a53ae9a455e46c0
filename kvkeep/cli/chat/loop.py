"""The loop of a chat, shared by local and remote sessions: read, answer or run a command."""

import sys
from abc import abstractmethod
from contextlib import suppress

from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.commands import ChatCommands, LeaveChat, is_command
from kvkeep.cli.chat.prompt import make_prompt
from kvkeep.cli.chat.screen import make_screen
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.output import Screen, plural, say
from kvkeep.cli.terminal import termination_signal
from kvkeep.errors import InvalidArgument, KvkeepError

_MAX_SHOWN_LINES = 20  # of the last question, shown when a chat is resumed
_STOPPED = "[stopped]"


class PrefillAborted(Exception):
    """A question is not in memory, because of `cause`. It can be asked again."""

    def __init__(self, cause: BaseException):
        super().__init__(str(cause))
        self.cause = cause


class ChatLoop(ChatCommands):
    """A chat at the prompt; subclasses know where its session is."""

    def __init__(self, branches: Branches, settings: ChatSettings):
        super().__init__(branches, settings)
        self.prompt = make_prompt(branches)
        self.interactive = self.prompt.interactive

    @abstractmethod
    def title(self) -> str:
        """Return the model or session, and the tokens so far, for the first line."""

    @abstractmethod
    def run_turn(self, message: str) -> None:
        """Answer a question. Raises `PrefillAborted` if it is not in memory afterwards."""

    @abstractmethod
    def regenerate_turn(self, number: int) -> None:
        """Generate the newest turn's answer again. Raises KvkeepError if this is impossible."""

    @abstractmethod
    def do_save(self, argument: str) -> str:
        """Save the session. argument: its new name; "" for the current one."""

    @abstractmethod
    def memory_status(self) -> str:
        """Return the status line."""

    def after_input(self) -> None:
        """Run after each turn and each command, for example to save."""

    @abstractmethod
    def close(self) -> None:
        """End the chat: save its branches, and delete temporary sessions."""

    def screen(self) -> Screen:
        return make_screen(self.settings.markdown)

    def talk(self) -> None:
        try:
            if self.interactive:
                say(f"{self.title()}: /help lists commands, Ctrl-D ends")
                self._show_last_turn()
            self._handle_input()
        finally:
            self.close()

    def _handle_input(self) -> None:
        status = self._status_line()
        while (message := self.prompt.read(status)) is not None:
            with self.prompt.hold_keys():
                try:
                    if self.prompt.ctrl_c_pressed():
                        self.prompt.offer(message)
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
            if not self.interactive or termination_signal():
                raise aborted.cause from None
            self.prompt.offer(message if line is None else line)
            cause = aborted.cause
            say(_STOPPED if isinstance(cause, KeyboardInterrupt) else str(cause))
        except KeyboardInterrupt:
            self._report_stop()
        except KvkeepError as error:
            if not self.interactive:
                raise
            say(f"{error}; /undo removes the last turn")
        finally:
            if self.interactive and sys.stdout.isatty():
                with suppress(OSError):  # the terminal was closed
                    print(flush=True)  # a line between turns

    def do_regenerate(self, argument: str) -> str:
        turns = self.branches.current.turns
        if not turns:
            raise InvalidArgument("there is no answer to regenerate")
        self.regenerate_turn(turns[-1])
        return ""

    def warn_if_forgotten(self) -> None:
        """Print a warning if the newest question alone exceeded the memory."""
        session, turns = self.branches.current.session, self.branches.current.turns
        spans = session.span_ranges
        span_name = f"turn {turns[-1]} question" if turns else ""
        if span_name not in spans:
            return
        start, end = spans[span_name]
        forgotten = end - start - session.remembered(start, end)
        if forgotten > 0:
            earlier = f", and the {plural(len(turns) - 1, 'turn')} before it" if turns[1:] else ""
            say(
                f"the cache was too small for this question: {forgotten:,} of its {end - start:,} "
                f"tokens were evicted or compressed{earlier}; raise --max-kv-size"
            )

    def _show_last_turn(self) -> None:
        conversation = self.branches.current
        turns = conversation.turns
        if not turns:
            return
        spans, tokens = conversation.session.span_ranges, conversation.session.tokens

        def text_of(part: str) -> str:
            start, end = spans.get(f"turn {turns[-1]} {part}", (0, 0))
            return conversation.codec.decode(tokens[start:end]).strip()

        say("\n".join(f"> {line}" for line in text_of("question").splitlines()[:_MAX_SHOWN_LINES]))
        screen = self.screen()
        screen.write(text_of("answer"))
        with suppress(OSError):
            screen.end()
        say("")

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
        if not self.interactive or termination_signal():
            raise
        say(_STOPPED)

    def _status_line(self) -> str:
        if not (self.interactive and self.settings.bar):
            return ""
        try:
            return self.memory_status()
        except KvkeepError as error:
            return str(error)
