"""`kvkeep chat --server`: a chat in a session on a server."""

import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, cast

from kvkeep.cli.chat.branches import Branches, branch_session_names
from kvkeep.cli.chat.loop import ChatLoop, PrefillAborted, last_turn
from kvkeep.cli.chat.remote_conversation import RemoteConversation
from kvkeep.cli.chat.settings import ChatSettings
from kvkeep.cli.memory import MemoryChoice
from kvkeep.cli.memory_map import draw_map, status_line
from kvkeep.cli.options import is_given
from kvkeep.cli.output import counted, megabytes, say
from kvkeep.client import Client, RemoteSession
from kvkeep.errors import Busy, InvalidArgument, KvkeepError, NoSuchSession

if TYPE_CHECKING:
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
    key: str | None,
    name: str | None,
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
    with Client(url, key) as client:
        session = _open_session(client, name, requested)
        chat = RemoteChat(client, session, system, settings, name is not None)
        try:
            chat.talk()
        finally:
            chat.keep_branches()
            for unnamed in chat.unnamed:
                _delete(client, unnamed)


def _open_session(client: Client, name: str | None, settings: dict[str, Any]) -> RemoteSession:
    """Return the session of that name, creating it if necessary; an unnamed one for None.

    Raises InvalidArgument for settings of a session that exists.
    """
    if name is None:
        return cast(RemoteSession, client.create(**settings))
    remote = client.session(name)
    try:
        remote.info()
    except NoSuchSession:
        return cast(RemoteSession, client.create(name, **settings))
    if settings:
        options = ", ".join(map(_flag, settings))
        raise InvalidArgument(f"{options}: session {name} is there, with settings of its own")
    return remote


def _delete(client: Client, name: str) -> None:
    with suppress(KvkeepError):  # the session or the server is gone
        _retry_while_busy(lambda: client.delete(name))


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
    """A chat in a session on a server. named: whether the session was given by name."""

    def __init__(
        self,
        client: Client,
        remote: RemoteSession,
        system: str | None,
        settings: ChatSettings,
        named: bool,
    ):
        conversation = RemoteConversation(client, remote)
        branches = Branches(cast("Conversation", conversation))  # it has what commands use
        super().__init__(branches, settings)
        self._client, self._system = client, system
        self._named = named
        self._abandoned, self._saved = list[str](), set[str]()  # names of sessions
        self._name = remote.name if named else ""  # of the chat; "": deleted at its end
        self.commands = {
            "/memory": lambda argument: self._memory(),
            "/branches": lambda argument: self._branch_lines(),
            "/keep": lambda argument: _no_keep(),
        }

    @property
    def remotes(self) -> dict[str, RemoteSession]:
        """The session of each branch."""
        conversations = self.branches.conversations.items()
        return {name: cast(RemoteConversation, c).remote for name, c in conversations}

    @property
    def unnamed(self) -> list[str]:
        """The sessions to delete at the end: those that were neither named nor saved."""
        current = [] if self._named else [remote.name for remote in self.remotes.values()]
        return [name for name in (*self._abandoned, *current) if name not in self._saved]

    def keep_branches(self) -> None:
        """Save the branches of a named chat under names of their own, and print them."""
        if not self._name or not self.branches.others:
            return
        for branch, remote in self.remotes.items():
            name = remote.name
            if name != self._name and name not in self._saved:
                try:
                    name = self._save_branch(remote, branch)
                except KvkeepError as error:
                    self._saved.add(name)
                    say(str(error))
                else:
                    self._abandoned.append(remote.name)
                    self._saved.add(name)
            say(f"branch {branch} is session {name}")

    def _save_branch(self, remote: RemoteSession, branch: str) -> str:
        """Fork a branch into a session with a free name; return the name. Raises KvkeepError."""
        known = {session["name"] for session in self._client.sessions()}
        name = next(n for n in branch_session_names(self._name, branch) if n not in known)
        _retry_while_busy(lambda: remote.fork(name).save())
        return name

    @property
    def _remote(self) -> RemoteSession:
        return self.remotes[self.branches.name]

    def talk(self) -> None:
        if self.prompt.interactive:
            tokens = self._remote.info()["tokens"]
            past = f", {counted(tokens, 'token')} so far" if tokens else ""
            say(f"session {self._remote.name}{past}: /help lists commands, Ctrl-D ends")
            self.show_last()
        super().talk()

    def turn(self, message: str) -> None:
        """Run a turn on the server. Ctrl-C stops it there too; the text so far stays."""
        sampling, screen, started = _sampling(self.settings), self.screen(), False
        turn = self._remote.stream_turn(message, self._system, **sampling)
        try:
            with closing(turn):
                for name, event in turn:
                    if name == "token":
                        started = True
                        screen.write(event["text"])
        except KvkeepError as error:
            if not started:
                raise PrefillAborted(error) from error
            raise
        finally:
            screen.end()
        self.warn_if_forgotten()

    def again(self) -> None:
        conversation, number = self.branches.current, last_turn(self.branches)
        session = conversation.session
        start, end = session.places[f"turn {number} question"]
        question = conversation.codec.decode(session.tokens[start:end])
        conversation.undo()
        self.turn(question)

    def save(self, name: str) -> str:
        if not name or name == self._remote.name:
            self._remote.save()
            return f"session {self._remote.name} is on the server's disk"
        fork = self._remote.fork(name)
        fork.save()
        if not self._named:
            self._abandoned.append(self._remote.name)
        self._saved.add(name)
        self._name = self._name or name
        self.branches.replace(cast("Conversation", RemoteConversation(self._client, fork)))
        return f"goes on in session {name}, which is on the server's disk"

    def bar(self) -> str:
        memory = self._remote.memory()
        return status_line(_standing(memory), _cells(memory))

    def _memory(self) -> str:
        memory = self._remote.memory()
        policy = memory["policy"]
        return "\n".join([*draw_map(_standing(memory)), f"{_cells(memory)}; policy {policy}"])

    def _branch_lines(self) -> str:
        return "\n".join(
            f"{'*' if name == self.branches.name else ' '} {name}: session {remote.name}, "
            f"{counted(remote.info()['tokens'], 'token')}"
            for name, remote in self.remotes.items()
        )


def _standing(memory: dict[str, Any]) -> list[Any]:
    return [run["standing"] for run in memory["runs"] for _ in range(run["count"])]


def _cells(memory: dict[str, Any]) -> str:
    """Describe the cells and bytes in a response of the memory route."""
    shared = f" ({megabytes(memory['bytes_shared'])} shared)" if memory["bytes_shared"] else ""
    size = megabytes(memory["bytes"])
    return f"{memory['cells']:,} of {memory['max_kv_size']:,} cells, {size}{shared}"


def _no_keep() -> str:
    raise InvalidArgument("on a server, --keep can only be given when a session is created")
