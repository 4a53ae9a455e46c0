"""`kvkeep chat --server`: the same talk, in a session that lives on a server."""

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
from kvkeep.cli.options import given
from kvkeep.cli.output import counted, megabytes, say
from kvkeep.client import Client, RemoteSession
from kvkeep.errors import Busy, InvalidArgument, KvkeepError, NoSuchSession

if TYPE_CHECKING:
    from kvkeep.session.conversation import Conversation

_LOCAL = (
    *("model", "dtype", "device", "weights", "prefill_step", "calibration"),
    *("prefix_cache", "prefix_cache_bytes", "store", "secret_file", "report", "resumed"),
)
_SETTINGS = (
    *("policy", "max_kv_size", "keep", "discard", "group", "window", "method", "ratio"),
    *("kv_bits", "far_bits"),
)
_ENDLESS = 1_000_000  # tokens, the most that a server writes at once


def chat_at_server(
    url: str,
    key: str | None,
    name: str | None,
    system: str | None,
    memory: MemoryChoice,
    settings: ChatSettings,
) -> None:
    """The whole of a chat. Raises KvkeepError before the first word where it cannot begin."""
    unused = [option for option in _LOCAL if given(option)]
    if unused:
        options = ", ".join(map(_written, unused))
        raise InvalidArgument(f"{options}: not with --server, whose model and sessions are its own")
    own = {each: getattr(memory, each) for each in _SETTINGS if given(each)}
    with Client(url, key) as client:
        talk = RemoteChat(client, _opened(client, name, own), system, settings, name is not None)
        try:
            talk.talk()
        finally:
            talk.keep_branches()
            for each in talk.unnamed:
                _delete(client, each)


def _opened(client: Client, name: str | None, settings: dict[str, Any]) -> RemoteSession:
    """The session of that name, or one that is made for the chat."""
    if name is None:
        return cast(RemoteSession, client.create(**settings))
    remote = client.session(name)
    try:
        remote.info()
    except NoSuchSession:
        return cast(RemoteSession, client.create(name, **settings))
    if settings:
        options = ", ".join(map(_written, settings))
        raise InvalidArgument(f"{options}: session {name} is there, with settings of its own")
    return remote


def _delete(client: Client, name: str) -> None:
    with suppress(KvkeepError):  # it is gone, or the server is
        _patiently(lambda: client.delete(name))


def _patiently(call: Callable[[], object]) -> None:
    """Tries again while a session is busy: an answer that was broken off may still be at its last
    token, or at a step of the prompt. Raises KvkeepError.
    """
    for _ in range(50):
        with suppress(Busy):
            call()
            return
        time.sleep(0.1)
    call()


def _written(option: str) -> str:
    """As the user writes it."""
    return "--" + {"resumed": "continue"}.get(option, option.replace("_", "-"))


def _sampling(settings: ChatSettings) -> dict[str, Any]:
    choice = settings.sampling
    found: dict[str, Any] = {
        "temperature": choice.temperature,
        "top_k": choice.top_k,
        "top_p": choice.top_p,
        "min_p": choice.min_p,
        "repeat_penalty": choice.repetition_penalty,
        "repeat_last_n": choice.repetition_window,
        "stop": list(choice.stop),
        "max_tokens": _ENDLESS if settings.max_tokens is None else settings.max_tokens,
    }
    return found if choice.seed is None else {**found, "seed": choice.seed}


class RemoteChat(ChatLoop):
    """A chat in a session of a server. kept: the session was asked for by name."""

    def __init__(
        self,
        client: Client,
        remote: RemoteSession,
        system: str | None,
        settings: ChatSettings,
        kept: bool,
    ):
        conversation = RemoteConversation(client, remote)
        branches = Branches(cast("Conversation", conversation))  # for what commands ask of it
        super().__init__(branches, settings)
        self._client, self._system = client, system
        self._lasting = kept
        self._left, self._kept = list[str](), set[str]()
        self._name = remote.name if kept else ""  # of the chat; "": it ends with the talk
        self.commands = {
            "/memory": lambda argument: self._memory(),
            "/branches": lambda argument: self._lines(),
            "/keep": lambda argument: _no_keep(),
        }

    @property
    def remotes(self) -> dict[str, RemoteSession]:
        """The session of each branch."""
        found = self.branches.conversations.items()
        return {name: cast(RemoteConversation, each).remote for name, each in found}

    @property
    def unnamed(self) -> list[str]:
        """Sessions without a name, but for those that were saved under one."""
        names = [*self._left, *([] if self._lasting else (r.name for r in self.remotes.values()))]
        return [name for name in names if name not in self._kept]

    def keep_branches(self) -> None:
        """Gives the branches of a chat with a name one each, and says what they are."""
        if not self._name or not self.branches.others:
            return
        for branch, remote in self.remotes.items():
            name = remote.name
            if name != self._name and name not in self._kept:
                try:
                    name = self._forked(remote, branch)
                except KvkeepError as error:
                    self._kept.add(name)
                    say(str(error))
                else:
                    self._left.append(remote.name)
                    self._kept.add(name)
            say(f"branch {branch} is session {name}")

    def _forked(self, remote: RemoteSession, branch: str) -> str:
        """The name of a session of its own that a branch has from now on. Raises KvkeepError."""
        known = {each["name"] for each in self._client.sessions()}
        name = next(n for n in branch_session_names(self._name, branch) if n not in known)
        _patiently(lambda: remote.fork(name).save())
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

    def turn(self, words: str) -> None:
        """Ctrl-C ends it, here and on the server; what was written stays."""
        how, screen, begun = _sampling(self.settings), self.screen(), False
        turn = self._remote.stream_turn(words, self._system, **how)
        try:
            with closing(turn):
                for name, told in turn:
                    if name == "token":
                        begun = True
                        screen.write(told["text"])
        except KvkeepError as error:
            if not begun:
                raise PrefillAborted(error) from error
            raise
        finally:
            screen.end()
        self.tell_forgotten()

    def again(self) -> None:
        conversation, number = self.branches.current, last_turn(self.branches)
        session = conversation.session
        start, end = session.places[f"turn {number} question"]
        words = conversation.codec.decode(session.tokens[start:end])
        conversation.undo()
        self.turn(words)

    def save(self, name: str) -> str:
        if not name or name == self._remote.name:
            self._remote.save()
            return f"session {self._remote.name} is on the server's disk"
        fork = self._remote.fork(name)
        fork.save()
        if not self._lasting:
            self._left.append(self._remote.name)
        self._kept.add(name)
        self._name = self._name or name
        self.branches.replace(cast("Conversation", RemoteConversation(self._client, fork)))
        return f"goes on in session {name}, which is on the server's disk"

    def bar(self) -> str:
        found = self._remote.memory()
        return status_line(_standing(found), _held(found))

    def _memory(self) -> str:
        found = self._remote.memory()
        return "\n".join([*draw_map(_standing(found)), f"{_held(found)}; policy {found['policy']}"])

    def _lines(self) -> str:
        return "\n".join(
            f"{'*' if name == self.branches.name else ' '} {name}: session {each.name}, "
            f"{counted(each.info()['tokens'], 'token')}"
            for name, each in self.remotes.items()
        )


def _standing(found: dict[str, Any]) -> list[Any]:
    return [run["standing"] for run in found["runs"] for _ in range(run["count"])]


def _held(found: dict[str, Any]) -> str:
    shared = f" ({megabytes(found['bytes_shared'])} shared)" if found["bytes_shared"] else ""
    size = megabytes(found["bytes"])
    return f"{found['cells']:,} of {found['max_kv_size']:,} cells, {size}{shared}"


def _no_keep() -> str:
    raise InvalidArgument("what a server keeps of a session is said when it begins: --keep")
