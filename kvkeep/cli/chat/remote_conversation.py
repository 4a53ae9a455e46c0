"""A conversation on a server, with the interface that chat commands use."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvkeep.client import Client, RemoteSession
from kvkeep.client.remote import ApiRequest
from kvkeep.errors import InvalidArgument
from kvkeep.session.conversation import turns_in

_MAX_TOKENS = 4096  # in one response


class RemoteCodec:
    """The text of token ids, decoded by the server's tokenizer."""

    def __init__(self, client: Client):
        self._client = client

    def decode(self, ids: Sequence[int]) -> str:
        response = self._client.send(ApiRequest("POST", "/detokenize", {"tokens": list(ids)}))
        return str(response["content"])


class RemoteChatSession(RemoteSession):
    """A session on a server, with the attributes of `Session` that commands use.

    Every access is a request: nothing is cached.
    """

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        spans = self.memory()["spans"]
        return {name: (span["start"], span["end"]) for name, span in spans.items()}

    @property
    def tokens(self) -> list[int]:
        total, ids = self.info()["tokens"], list[int]()
        while len(ids) < total:
            pieces = self.text(len(ids), min(total, len(ids) + _MAX_TOKENS))["pieces"]
            ids += [piece["id"] for piece in pieces]
        return ids

    def remembered(self, start: int, end: int) -> int:
        """Return how many of these tokens have a cell of their own."""
        count = 0
        for run in self.memory()["runs"]:
            if run["standing"] not in ("compressed", "forgotten"):
                run_end = run["start"] + run["count"]
                count += max(0, min(end, run_end) - max(start, run["start"]))
        return count

    def replace(self, *arguments: Any, **options: Any) -> Any:
        """Replace tokens; return the cost with the attributes of an `EditReport`."""
        return SimpleNamespace(**super().replace(*arguments, **options)["result"])


class RemoteConversation:
    """A conversation in a session on a server. Turns are spans, as in a `Conversation`."""

    system: str | None = None  # not needed: the server stores the system prompt

    def __init__(self, client: Client, session_name: str):
        self._client = client
        self.session = RemoteChatSession(client, session_name)
        self.codec = RemoteCodec(client)

    @property
    def turns(self) -> list[int]:
        return turns_in(self.session.places)

    def fork(self, name: str | None = None) -> "RemoteConversation":
        return RemoteConversation(self._client, self.session.fork(name).name)

    def undo(self) -> int:
        """Rewind the last turn and return its number of tokens."""
        memory = self.session.memory()
        turns = turns_in(memory["spans"])
        if not turns:
            raise InvalidArgument("there is no turn to take back")
        count = int(memory["tokens"] - memory["spans"][f"turn {turns[-1]}"]["start"])
        self.session.rewind(count)
        return count
