"""`kvkeep chat --server`: a chat in a session on a server."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

from kvkeep.cli.chat.branches import Branches, branch_session_names
from kvkeep.cli.chat.commands import COMMANDS, Command, CommandTarget
from kvkeep.cli.chat.loop import ChatLoop, PrefillAborted
from kvkeep.cli.chat.remote_conversation import RemoteChatSession, RemoteConversation
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.memory import MemoryChoice
from kvkeep.cli.memory_map import draw_map, status_line
from kvkeep.cli.options import is_given
from kvkeep.cli.output import counted, megabytes, say
from kvkeep.client import Client
from kvkeep.errors import Busy, InvalidArgument, KvkeepError, NoSuchSession
from kvkeep.session.conversation import Conversation

_LOCAL_ONLY = (  # options without meaning for a session on a server
    *("model", "dtype", "device", "weights", "prefill_step", "calibration"),
    *("prefix_cache", "prefix_cache_bytes", "store", "secret_file", "report", "resumed"),
)
_SETTINGS = (
    *("policy", "max_kv_size", "keep", "discard", "group", "window", "method", "ratio"),
    *("kv_bits", "far_bits"),
)
_ENDLESS = 1_000_000  # the most tokens that a server generates at once


def chat_at_server(
    url: str,
    api_key: str | None,
    session_name: str | None,
    system: str | None,
    memory: MemoryChoice,
    settings: ChatSettings,
) -> None:
    """Run a chat in a session of a server.

    Raises KvkeepError, before the first turn, if an option does not apply or the session cannot be
    opened.
    """
    unused = [option for option in _LOCAL_ONLY if is_given(option)]
    if unused:
        options = ", ".join(map(_flag, unused))
        raise InvalidArgument(f"{options}: not with --server, whose model and sessions are its own")
    requested = {name: getattr(memory, name) for name in _SETTINGS if is_given(name)}
    with Client(url, api_key) as client:
        name = _open_session(client, session_name, requested)
        RemoteChat(client, name, system, settings, is_named=session_name is not None).talk()


def _open_session(client: Client, name: str | None, settings: dict[str, Any]) -> str:
    """Find a session or create it, without a name for None; return its name.

    Raises InvalidArgument for settings of a session that exists.
    """
    if name is not None:
        try:
            client.session(name).info()
        except NoSuchSession:
            pass
        else:
            if settings:
                options = ", ".join(map(_flag, settings))
                raise InvalidArgument(
                    f"{options}: session {name} is there, with settings of its own"
                )
            return name
    return str(client.create(name, **settings).name)


def _retry_while_busy(call: Callable[[], object]) -> None:
    """Retry a call for up to 5 seconds while the session is busy. Raises KvkeepError.

    After a cancelled answer, the server may still be computing its last token or prefill step.
    """
    for _ in range(50):
        with suppress(Busy):
            call()
            return
        time.sleep(0.1)
    call()


def _flag(option: str) -> str:
    """Return the flag of a parameter: "--max-kv-size" for "max_kv_size"."""
    return "--" + {"resumed": "continue"}.get(option, option.replace("_", "-"))


def _sampling(settings: ChatSettings) -> dict[str, Any]:
    """Return the sampling parameters by the names of the server's API."""
    choice = settings.sampling
    parameters: dict[str, Any] = {
        "temperature": choice.temperature,
        "top_k": choice.top_k,
        "top_p": choice.top_p,
        "min_p": choice.min_p,
        "repeat_penalty": choice.repetition_penalty,
        "repeat_last_n": choice.repetition_window,
        "stop": list(choice.stop),
        "max_tokens": _ENDLESS if settings.max_tokens is None else settings.max_tokens,
    }
    return parameters if choice.seed is None else {**parameters, "seed": choice.seed}


class RemoteChat(ChatLoop):
    """A chat in a session on a server. is_named: whether the session was given by name."""

    def __init__(
        self,
        client: Client,
        session_name: str,
        system: str | None,
        settings: ChatSettings,
        is_named: bool,
    ):
        # It has the attributes of a Conversation that commands use.
        conversation = cast(Conversation, RemoteConversation(client, session_name))
        super().__init__(Branches(conversation), settings)
        self._client, self._system, self._is_named = client, system, is_named
        self._abandoned = list[str]()  # sessions that the chat left, to be deleted
        self._saved = set[str]()  # sessions that stay after the chat
        self._name = session_name if is_named else ""  # of the chat; "": deleted at its end
        self.commands = _remote_commands(self)

    def title(self) -> str:
        tokens = self._session.info()["tokens"]
        past = f", {counted(tokens, 'token')} so far" if tokens else ""
        return f"session {self._session.name}{past}"

    @property
    def _sessions(self) -> dict[str, RemoteChatSession]:
        """The session of each branch."""
        conversations = self.branches.conversations.items()
        return {name: cast(RemoteConversation, c).session for name, c in conversations}

    @property
    def _session(self) -> RemoteChatSession:
        return self._sessions[self.branches.name]

    def turn(self, message: str) -> None:
        """Run a turn on the server. Ctrl-C stops it there too; the text so far stays."""
        sampling, screen, has_started = _sampling(self.settings), self.screen(), False
        events = self._session.stream_turn(message, self._system, **sampling)
        try:
            with closing(events):
                for name, event in events:
                    if name == "token":
                        has_started = True
                        screen.write(event["text"])
        except KvkeepError as error:
            if not has_started:
                raise PrefillAborted(error) from error
            raise
        finally:
            screen.end()
        self.warn_if_forgotten()

    def regenerate_turn(self, turn: int) -> None:
        conversation = self.branches.current
        start, end = conversation.session.places[f"turn {turn} question"]
        question = conversation.codec.decode(conversation.session.tokens[start:end])
        conversation.undo()
        self.turn(question)

    def save(self, name: str) -> str:
        session = self._session
        if not name or name == session.name:
            session.save()
            return f"session {session.name} is on the server's disk"
        conversation = cast(RemoteConversation, self.branches.current).fork(name)
        conversation.session.save()
        if not self._is_named:
            self._abandoned.append(session.name)
        self._saved.add(name)
        self._name = self._name or name
        self.branches.replace(cast(Conversation, conversation))
        return f"goes on in session {name}, which is on the server's disk"

    def memory_bar(self) -> str:
        memory = self._session.memory()
        return status_line(_token_status(memory), _cells(memory))

    def memory_map(self) -> str:
        memory = self._session.memory()
        description = f"{_cells(memory)}; policy {memory['policy']}"
        return "\n".join([*draw_map(_token_status(memory)), description])

    def branch_lines(self) -> str:
        return "\n".join(
            f"{'*' if name == self.branches.name else ' '} {name}: session {session.name}, "
            f"{counted(session.info()['tokens'], 'token')}"
            for name, session in self._sessions.items()
        )

    def close(self) -> None:
        """Save the branches of a named chat, and delete the sessions that are not to stay."""
        if self._name and self.branches.others:
            for branch, session in self._sessions.items():
                say(f"branch {branch} is session {self._keep_branch(branch, session)}")
        unnamed = [] if self._is_named else [session.name for session in self._sessions.values()]
        for name in [*self._abandoned, *unnamed]:
            if name not in self._saved:
                with suppress(KvkeepError):  # the session or the server is gone
                    _retry_while_busy(partial(self._client.delete, name))

    def _keep_branch(self, branch: str, session: RemoteChatSession) -> str:
        """Save a branch in a session with a free name, if it has none; return the name."""
        if session.name == self._name or session.name in self._saved:
            return session.name
        try:
            existing = {entry["name"] for entry in self._client.sessions()}
            names = branch_session_names(self._name, branch)
            name = next(name for name in names if name not in existing)
            _retry_while_busy(lambda: session.fork(name).save())
        except KvkeepError as error:
            self._saved.add(session.name)
            say(str(error))
            return session.name
        self._abandoned.append(session.name)
        self._saved.add(name)
        return name


def _remote_commands(chat: RemoteChat) -> Mapping[str, Command]:
    """Return the commands, with those replaced that a server does in another way."""

    def refuse_keep(target: CommandTarget, argument: str) -> NoReturn:
        raise InvalidArgument("on a server, --keep can only be given when a session is created")

    return {
        **COMMANDS,
        "/memory": replace(COMMANDS["/memory"], run=lambda target, argument: chat.memory_map()),
        "/branches": replace(COMMANDS["/branches"], run=lambda *_: chat.branch_lines()),
        "/keep": replace(COMMANDS["/keep"], run=refuse_keep),
    }


def _token_status(memory: dict[str, Any]) -> list[Any]:
    """Return the status of each token in a response of the memory route."""
    return [run["standing"] for run in memory["runs"] for _ in range(run["count"])]


def _cells(memory: dict[str, Any]) -> str:
    """Describe the cells and bytes in a response of the memory route."""
    shared = f" ({megabytes(memory['bytes_shared'])} shared)" if memory["bytes_shared"] else ""
    size = megabytes(memory["bytes"])
    return f"{memory['cells']:,} of {memory['max_kv_size']:,} cells, {size}{shared}"
