"""`kvkeep chat`: an endless conversation in a bounded memory."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvkeep.cli import options
from kvkeep.cli.chat.settings import ChatSettings
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
from kvkeep.cli.session_file import UNREAD_KEY, OpenedSession, SessionWriter, apply_keep, resume
from kvkeep.cli.store import complete_sessions, open_session_store
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.session.conversation import CHAT_NOTES_KEY, Conversation
from kvkeep.session.turn_template import count_system_tokens
from kvkeep.storage.objects.paths import ReadablePath
from kvkeep.storage.snapshots.header import read_summary

if TYPE_CHECKING:
    from kvkeep import Model
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
    session_options.check()
    token_limit = None if max_tokens < 0 else max_tokens
    if server is not None:
        if compact_at is not None:
            raise InvalidArgument("--compact-at of a chat on a server is an option of kvkeep serve")
        if codec is not None:
            raise InvalidArgument("--codec of a chat on a server is an option of kvkeep serve")
        from kvkeep.cli.chat.remote import chat_at_server

        settings = ChatSettings(session_options.sampling, token_limit)
        settings.speculate = speculate if options.is_given("speculate") else None
        chat_at_server(server, api_key, session, system, session_options.memory, settings)
        return
    store = session_options.prefixes.store
    if continue_latest:
        session = _latest_chat_name(store, session)
    with ExitStack() as locks:
        session_file = None
        if session is not None:
            session_file = locks.enter_context(open_session_store(store).lock(session))
        from kvkeep.cli.chat.local import LocalChat
        from kvkeep.cli.run import SessionRun

        source = session_file if session_file is not None and session_file.exists() else None
        opened, conversation = _open_conversation(source, system, session_options, output.progress)
        conversation.speculate = speculate
        defaults = opened.model.default_sampling
        settings = ChatSettings(session_options.sampling, token_limit, opened.seed, defaults)
        run = SessionRun("chat", opened, output, settings.resolved_sampling.seed)
        if compact_at is not None and opened.session.policy != "full":
            raise InvalidArgument(
                f"--compact-at needs --policy full; found {opened.session.policy}, which keeps to "
                "its budget by itself"
            )
        if session_file is not None:
            label = f"session {session}"
            saved_codec = codec or opened.codec
            run.writer = SessionWriter(
                opened.session, session_file, label, opened.notes, saved_codec
            )
            run.writer.switch_to(opened.session, {CHAT_NOTES_KEY: conversation.notes})
        if source is not None:
            apply_keep(opened, session_options.memory.keep)
        with run.reporting():
            LocalChat(run, conversation, settings, store, locks, compact_at).run_loop()
        run.close("end")


def _latest_chat_name(store: str | None, session: str | None) -> str:
    """Return the name of the chat that was saved last. Raises InvalidArgument with `--session`."""
    if session is not None:
        raise InvalidArgument("--continue opens the latest session; use either it or --session")
    for path in open_session_store(store).newest_first():
        try:
            if CHAT_NOTES_KEY in read_summary(path).notes:
                return path.stem
        except StoreError:
            if path.exists():  # else it was removed meanwhile
                raise
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
        opened = OpenedSession(
            model,
            memory.new_session(model, keep, session_options.prefixes.open_prefix_cache(model)),
        )
    else:
        opened = resume(source, memory, progress)
        session_system = opened.notes.get(CHAT_NOTES_KEY, {}).get("system")
    if system not in (None, session_system):
        raise InvalidArgument(
            "--system must match the session's system prompt, which cannot be changed; leave it "
            "out, or start a new session"
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
