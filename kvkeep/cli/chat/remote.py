"""`kvkeep chat --server`: a chat in a session on a server."""

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn, cast

from kvkeep.chat.output import ReasoningDelta, TextDelta
from kvkeep.chat.quoted_reasoning import QuotedReasoning
from kvkeep.cli.chat.branches import Branches, branch_session_names
from kvkeep.cli.chat.loop import ChatLoop, PrefillAborted
from kvkeep.cli.chat.remote_conversation import RemoteChatSession, RemoteConversation
from kvkeep.cli.chat.settings import SERVER_LIMITS, ChatSettings
from kvkeep.cli.memory import MemoryOptions
from kvkeep.cli.memory_map import draw_map, overwritten_lines, residual_lines, status_line
from kvkeep.cli.options import is_given, is_in_command_line
from kvkeep.cli.output import format_mb, plural, say
from kvkeep.client import Client, RemoteSession
from kvkeep.errors import Busy, InvalidArgument, KvkeepError, NoSuchSession
from kvkeep.session.conversation import Conversation

_LOCAL_OPTIONS = (  # options that a session on a server does not have
    *("model", "dtype", "device", "weights", "prefill_step", "calibration", "checkpoint_bytes"),
    *("prefix_cache", "prefix_cache_bytes", "store", "secret_file", "report", "continue_latest"),
)
_SESSION_OPTIONS = (  # options with which a session on a server is created
    *("policy", "max_kv_size", "keep", "discard", "group", "window", "method", "ratio"),
    *("kv_bits", "far_bits"),
)
_API_NAMES = {"repetition_penalty": "repeat_penalty", "repetition_window": "repeat_last_n"}


def chat_at_server(
    url: str,
    api_key: str | None,
    session_name: str | None,
    system: str | None,
    memory: MemoryOptions,
    settings: ChatSettings,
) -> None:
    """Run a chat in a session on a server. session_name: None for one deleted at its end."""
    # Not those of environment variables, which are for commands of this machine.
    refused_options = [option for option in _LOCAL_OPTIONS if is_in_command_line(option)]
    if refused_options:
        flags = ", ".join(map(_flag, refused_options))
        raise InvalidArgument(f"{flags} cannot be used with --server, which loads its own model")
    requested = {name: getattr(memory, name) for name in _SESSION_OPTIONS if is_given(name)}
    with Client(url, api_key) as client:
        client.require_kvkeep()
        name = _open_session(client, session_name, requested)
        RemoteChat(client, name, system, settings, is_named=session_name is not None).run_loop()


def _open_session(client: Client, name: str | None, options: dict[str, Any]) -> str:
    """Find or create a session, and return its name. name: None to create an unnamed one."""
    if name is not None:
        with suppress(NoSuchSession):
            _require_options(client.session(name), options)
            return name
    return str(client.create(name, **options).name)


def _require_options(session: RemoteSession, options: dict[str, Any]) -> None:
    """Raise InvalidArgument if an option differs from the settings of a session that exists.

    The session may keep more tokens than `--keep` says: its first turn adds the system prompt.
    """
    session.memory()  # loads it: an entry has no settings before
    entry = session.info()
    settings = {**entry["settings"], **entry}
    for option, value in options.items():
        is_kept = option == "keep" and value <= entry["keep"]
        if value != settings.get(option) and not is_kept:
            flag, own = _flag(option), settings.get(option)
            raise InvalidArgument(
                f"{flag} is {value}, but session {session.name} has {own}, which cannot change; "
                f"leave {flag} out, or start a new session"
            )


def _retry_while_busy(call: Callable[[], object]) -> None:
    """Make a call. Retry for 5 seconds if a cancelled answer still keeps the session busy."""
    for _ in range(50):
        with suppress(Busy):
            call()
            return
        time.sleep(0.1)
    call()


def _flag(option: str) -> str:
    names = {"continue_latest": "continue", "checkpoint_bytes": "checkpoints"}
    return "--" + names.get(option, option.replace("_", "-"))


def _generation_fields(settings: ChatSettings) -> dict[str, Any]:
    """Return the settings of an answer under their names in the server's API."""
    options = asdict(settings.sampling).items()
    parameters = {_API_NAMES.get(name, name): value for name, value in options if value is not None}
    limit = SERVER_LIMITS["max_tokens"] if settings.max_tokens is None else settings.max_tokens
    speculation = {} if settings.speculate is None else {"speculate": settings.speculate}
    return {**parameters, **speculation, "max_tokens": limit}


class RemoteChat(ChatLoop):
    """A chat in a session on a server. is_named: whether the user named the session."""

    def __init__(
        self,
        client: Client,
        session_name: str,
        system: str | None,
        settings: ChatSettings,
        is_named: bool,
    ):
        conversation = cast(Conversation, RemoteConversation(client, session_name, system))
        super().__init__(Branches(conversation), settings)
        self._client, self._is_named = client, is_named
        self._temporary_session_names = list[str]()  # deleted at the end of the chat
        self._kept_session_names = set[str]()  # not deleted at the end of the chat
        self._chat_name = session_name if is_named else ""  # "": the chat is deleted at its end

    def title(self) -> str:
        tokens = self._session.info()["tokens"]
        so_far = f", {plural(tokens, 'token')} so far" if tokens else ""
        return f"session {self._session.name}{so_far}"

    @property
    def _conversation(self) -> RemoteConversation:
        return cast(RemoteConversation, self.branches.current)

    @property
    def _session(self) -> RemoteChatSession:
        return self._conversation.session

    def _sessions_by_branch(self) -> dict[str, RemoteChatSession]:
        branches = self.branches.conversations.items()
        return {name: cast(RemoteConversation, branch).session for name, branch in branches}

    def run_turn(self, message: str) -> None:
        self._answer(message)
        self.warn_if_forgotten()

    def _answer(self, message: str | None) -> None:
        """Answer on the server; None for the newest question. Raises `PrefillAborted`.

        Ctrl-C also stops it there; the text so far stays.
        """
        sampling = _generation_fields(self.settings)
        printer, display, has_started = self.new_printer(), QuotedReasoning(), False
        events = self._session.stream_turn(message, self._conversation.system, **sampling)
        try:
            with closing(events):
                for name, event in events:
                    if name == "token":
                        has_started = True
                        reasoning = ReasoningDelta(event.get("reasoning", ""))
                        printer.write(display.push([reasoning, TextDelta(event["text"])]))
        except KvkeepError as error:
            if not has_started:
                raise PrefillAborted(error) from error
            raise
        finally:
            printer.end()

    def regenerate_turn(self, number: int) -> None:
        memory = self._session.memory()
        if answer := memory["spans"].get(f"turn {number} answer"):
            try:
                self._session.rewind(memory["tokens"] - answer["start"])
            except InvalidArgument as error:
                raise InvalidArgument(
                    "the answer cannot be regenerated: its start is no longer in the cache "
                    f"({error})"
                ) from error
        try:
            self._answer(None)
        except PrefillAborted as aborted:
            raise aborted.cause from None

    def do_save(self, argument: str) -> str:
        session, name = self._session, argument
        if name in ("", session.name):
            session.save()
            return f"session {session.name} is saved on the server"
        self._save_fork(session, name)
        if not self._is_named:
            self._temporary_session_names.append(session.name)
        self._kept_session_names.add(name)
        self._chat_name = self._chat_name or name
        self.branches.conversations[self.branches.current_name] = cast(
            Conversation, RemoteConversation(self._client, name, self._conversation.system)
        )
        return f"now in session {name}, which is saved on the server"

    def memory_status(self) -> str:
        memory = self._session.memory()
        return status_line(_token_statuses(memory), _cells_text(memory))

    def do_memory(self, argument: str) -> str:
        memory = self._session.memory()
        description = f"{_cells_text(memory)}; policy {memory['policy']}"
        parts, ends = memory.get("bytes_by_part", {}), memory.get("checkpoints", [])
        lines = overwritten_lines(parts, ends, memory.get("rewind_evaluates"))
        residual = residual_lines(memory.get("residual_cells", 0))
        return "\n".join([*draw_map(_token_statuses(memory)), *residual, *lines, description])

    def compact(self, target: float) -> str:
        session = self._session
        bytes_before = session.memory()["bytes"]
        entry = session.compact(target)
        freed = format_mb(max(0, bytes_before - entry["bytes"]))
        return f"{entry['result']['summary']}; freed {freed}"

    def do_branches(self, argument: str) -> str:
        return "\n".join(
            f"{'*' if name == self.branches.current_name else ' '} {name}: session {session.name}, "
            f"{plural(session.info()['tokens'], 'token')}"
            for name, session in self._sessions_by_branch().items()
        )

    def do_keep(self, argument: str) -> NoReturn:
        raise InvalidArgument(
            "/keep is for local chats: on a server, give --keep when the chat is new"
        )

    def close(self) -> None:
        """Save the branches of a named chat, and delete temporary sessions."""
        if self._chat_name and self.branches.other_names:
            for branch, session in self._sessions_by_branch().items():
                say(f"branch {branch} is session {self._save_branch(branch, session)}")
        sessions = [] if self._is_named else self._sessions_by_branch().values()
        for name in [*self._temporary_session_names, *(session.name for session in sessions)]:
            if name not in self._kept_session_names:
                self._delete(name)

    def _save_fork(self, session: RemoteChatSession, name: str) -> None:
        """Fork a session under a name and save the fork; if that fails, no fork is left."""
        _retry_while_busy(partial(session.fork, name))
        try:
            self._client.session(name).save()
        except BaseException:
            self._delete(name)
            raise

    def _delete(self, name: str) -> None:
        """Delete a session, if it and the server are still there."""
        with suppress(KvkeepError):
            _retry_while_busy(partial(self._client.delete, name))

    def _save_branch(self, branch: str, session: RemoteChatSession) -> str:
        """Save a branch in a session named after the chat and the branch; return its name."""
        if session.name == self._chat_name or session.name in self._kept_session_names:
            return session.name
        try:
            used_names = {entry["name"] for entry in self._client.sessions()}
            names = branch_session_names(self._chat_name, branch)
            name = next(name for name in names if name not in used_names)
            self._save_fork(session, name)
        except KvkeepError as error:
            self._kept_session_names.add(session.name)
            say(str(error))
            return session.name
        self._temporary_session_names.append(session.name)
        self._kept_session_names.add(name)
        return name


def _token_statuses(memory: dict[str, Any]) -> list[Any]:
    """Return the status of each token. memory: the server's description of a session's cache."""
    return [run["standing"] for run in memory["runs"] for _ in range(run["count"])]


def _cells_text(memory: dict[str, Any]) -> str:
    shared = f" ({format_mb(memory['bytes_shared'])} shared)" if memory["bytes_shared"] else ""
    size = format_mb(memory["bytes"])
    return f"{memory['cells']:,} of {memory['max_kv_size']:,} cells, {size}{shared}"
