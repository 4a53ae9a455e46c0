"""`kvkeep chat` with a session in this process."""

from contextlib import ExitStack, suppress

from kvkeep.cli.chat.branches import Branches, BranchWriter
from kvkeep.cli.chat.loop import ChatLoop, PrefillAborted
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.memory_map import memory_line
from kvkeep.cli.output import counted, say
from kvkeep.cli.run import Run
from kvkeep.cli.session_file import SessionWriter
from kvkeep.cli.store import saved_sessions
from kvkeep.errors import InvalidArgument, KvkeepError, StoreError
from kvkeep.session.conversation import CHAT, Conversation


class LocalChat(ChatLoop):
    """A chat with a session in this process.

    run: prefills, generates and, if the session has a name, saves it. locks: receives the lock of
    a name that `/save` gives to the session later.
    """

    def __init__(
        self, run: Run, conversation: Conversation, settings: ChatSettings, locks: ExitStack
    ):
        self.run = run
        self._locks = locks
        self._branch_writer = BranchWriter()
        locks.callback(self._branch_writer.close)
        super().__init__(Branches(conversation), settings)

    def title(self) -> str:
        name = f", {self.run.writer.what}" if self.run.writer else ""
        past = f", {counted(self.run.reused, 'token')} so far" if self.run.reused else ""
        return f"{self.run.model.name}{name}{past}"

    def turn(self, message: str) -> None:
        conversation = self.branches.current
        try:
            ids = conversation.begin_turn(message)
            self._prefill(ids)
        except (KeyboardInterrupt, KvkeepError) as error:
            raise PrefillAborted(error) from error
        conversation.name_turn(message, len(ids))
        self.warn_if_forgotten()
        self._generate()

    def regenerate_turn(self, turn: int) -> None:
        session = self.branches.current.session
        start, _ = session.places.get(f"turn {turn} answer", (len(session.tokens), 0))
        try:
            session.rewind(len(session.tokens) - start)
        except InvalidArgument as error:
            raise InvalidArgument(f"its beginning is no longer in memory: {error}") from error
        self._generate()

    def save(self, name: str) -> str:
        run, what = self.run, f"session {name}"
        if name and not (run.writer and run.writer.what == what):
            file = self._locks.enter_context(saved_sessions().lock(name))
            if file.exists():
                raise InvalidArgument(f"there is a session {name} already; choose another name")
            notes = {CHAT: self.branches.current.notes}
            run.writer = SessionWriter(run.session, file, what, notes)
            run.writer.write()
        if run.writer is None:
            raise InvalidArgument("this chat has no name yet: /save NAME gives it one")
        run.writer.save()
        return run.writer.outcome or f"{run.writer.what} is saved already"

    def memory_bar(self) -> str:
        branch = "" if not self.branches.others else f", branch {self.branches.name}"
        turns = counted(len(self.branches.current.turns), "turn")
        return f"{memory_line(self.run.session)}, {turns}{branch}"

    def after_input(self) -> None:
        """Save the branches. The current branch may have changed since the last turn."""
        writer, self.run.session = self.run.writer, self.branches.current.session
        if writer is None:
            return
        try:
            # The others first: a branch must be on disk before another one overwrites the chat.
            self._save_others(writer)
            writer.follow(self.run.session, {CHAT: self.branches.current.notes})
            writer.save()
        except StoreError as error:
            # A failed save does not end the chat: saving is tried again at the next turn and at the
            # end.
            say(str(error))
        else:
            self._branch_writer.dismiss(self.branches.name)

    def close(self) -> None:
        """Save the branches that are not saved yet, and print the session of each."""
        writer = self.run.writer
        if writer is None or not self.branches.others:
            return
        self.run.session = self.branches.current.session
        try:
            self._save_others(writer)
        except StoreError as error:
            say(str(error))
        writer.follow(self.run.session, {CHAT: self.branches.current.notes})
        names = self._branch_writer.names()
        say(f"branch {self.branches.name} is {writer.what}")
        for branch in self.branches.others:
            session = f"session {names[branch]}" if branch in names else "not saved"
            say(f"branch {branch} is {session}")

    def _save_others(self, writer: SessionWriter) -> None:
        conversations = self.branches.conversations
        others = {name: conversations[name] for name in self.branches.others}
        self._branch_writer.save(writer.what.removeprefix("session "), others, writer.notes)

    def _prefill(self, ids: list[int]) -> None:
        """Prefill a question. Interrupts and errors roll it back if possible."""
        session = self.run.session
        start = len(session.tokens)
        try:
            self.run.feed(ids)
        except (KeyboardInterrupt, KvkeepError):
            # Half a question is rewound, unless earlier tokens were already evicted for it. Then it
            # stays, and the next turn closes it.
            with suppress(InvalidArgument):
                session.rewind(len(session.tokens) - start)
            raise

    def _generate(self) -> None:
        """Generate an answer on the screen, and record its end in the conversation."""
        sampling = self.settings.resolved
        try:
            self.run.write(self.settings.max_tokens, sampling, screen=self.screen())
        finally:
            self.branches.current.end_turn()
