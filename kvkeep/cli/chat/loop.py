"""The loop of a chat, shared by local and remote sessions: read, answer or run a command."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kvkeep.cli.chat.branches import Branches
from kvkeep.cli.chat.commands import LeaveChat, is_command, run_chat_command
from kvkeep.cli.chat.prompt import Prompt, prompt
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.output import counted, say
from kvkeep.cli.screen import Screen, screen, show_text
from kvkeep.cli.terminal import termination_signal
from kvkeep.errors import InvalidArgument, KvkeepError

if TYPE_CHECKING:
    from kvkeep.cli.chat.completer import ChatCompleter

_LINES = 20  # of the last question, shown when a chat is resumed
_STOPPED = "[stopped]"


class ChatLoop(ABC):
    """A chat at the prompt.

    commands: replacements for memory commands, used by sessions on a server.
    """

    commands: Mapping[str, Callable[[str], str]] = {}

    def __init__(self, branches: Branches, settings: ChatSettings):
        self.branches, self.settings = branches, settings
        self.prompt: Prompt = prompt(self._completer)

    @abstractmethod
    def turn(self, message: str) -> None:
        """Prefill a question and write its answer to `self.screen()`.

        A turn that ends early leaves the conversation in a usable state. Raises `PrefillAborted`
        if the question is not in memory afterwards.
        """

    @abstractmethod
    def again(self) -> None:
        """Generate the last answer again. Raises KvkeepError if that is not possible."""

    @abstractmethod
    def save(self, name: str) -> str:
        """Save the session, and return the message for the user.

        name: the name from now on; "" for the current one.
        """

    @abstractmethod
    def bar(self) -> str:
        """Return the status line of the memory."""

    def after(self) -> None:  # noqa: B027 (a server saves by itself)
        """Run after each turn and each command, for example to save."""

    def screen(self) -> Screen:
        return screen(self.settings.markdown)

    def talk(self) -> None:
        """Read and handle input until the end of the chat."""
        bar = self._bar()
        while (message := self.prompt.read(bar)) is not None:
            with self.prompt.busy():
                try:
                    if is_command(message):
                        self._command(message.strip())
                    elif message.strip():
                        self.ask(message)
                    self.after()
                    bar = self._bar()
                except LeaveChat:
                    return
                except KeyboardInterrupt:
                    self._stopped()

    def ask(self, message: str, line: str | None = None) -> None:
        """Run a turn. line: the input that produced the message, if different."""
        try:
            self.turn(message)
        except PrefillAborted as aborted:
            if not self.prompt.interactive or termination_signal():
                raise aborted.cause from None
            self.prompt.offer(message if line is None else line)
            cause = aborted.cause
            say(_STOPPED if isinstance(cause, KeyboardInterrupt) else str(cause))
        except KeyboardInterrupt:
            self._stopped()
        except KvkeepError as error:
            if not self.prompt.interactive:
                raise
            say(f"{error}; /undo takes the last turn back")
        finally:
            if self.prompt.interactive and sys.stdout.isatty():
                with suppress(OSError):  # the terminal is gone
                    print(flush=True)  # a line between turns

    def show_last(self) -> None:
        """Show the last question and answer of a resumed chat."""
        conversation = self.branches.current
        turns = conversation.turns
        if not turns or not self.prompt.interactive:
            return
        places, tokens = conversation.session.places, conversation.session.tokens

        def text_of(part: str) -> str:
            start, end = places.get(f"turn {turns[-1]} {part}", (0, 0))
            return conversation.codec.decode(tokens[start:end]).strip()

        say("\n".join(f"> {line}" for line in text_of("question").splitlines()[:_LINES]))
        show_text(text_of("answer"), self.screen())
        say("")

    def warn_if_forgotten(self) -> None:
        """Print a warning if the newest question alone exceeded the memory."""
        conversation = self.branches.current
        turns = conversation.turns
        name = f"turn {turns[-1]} question" if turns else ""
        if name not in conversation.session.places:
            return
        start, end = conversation.session.places[name]
        gone = end - start - conversation.session.remembered(start, end)
        if gone > 0:
            before = f", and the {counted(len(turns) - 1, 'turn')} before it" if turns[1:] else ""
            say(
                f"memory was too small for this question: of its {end - start:,} tokens {gone:,} "
                f"were forgotten or compressed{before}; --max-kv-size makes it larger"
            )

    def _command(self, line: str) -> None:
        try:
            message = run_chat_command(line, self)
            if message:
                say(message)
        except KvkeepError as error:
            say(str(error))
        except KeyboardInterrupt:
            self._stopped()

    def _stopped(self) -> None:
        """Handle Ctrl-C in an except block: print a note at a terminal, else re-raise."""
        if not self.prompt.interactive or termination_signal():
            raise
        say(_STOPPED)

    def _bar(self) -> str:
        if not (self.prompt.interactive and self.settings.bar):
            return ""
        try:
            return self.bar()
        except KvkeepError as error:
            return str(error)

    def _completer(self) -> "ChatCompleter":
        from kvkeep.cli.chat.completer import ChatCompleter

        return ChatCompleter(self.branches)


class PrefillAborted(Exception):
    """A question is not in memory because of `cause`, and can be asked again."""

    def __init__(self, cause: BaseException):
        super().__init__(str(cause))
        self.cause = cause


def last_turn(branches: Branches) -> int:
    """Return the number of the newest turn. Raises InvalidArgument if there is none."""
    turns = branches.current.turns
    if not turns:
        raise InvalidArgument("there is no answer yet to regenerate")
    return turns[-1]
