"""`kvkeep chat` with a session in this process."""

from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.chat.quoted_reasoning import QuotedReasoning
from kvkeep.cli.chat.branches import Branches, branch_session_names
from kvkeep.cli.chat.loop import ChatLoop, PrefillAborted
from kvkeep.cli.chat.message_reader import MessageReader
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.memory_map import memory_line
from kvkeep.cli.output import format_mb, plural, say
from kvkeep.cli.run import AnswerDisplay, SessionRun
from kvkeep.cli.session_file import SessionWriter
from kvkeep.cli.store import open_session_store
from kvkeep.errors import InvalidArgument, KvkeepError, Locked, StoreError
from kvkeep.session.conversation import CHAT_NOTES_KEY, Conversation

if TYPE_CHECKING:
    from kvkeep.storage.snapshots.codec import Codec


@dataclass
class _SavedBranch:
    session_name: str  # in which the branch is saved
    writer: SessionWriter
    lock: ExitStack  # holds the lock of the session's file


class LocalChat(ChatLoop):
    """A chat with a session in this process.

    store: `--store`. locks: of all its session files. compact_at: `--compact-at`. reader: as of
    `ChatLoop`.
    """

    def __init__(
        self,
        run: SessionRun,
        conversation: Conversation,
        settings: ChatSettings,
        store: str | None,
        locks: ExitStack,
        compact_at: float | None = None,
        reader: MessageReader | None = None,
    ):
        self.run, self._store, self._locks = run, store, locks
        self._compact_at = compact_at
        self._saved_branches: dict[str, _SavedBranch] = {}  # branches that are not current
        super().__init__(Branches(conversation), settings, reader)

    def title(self) -> str:
        name = f", {self.run.writer.label}" if self.run.writer else ""
        count = self.run.reused_tokens
        tokens = f", {plural(count, 'token')} so far" if count else ""
        return f"{self.run.model.name}{name}{tokens}"

    def run_turn(self, message: str) -> None:
        conversation = self.branches.current
        try:
            ids = conversation.begin_turn(message)
            self._compact_for(len(ids))
            self._prefill(message, ids)
        except (KeyboardInterrupt, KvkeepError) as error:
            raise PrefillAborted(error) from error
        conversation.name_turn(message, len(ids))
        self.warn_if_forgotten()
        self._generate()

    def regenerate_turn(self, number: int) -> None:
        session = self.branches.current.session
        start, _ = session.span_ranges.get(f"turn {number} answer", (len(session.tokens), 0))
        try:
            session.rewind(len(session.tokens) - start)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"the answer cannot be regenerated: its start is no longer in the cache ({error})"
            ) from error
        self.branches.current.reopen_turn()
        self._generate()

    def do_save(self, argument: str) -> str:
        run, name = self.run, argument
        if name and not (run.writer and run.writer.label == f"session {name}"):
            run.writer = self._save_under(name)
        if run.writer is None:
            raise InvalidArgument("this chat has no name yet: use /save NAME")
        run.writer.save()
        return run.writer.save_outcome or f"{run.writer.label} is already saved"

    def _save_under(self, name: str) -> SessionWriter:
        """Save the current branch as a new session, and keep its lock. Raises KvkeepError."""
        run, notes = self.run, {CHAT_NOTES_KEY: self.branches.current.notes}
        with ExitStack() as lock:
            file = lock.enter_context(open_session_store(self._store).lock(name))
            if file.exists():
                raise InvalidArgument(f"session {name} already exists; use another name")
            codec: Codec = run.writer.codec if run.writer else "none"
            writer = SessionWriter(run.session, file, f"session {name}", notes, codec)
            writer.write()
            self._locks.enter_context(lock.pop_all())
        return writer

    def memory_status(self) -> str:
        branch = f", branch {self.branches.current_name}" if self.branches.other_names else ""
        turns = plural(len(self.branches.current.turns), "turn")
        return f"{memory_line(self.run.session)}, {turns}{branch}"

    def after_input(self) -> None:
        """Save the branches. Another one may be current since the last turn."""
        writer, self.run.session = self.run.writer, self.branches.current.session
        if writer is None:
            return
        try:
            # The others first: a branch must be saved before another overwrites the chat's file.
            self._save_others(writer)
            writer.switch_to(self.run.session, {CHAT_NOTES_KEY: self.branches.current.notes})
            writer.save()
        except StoreError as error:
            say(str(error))  # saving is tried again at the next turn
            return
        # The current branch is saved in the chat's own file, so its branch file is removed.
        if saved := self._saved_branches.pop(self.branches.current_name, None):
            saved.lock.close()
            with suppress(KvkeepError, OSError):  # on failure, an outdated copy remains
                open_session_store(self._store).remove(saved.session_name)

    def close(self) -> None:
        writer = self.run.writer
        if writer is None or not self.branches.other_names:
            return
        self.run.session = self.branches.current.session
        try:
            self._save_others(writer)
        except StoreError as error:
            say(str(error))
        writer.switch_to(self.run.session, {CHAT_NOTES_KEY: self.branches.current.notes})
        say(f"branch {self.branches.current_name} is {writer.label}")
        for branch in self.branches.other_names:
            saved = self._saved_branches.get(branch)
            say(f"branch {branch} is {saved.writer.label if saved else 'not saved'}")

    def _save_others(self, chat_writer: SessionWriter) -> None:
        """Save each changed branch but the current one. Raises StoreError."""
        from kvkeep.engine.session_files import notes_of_copy

        for branch in self.branches.other_names:
            conversation = self.branches.conversations[branch]
            notes = {**notes_of_copy(chat_writer.notes), CHAT_NOTES_KEY: conversation.notes}
            if saved := self._saved_branches.get(branch):
                saved.writer.switch_to(conversation.session, notes)
                saved.writer.save()
            else:
                name = chat_writer.label.removeprefix("session ")
                self._saved_branches[branch] = self._save_as_new(
                    name, branch, conversation, notes, chat_writer.codec
                )
                say(f"branch {branch} is saved as {self._saved_branches[branch].writer.label}")

    def _save_as_new(
        self,
        chat_name: str,
        branch_name: str,
        conversation: Conversation,
        notes: dict[str, Any],
        codec: "Codec",
    ) -> _SavedBranch:
        """Save a branch under the first unused name, and keep its lock."""
        for name in branch_session_names(chat_name, branch_name):
            with ExitStack() as lock:
                try:
                    file = lock.enter_context(open_session_store(self._store).lock(name))
                except Locked:
                    continue
                if file.exists():
                    continue
                label = f"session {name}"
                writer = SessionWriter(conversation.session, file, label, notes, codec)
                writer.write()
                return _SavedBranch(name, writer, self._locks.enter_context(lock.pop_all()))
        raise AssertionError("unreachable: the generator is infinite")

    def compact(self, target: float) -> str:
        session, calibration = self.branches.current.session, self.run.model.calibration
        bytes_before = session.nbytes
        report = session.compact(target, calibration=calibration)
        freed = format_mb(max(0, bytes_before - session.nbytes))
        return f"{report.summary()}; freed {freed}"

    def _compact_for(self, new_tokens: int) -> None:
        """Compact the session first if a turn would exceed `--compact-at`."""
        session = self.branches.current.session
        if self._compact_at is None:
            return
        calibration = self.run.model.calibration
        report = session.compact_before(new_tokens, self._compact_at, calibration)
        if report is not None and report.changed:
            say(f"compacted: {report.summary()}")

    def _prefill(self, message: str, ids: list[int]) -> None:
        """Prefill a question. An interrupt or error removes it if possible."""
        session, conversation = self.run.session, self.branches.current
        start = len(session.tokens)
        try:
            self.run.feed(ids)
        except BaseException:
            count = len(session.tokens) - start
            if not conversation.cancel_turn(message, ids, count):
                turn = conversation.last_turn
                say(
                    f"{plural(count, 'token')} of the message were prefilled and cannot be undone, "
                    "since older text was evicted for them; they are turn "
                    f"{turn} (/forget {turn} deletes it)"
                )
            raise

    def _generate(self) -> None:
        """Generate the newest turn's answer, and print it with the reasoning as a quotation."""
        conversation, quoted = self.branches.current, QuotedReasoning()
        max_tokens, sampling = self.settings.max_tokens, self.settings.resolved_sampling
        events = conversation.read_answer(max_tokens, sampling)
        try:
            with closing(events):
                pieces = (quoted.push([event]) for event in events)
                display = AnswerDisplay(pieces, self._shown)
                self.run.generate(max_tokens, sampling, printer=self.new_printer(), display=display)
        finally:
            conversation.end_turn()

    def answer_text(self, start: int, end: int) -> str:
        return self._shown(self.run.pieces(start, end))

    def _shown(self, pieces: Sequence[str | int]) -> str:
        """Return an answer's text with the reasoning as a quotation."""
        reader = self.run.model.renderer.new_reader()
        return QuotedReasoning().push([*reader.push(pieces), *reader.finish()])
