"""A chat whose session is in this process."""

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from kvkeep.cli.chat.branches import Branches, BranchWriter
from kvkeep.cli.chat.loop import ChatLoop, PrefillAborted, last_turn
from kvkeep.cli.memory_map import memory_line
from kvkeep.cli.output import counted, say
from kvkeep.cli.session_writer import SessionWriter
from kvkeep.cli.store import saved_sessions
from kvkeep.errors import InvalidArgument, KvkeepError, StoreError
from kvkeep.session.conversation import CHAT

if TYPE_CHECKING:
    from kvkeep.cli.chat.settings import ChatSettings
    from kvkeep.cli.run import Run
    from kvkeep.session.conversation import Conversation


class LocalChat(ChatLoop):
    """run: reads and writes with the session, and keeps it where it has a name.

    held: takes the lock of a name that it gets later.
    """

    def __init__(
        self, run: "Run", conversation: "Conversation", settings: "ChatSettings", held: ExitStack
    ):
        self.run = run
        self._held = held
        self._kept = BranchWriter()
        held.callback(self._kept.close)
        super().__init__(Branches(conversation), settings)

    def talk(self) -> None:
        if self.prompt.interactive:
            kept = f", {self.run.writer.what}" if self.run.writer else ""
            past = f", {counted(self.run.reused, 'token')} so far" if self.run.reused else ""
            say(f"{self.run.model.name}{kept}{past}: /help lists commands, Ctrl-D ends")
            self.show_last()
        try:
            super().talk()
        finally:
            self._leave()

    def turn(self, words: str) -> None:
        conversation = self.branches.current
        try:
            ids = conversation.begin_turn(words)
            self._read(ids)
        except (KeyboardInterrupt, KvkeepError) as error:
            raise PrefillAborted(error) from error
        conversation.name_turn(words, len(ids))
        self.tell_forgotten()
        self._write()

    def again(self) -> None:
        conversation, number = self.branches.current, last_turn(self.branches)
        session = conversation.session
        start = session.places.get(f"turn {number} answer", (len(session.tokens),))[0]
        try:
            session.rewind(len(session.tokens) - start)
        except InvalidArgument as error:
            raise InvalidArgument(f"its beginning is no longer in memory: {error}") from error
        self._write()

    def save(self, name: str) -> str:
        run = self.run
        if name and not (run.writer and run.writer.what == _session(name)):
            place = self._held.enter_context(saved_sessions().lock(name))
            if place.exists():
                raise InvalidArgument(f"there is a session {name} already; choose another name")
            notes = {CHAT: self.branches.current.notes}
            run.writer = SessionWriter(run.session, place, _session(name), notes)
            run.writer.write()
        if run.writer is None:
            raise InvalidArgument("this chat has no name yet: /save NAME gives it one")
        run.writer.save()
        return run.writer.outcome or f"{run.writer.what} is saved already"

    def bar(self) -> str:
        branch = "" if not self.branches.others else f", branch {self.branches.name}"
        turns = counted(len(self.branches.current.turns), "turn")
        return f"{memory_line(self.run.session)}, {turns}{branch}"

    def after(self) -> None:
        """Saves. What comes next is in the branch that is current now."""
        run = self.run
        run.session = self.branches.current.session
        if run.writer is None:
            return
        try:
            # First, so that a branch is on disk before the current one takes its place.
            self._save_others(run.writer)
            run.writer.follow(run.session, {CHAT: self.branches.current.notes})
            run.writer.save()
        except StoreError as error:
            # The talk is worth more than an end here; at its end, saving is tried once more.
            say(str(error))
        else:
            self._kept.dismiss(self.branches.name)

    def _save_others(self, writer: SessionWriter) -> None:
        conversations = self.branches.conversations
        others = {name: conversations[name] for name in self.branches.others}
        self._kept.save(writer.what.removeprefix(_session("")), others, writer.notes)

    def _leave(self) -> None:
        """Saves the branches that are not, and says where each is."""
        writer = self.run.writer
        if writer is None or not self.branches.others:
            return
        self.run.session = self.branches.current.session
        try:
            self._save_others(writer)
        except StoreError as error:
            say(str(error))
        writer.follow(self.run.session, {CHAT: self.branches.current.notes})
        names = self._kept.names()
        say(f"branch {self.branches.name} is {writer.what}")
        for branch in self.branches.others:
            kept = f"session {names[branch]}" if branch in names else "not saved"
            say(f"branch {branch} is {kept}")

    def _read(self, ids: list[int]) -> None:
        before = len(self.run.session.tokens)
        try:
            self.run.feed(ids)
        except (KeyboardInterrupt, KvkeepError):
            # Half a question is taken back, unless it already pushed out what came before it: then
            # it stays, and the next turn closes it.
            with suppress(InvalidArgument):
                self.run.session.rewind(len(self.run.session.tokens) - before)
            raise

    def _write(self) -> None:
        how = self.settings.how
        try:
            self.run.write(self.settings.max_tokens, how, screen=self.screen())
        finally:
            self.branches.current.end_turn()


def _session(name: str) -> str:
    return f"session {name}"
