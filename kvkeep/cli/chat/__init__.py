"""`kvkeep chat`: an endless conversation in a bounded memory."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.cli import options
from kvkeep.cli.chat.loading import LoadingAbandoned, open_while_reading
from kvkeep.cli.chat.settings import SERVER_LIMITS, ChatSettings
from kvkeep.cli.lazy import OptionsOnlyCommand
from kvkeep.cli.memory import (
    CODEC_HELP,
    CODEC_NAMES,
    SINKS,
    MemoryOptions,
    SessionOptions,
    keep_option,
    session_options,
)
from kvkeep.cli.output import say
from kvkeep.cli.session_file import UNREAD_KEY, OpenedSession, SessionWriter, apply_keep, resume
from kvkeep.cli.store import complete_sessions, open_session_store
from kvkeep.errors import InvalidArgument, KvkeepError, StoreError
from kvkeep.models.hub.source import local_folder
from kvkeep.session.conversation import CHAT_NOTES_KEY, Conversation
from kvkeep.session.turn_template import count_system_tokens
from kvkeep.storage.objects.paths import ReadablePath
from kvkeep.storage.snapshots.header import read_summary

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep import Model
    from kvkeep.cli.chat.local import LocalChat
    from kvkeep.cli.chat.message_reader import MessageReader
    from kvkeep.storage.sessions.shared import SessionPath
    from kvkeep.storage.snapshots.codec import Codec


@options.command(
    cls=OptionsOnlyCommand,
    hint="name a model with -m: kvkeep chat -m {}; messages are typed at the prompt or piped in",
)
def chat(
    session: str | None = options.option(
        metavar="NAME",
        shell_complete=complete_sessions,
        help="Resume this chat, or start it; saved after each turn.",
    ),
    continue_latest: bool = options.option(
        *("-c", "--continue"), is_flag=True, help="Resume the chat that was saved last."
    ),
    system: str | None = options.option(metavar="TEXT", help="System prompt; never evicted."),
    server: str | None = options.option(
        metavar="URL", help="Chat in a session of a running `kvkeep serve`."
    ),
    api_key: str | None = options.option(
        metavar="KEY", envvar="KVKEEP_API_KEY", show_envvar=True, help="API key of the server."
    ),
    max_tokens: int = options.integer_option(
        "-n", minimum=-1, default=1024, help="Maximum tokens of an answer; -1: no limit."
    ),
    compact_at: float | None = options.compact_at_option(),
    codec: "Codec | None" = options.choice_option(
        CODEC_NAMES, CODEC_HELP, show_default="exact, or as it was saved"
    ),
    speculate: bool = options.SPECULATE_OPTION,
    session_options: SessionOptions = session_options(keep_option(default=None)),
    output: options.OutputOptions = options.OUTPUT_OPTIONS,
) -> None:
    """Chat with a model.

    The KV cache stays within --max-kv-size: it holds the system prompt and the newest tokens, so a
    chat never runs out of context. Alt-Enter starts a new line, and pasted text is one message.
    Ctrl-C stops an answer, Ctrl-D ends the chat, and /help lists the commands of the prompt. If
    standard input is a pipe or file, each line is a turn.

    With --session, the chat is saved after each turn; the same command resumes it with its model
    and settings. With --server, the chat is a session of a running server and uses the server's
    model.
    """
    if system is not None:
        options.require_utf8(system, "the system prompt")
    output.check()
    token_limit = None if max_tokens < 0 else max_tokens
    if server is not None:
        if compact_at is not None:
            raise InvalidArgument("--compact-at of a chat on a server is an option of kvkeep serve")
        if codec is not None:
            raise InvalidArgument("--codec of a chat on a server is an option of kvkeep serve")
        session_options.check()
        from kvkeep.cli.chat.remote import chat_at_server

        settings = ChatSettings(session_options.sampling, token_limit, limits=SERVER_LIMITS)
        settings.speculate = speculate if options.is_given("speculate") else None
        chat_at_server(server, api_key, session, system, session_options.memory, settings)
        return
    if options.is_in_command_line("api_key"):
        raise InvalidArgument("--api-key is for a chat on a server: add --server URL")
    store = session_options.prefixes.store
    if continue_latest:
        session = _latest_chat_name(store, session)
    opening = _ChatOpening(
        session, system, token_limit, compact_at, codec, speculate, session_options, output
    )
    try:
        with ExitStack() as locks:
            opening.run(locks)
    except LoadingAbandoned as abandoned:
        abandoned.exit()


@dataclass(frozen=True)
class _ChatOpening:
    """The options of a chat in this process. session: its name."""

    session: str | None
    system: str | None
    max_tokens: int | None
    compact_at: float | None
    codec: "Codec | None"
    speculate: bool
    session_options: SessionOptions
    output: options.OutputOptions

    def run(self, locks: ExitStack) -> None:
        """Open the chat and run it. At a terminal, the prompt is there before the model."""
        from kvkeep.cli.chat.message_reader import make_message_reader

        file, reader = None, make_message_reader()
        if self.session is not None:
            file = locks.enter_context(
                open_session_store(self.session_options.prefixes.store).lock(self.session)
            )
        source = file if file is not None and file.exists() else None
        loads_at_once = self._loads_at_once(source)
        open_chat = partial(self._open, locks, file, source, reader, not loads_at_once)
        if reader.can_read_early and loads_at_once:
            name = (
                self.session_options.memory.model if source is None else f"session {self.session}"
            )
            chat = open_while_reading(reader, open_chat, f"loading {name}")
        else:
            chat = open_chat()
        with chat.run.reporting():
            chat.run_loop()
        chat.run.close("end")

    def _loads_at_once(self, source: ReadablePath | None) -> bool:
        """Whether the model need not be fetched or converted first, with progress bars."""
        memory = self.session_options.memory
        if source is not None and not options.is_given("model"):
            return True  # a session's own model is not fetched
        with suppress(KvkeepError):
            return local_folder(memory.model) is not None
        return False

    def _open(
        self,
        locks: ExitStack,
        file: "SessionPath | Path | None",
        source: ReadablePath | None,
        reader: "MessageReader",
        shows_progress: bool,
    ) -> "LocalChat":
        """Load the model, and the session in `source` or a new one."""
        self.session_options.check()  # here, since it imports torch
        from kvkeep.cli.chat.local import LocalChat
        from kvkeep.cli.run import SessionRun

        progress = self.output.progress and shows_progress
        opened, conversation = _open_conversation(
            source, self.system, self.session_options, progress
        )
        conversation.speculate = self.speculate
        sampling, defaults = self.session_options.sampling, opened.model.default_sampling
        settings = ChatSettings(sampling, self.max_tokens, opened.seed, defaults)
        run = SessionRun("chat", opened, self.output, settings.resolved_sampling.seed)
        if self.compact_at is not None and opened.session.policy != "full":
            raise InvalidArgument(
                f"--compact-at needs --policy full; found {opened.session.policy}, which "
                "already evicts at its budget"
            )
        if file is not None:
            label, codec = f"session {self.session}", self.codec or opened.codec
            run.writer = SessionWriter(opened.session, file, label, opened.notes, codec)
            run.writer.switch_to(opened.session, {CHAT_NOTES_KEY: conversation.notes})
        if source is not None:
            apply_keep(opened, self.session_options.memory.keep)
        store = self.session_options.prefixes.store
        return LocalChat(run, conversation, settings, store, locks, self.compact_at, reader)


def _latest_chat_name(store: str | None, session: str | None) -> str:
    """Return the name of the chat that was saved last; damaged files are skipped with a message.

    Raises InvalidArgument with `--session`, or if there is no chat.
    """
    if session is not None:
        raise InvalidArgument("--continue opens the latest session; use either it or --session")
    for path in open_session_store(store).newest_first():
        try:
            if CHAT_NOTES_KEY in read_summary(path).notes:
                return path.stem
        except StoreError as error:
            if path.exists():  # else it was removed meanwhile
                say(f"skipped: {error}")
    raise InvalidArgument(
        "no chat to continue: only chats with `kvkeep chat --session NAME` are saved"
    )


def _open_conversation(
    source: ReadablePath | None, system: str | None, session_options: SessionOptions, progress: bool
) -> tuple[OpenedSession, Conversation]:
    """Open the session in `source`, or else a new one, and its conversation."""
    memory, session_system = session_options.memory, system
    if source is None:
        model = memory.load(progress)
        memory.require_room_for_chat(model)
        keep = _tokens_to_keep(memory, model, system)
        prefix_cache = session_options.open_prefix_cache(model)
        opened = OpenedSession(model, memory.new_session(model, keep, prefix_cache))
    else:
        opened = resume(source, memory, progress)
        session_system = opened.notes.get(CHAT_NOTES_KEY, {}).get("system")
    if system not in (None, session_system):
        raise InvalidArgument(
            "--system must be the session's system prompt: leave it out, and change the prompt "
            "with /edit system TEXT; or start a new session"
        )
    if opened.notes.get(UNREAD_KEY):
        raise InvalidArgument(
            "a prompt in this session was interrupted; evaluate the rest with `kvkeep generate "
            "--session NAME -n 0`"
        )
    codec, end_token_ids = opened.model.text, opened.model.end_token_ids
    return opened, Conversation(opened.session, codec, end_token_ids, session_system)


def _tokens_to_keep(memory: MemoryOptions, model: "Model", system: str | None) -> int:
    """Return how many first tokens are never evicted: `--keep`, or else the system prompt's."""
    if memory.keep is not None:
        return memory.keep
    budget = memory.max_kv_size or model.spec.max_positions
    if system is None:
        return min(SINKS, budget - 1)
    system_tokens = count_system_tokens(model.text, system)
    if system_tokens >= budget and memory.policy in ("sliding", "shift"):
        raise InvalidArgument(
            f"the system prompt takes {system_tokens} tokens and is never evicted, which leaves no "
            f"room in a budget of {budget}; shorten it, raise --max-kv-size, or use --keep"
        )
    return system_tokens
