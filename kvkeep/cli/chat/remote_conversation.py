"""A conversation on a server, with the interface that chat commands use."""

from collections.abc import Sequence
from typing import Any

from kvkeep.client import Client, RemoteSession
from kvkeep.client.remote import ApiRequest
from kvkeep.errors import InvalidArgument
from kvkeep.session.conversation import turns_in

_GONE = ("compressed", "forgotten")
_PART = 4096  # the most tokens in one response


class RemoteText:
    """The text of token ids, decoded by the server's tokenizer."""

    def __init__(self, client: Client):
        self._client = client

    def decode(self, ids: Sequence[int]) -> str:
        response = self._client.send(ApiRequest("POST", "/detokenize", {"tokens": list(ids)}))
        return str(response["content"])


class RemoteMemory:
    """A session on a server, with the attributes of `Session` that commands use.

    Every access is a request: nothing is cached.
    """

    def __init__(self, remote: RemoteSession):
        self.remote = remote

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        spans = self.remote.memory()["spans"]
        return {name: (span["start"], span["end"]) for name, span in spans.items()}

    @property
    def tokens(self) -> list[int]:
        total, ids = self.remote.info()["tokens"], list[int]()
        while len(ids) < total:
            pieces = self.remote.text(len(ids), min(total, len(ids) + _PART))["pieces"]
            ids += [piece["id"] for piece in pieces]
        return ids

    def remembered(self, start: int, end: int) -> int:
        """Return how many of these tokens have a cell of their own."""
        count = 0
        for run in self.remote.memory()["runs"]:
            first, last = max(start, run["start"]), min(end, run["start"] + run["count"])
            count += max(0, last - first) if run["standing"] not in _GONE else 0
        return count

    def rewind(self, count: int) -> None:
        self.remote.rewind(count)

    def pin(self, start: int, end: int) -> None:
        self.remote.pin(start, end)

    def unpin(self, start: int, end: int) -> None:
        self.remote.unpin(start, end)

    def delete(self, start: int, end: int) -> Any:
        return self.remote.delete(start, end)

    def replace(self, start: int, end: int, text: str, recompute: str = "none") -> Any:
        return RemoteEditReport(self.remote.replace(start, end, text, recompute)["result"])


class RemoteEditReport:
    """The cost of an edit, from the server's response."""

    def __init__(self, result: dict[str, Any]):
        self.tokens_evaluated: int = result["tokens_evaluated"]
        self.seconds: float = result["seconds"]


class RemoteConversation:
    """A conversation in a session on a server. Turns are spans, as in a `Conversation`."""

    system: str | None = None  # not needed: the server stores the system prompt

    def __init__(self, client: Client, remote: RemoteSession):
        self._client, self.remote = client, remote
        self.session, self.codec = RemoteMemory(remote), RemoteText(client)

    @property
    def turns(self) -> list[int]:
        return turns_in(self.session.places)

    def fork(self) -> "RemoteConversation":
        return RemoteConversation(self._client, self.remote.fork())

    def undo(self) -> int:
        """Rewind the last turn and return its number of tokens."""
        memory = self.remote.memory()
        turns = turns_in(memory["spans"])
        if not turns:
            raise InvalidArgument("there is no turn to take back")
        count = int(memory["tokens"] - memory["spans"][f"turn {turns[-1]}"]["start"])
        self.remote.rewind(count)
        return count
