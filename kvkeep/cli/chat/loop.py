"""The loop of a chat, wherever its session lives: words from the user, an answer or an effect."""

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
from kvkeep.cli.signals import termination_signal
from kvkeep.errors import InvalidArgument, KvkeepError

if TYPE_CHECKING:
    from kvkeep.cli.chat.completer import ChatCompleter

_LINES = 20  # of a question that is shown again
_STOPPED = "[stopped]"


class ChatLoop(ABC):
    """commands: what stands in for commands that change memory, where it lives elsewhere."""

    commands: Mapping[str, Callable[[str], str]] = {}

    def __init__(self, branches: Branches, settings: ChatSettings):
        self.branches, self.settings = branches, settings
        self.prompt: Prompt = prompt(self._completer)

    @abstractmethod
    def turn(self, words: str) -> None:
        """Prefill a question and write its answer to `self.screen()`.

        A turn that ends early leaves the conversation in a usable state. Raises `PrefillAborted`
        if the question is not in memory afterwards.
        """

    @abstractmethod
    def again(self) -> None:
        """Has the last answer written anew. Raises KvkeepError where that cannot be."""

    @abstractmethod
    def save(self, name: str) -> str:
        """Saves, under a name from now on if there is one; what to tell the user."""

    @abstractmethod
    def bar(self) -> str:
        """Memory, in a line."""

    def after(self) -> None:  # noqa: B027 (nothing, where a server keeps it)
        """What follows each turn and each command."""

    def screen(self) -> Screen:
        return screen(self.settings.markdown)

    def talk(self) -> None:
        bar = self._bar()
        while (words := self.prompt.read(bar)) is not None:
            with self.prompt.busy():
                try:
                    if is_command(words):
                        self._command(words.strip())
                    elif words.strip():
                        self.ask(words)
                    self.after()
                    bar = self._bar()
                except LeaveChat:
                    return
                except KeyboardInterrupt:
                    self._stopped()

    def ask(self, words: str, line: str | None = None) -> None:
        """A turn. line: what was typed, where that was another."""
        try:
            self.turn(words)
        except PrefillAborted as why:
            if not self.prompt.interactive or termination_signal():
                raise why.cause from None
            self.prompt.offer(words if line is None else line)
            say(_STOPPED if isinstance(why.cause, KeyboardInterrupt) else str(why.cause))
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
        """The last exchange, for somebody who comes back to it."""
        conversation = self.branches.current
        turns = conversation.turns
        if not turns or not self.prompt.interactive:
            return
        places, tokens = conversation.session.places, conversation.session.tokens

        def said(part: str) -> str:
            start, end = places.get(f"turn {turns[-1]} {part}", (0, 0))
            return conversation.codec.decode(tokens[start:end]).strip()

        say("\n".join(f"> {line}" for line in said("question").splitlines()[:_LINES]))
        show_text(said("answer"), self.screen())
        say("")

    def tell_forgotten(self) -> None:
        """Where a question alone was more than memory holds."""
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
            told = run_chat_command(line, self)
            if told:
                say(told)
        except KvkeepError as error:
            say(str(error))
        except KeyboardInterrupt:
            self._stopped()

    def _stopped(self) -> None:
        """Answers the Ctrl-C that is being handled: at a terminal it ends no chat."""
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
    """A question is not in memory, because of `cause`: it can be asked again."""

    def __init__(self, cause: BaseException):
        super().__init__(str(cause))
        self.cause = cause


def last_turn(branches: Branches) -> int:
    """The number of the newest turn. Raises InvalidArgument where there is none."""
    turns = branches.current.turns
    if not turns:
        raise InvalidArgument("there is no answer yet that could be written anew")
    return turns[-1]
