"""`kvkeep chat --server`: the same talk, in a session that lives on a server."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from kvkeep.cli.branches import Branches
from kvkeep.cli.memory import MemoryChoice
from kvkeep.cli.memory_map import drawn
from kvkeep.cli.options import SamplingChoice, given
from kvkeep.cli.prompt import Prompt
from kvkeep.cli.remote.conversation import RemoteConversation
from kvkeep.cli.report import counted, megabytes
from kvkeep.cli.saying import say
from kvkeep.cli.slash import run_command
from kvkeep.cli.terminated import terminated
from kvkeep.client import Client, RemoteSession
from kvkeep.errors import Busy, InvalidArgument, KvkeepError, NoSuchSession

if TYPE_CHECKING:
    from kvkeep.session.conversation import Conversation

_LOCAL = (
    *("model", "dtype", "device", "weights", "prefill_step", "calibration"),
    *("prefix_cache", "prefix_cache_bytes", "report", "resumed"),
)
_SETTINGS = (
    *("policy", "max_kv_size", "keep", "discard", "group", "window", "method", "ratio"),
    *("kv_bits", "far_bits"),
)
_ENDLESS = 1_000_000  # tokens, the most that a server writes at once


def talk_at(
    url: str,
    key: str | None,
    name: str | None,
    system: str | None,
    max_tokens: int,
    memory: MemoryChoice,
    sampling: SamplingChoice,
) -> None:
    """The whole of a chat. Raises KvkeepError before the first word where it cannot begin."""
    unused = [option for option in _LOCAL if given(option)]
    if unused:
        options = ", ".join(map(_written, unused))
        raise InvalidArgument(f"{options}: not with --server, whose model and sessions are its own")
    settings = {each: getattr(memory, each) for each in _SETTINGS if given(each)}
    how = _sampling(sampling) | {"max_tokens": _ENDLESS if max_tokens < 0 else max_tokens}
    with Client(url, key) as client:
        remote, tokens = _opened(client, name, settings)
        talk = _Talk(client, remote, system, how)
        try:
            talk.talk(tokens)
        finally:
            for each in talk.remotes.values() if name is None else ():  # not asked for by name
                _delete(client, each.name)


def _opened(
    client: Client, name: str | None, settings: dict[str, Any]
) -> tuple[RemoteSession, int]:
    """The session, and how many tokens it holds."""
    if name is not None:
        remote = client.session(name)
        try:
            tokens = remote.memory()["tokens"]
        except NoSuchSession:
            return client.create(name, **settings), 0
        if settings:
            options = ", ".join(map(_written, settings))
            raise InvalidArgument(f"{options}: session {name} is there, with settings of its own")
        return remote, tokens
    return client.create(**settings), 0


def _delete(client: Client, name: str) -> None:
    """An answer that was broken off may still be at its last token, or at a step of the prompt."""
    for _ in range(50):
        try:
            client.delete(name)
        except Busy:
            time.sleep(0.1)
        except KvkeepError:  # it is gone, or the server is
            return
        else:
            return


def _written(option: str) -> str:
    """As the user writes it."""
    return "--" + {"resumed": "continue"}.get(option, option.replace("_", "-"))


def _sampling(choice: SamplingChoice) -> dict[str, Any]:
    choice.resolve()
    found: dict[str, Any] = {
        "temperature": choice.temperature,
        "top_k": choice.top_k,
        "top_p": choice.top_p,
        "min_p": choice.min_p,
        "repeat_penalty": choice.repetition_penalty,
        "repeat_last_n": choice.repetition_window,
        "stop": list(choice.stop),
    }
    return found if choice.seed is None else {**found, "seed": choice.seed}


class _Talk:
    """The loop: a line from the user, a command's effect or the server's answer."""

    def __init__(
        self, client: Client, remote: RemoteSession, system: str | None, how: dict[str, Any]
    ):
        conversation = RemoteConversation(client, remote)
        self._branches = Branches(cast("Conversation", conversation))  # for what commands ask of it
        self._client, self._system, self._how = client, system, how
        self._prompt = Prompt()
        self._commands: dict[str, Callable[[], str]] = {
            "/memory": self._memory,
            "/branches": self._lines,
            "/keep": _no_keep,
        }

    @property
    def remotes(self) -> dict[str, RemoteSession]:
        """The session of each branch."""
        found = self._branches.conversations.items()
        return {name: cast(RemoteConversation, each).remote for name, each in found}

    @property
    def _remote(self) -> RemoteSession:
        return self.remotes[self._branches.name]

    def talk(self, tokens: int) -> None:
        if self._prompt.interactive:
            past = f", {counted(tokens, 'token')} so far" if tokens else ""
            say(f"session {self._remote.name}{past}: /help lists commands, Ctrl-D ends")
        while (line := self._prompt.read()) is not None:
            words = line.strip()
            if words == "/exit":
                return
            if words.startswith("/"):
                self._command(words)
            elif words:
                self._answer(line)

    def _answer(self, words: str) -> None:
        """Ctrl-C ends it, here and on the server; what was written stays."""
        turn = self._remote.stream_turn(words, self._system, **self._how)
        try:
            with closing(turn):
                for name, told in turn:
                    if name == "token":
                        print(told["text"], end="", flush=True)
        except KeyboardInterrupt:
            if not self._prompt.interactive or terminated():
                raise
        except KvkeepError as error:
            if not self._prompt.interactive:
                raise
            say(str(error))
        finally:
            print(flush=True)
        self._system = None  # from the first turn on the session has it

    def _command(self, line: str) -> None:
        try:
            own = self._commands.get(line.partition(" ")[0])
            say(own() if own else run_command(line, self._branches))
        except KvkeepError as error:
            say(str(error))

    def _memory(self) -> str:
        found = self._remote.memory()
        standing = [run["standing"] for run in found["runs"] for _ in range(run["count"])]
        held = f"{found['cells']} of {found['max_kv_size']} cells, {megabytes(found['bytes'])}"
        shared = f" ({megabytes(found['bytes_shared'])} shared)" if found["bytes_shared"] else ""
        return "\n".join([*drawn(standing), f"{held}{shared}; policy {found['policy']}"])

    def _lines(self) -> str:
        return "\n".join(
            f"{'*' if name == self._branches.name else ' '} {name}: session {each.name}, "
            f"{counted(each.info()['tokens'], 'token')}"
            for name, each in self.remotes.items()
        )


def _no_keep() -> str:
    raise InvalidArgument("what a server keeps of a session is said when it begins: --keep")
