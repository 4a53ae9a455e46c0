"""A session on a server, with the attributes of a local conversation that chat commands use."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvkeep.client import Client, RemoteSession
from kvkeep.client.remote import ApiRequest
from kvkeep.errors import InvalidArgument
from kvkeep.session.turn_spans import turn_numbers

_MAX_TEXT_TOKENS = 4096  # that one `text` request returns


class RemoteChatSession(RemoteSession):
    """A session on a server, with attributes of `Session`. Each access sends a request."""

    @property
    def span_ranges(self) -> dict[str, tuple[int, int]]:
        spans = self.memory()["spans"]
        return {name: (span["start"], span["end"]) for name, span in spans.items()}

    @property
    def tokens(self) -> "RemoteTokens":
        return RemoteTokens(self)

    def remembered(self, start: int, end: int) -> int:
        """Return how many of tokens `start ... end - 1` have a cell of their own."""
        count = 0
        for run in self.memory()["runs"]:  # of consecutive tokens with one status, "standing"
            if run["standing"] not in ("compressed", "forgotten"):
                run_end = run["start"] + run["count"]
                count += max(0, min(end, run_end) - max(start, run["start"]))
        return count

    def replace(self, *arguments: Any, **options: Any) -> Any:
        """Replace tokens; return an object with the attributes of an `EditReport`."""
        return SimpleNamespace(**super().replace(*arguments, **options)["result"])


class RemoteTokens:
    """The tokens of a session on a server: a slice fetches its own only, and a length none."""

    def __init__(self, session: RemoteChatSession):
        self._session = session

    def __len__(self) -> int:
        return int(self._session.info()["tokens"])

    def __getitem__(self, part: slice) -> list[int]:
        start, end, _ = part.indices(len(self))
        ids = list[int]()
        for first in range(start, end, _MAX_TEXT_TOKENS):
            pieces = self._session.text(first, min(end, first + _MAX_TEXT_TOKENS))["pieces"]
            ids += [piece["id"] for piece in pieces]
        return ids


class RemoteConversation:
    """A session on a server, with those attributes of `Conversation` that commands use.

    system: of `--system`, or what the user edited it to; None for that of the session.
    """

    def __init__(self, client: Client, session_name: str, system: str | None):
        self._client = client
        self.system = system
        self.session = RemoteChatSession(client, session_name)
        self.codec = SimpleNamespace(decode=self._decode)

    @property
    def turns(self) -> list[int]:
        return turn_numbers(self.session.span_ranges)

    def _decode(self, ids: Sequence[int]) -> str:
        response = self._client.send(ApiRequest("POST", "/detokenize", {"tokens": list(ids)}))
        return str(response["content"])

    def fork(self) -> "RemoteConversation":
        return RemoteConversation(self._client, self.session.fork().name, self.system)

    def undo(self) -> int:
        """Rewind the last turn; return its number of tokens."""
        memory = self.session.memory()
        turns = turn_numbers(memory["spans"])
        if not turns:
            raise InvalidArgument("there is no turn to remove")
        count = int(memory["tokens"] - memory["spans"][f"turn {turns[-1]}"]["start"])
        self.session.rewind(count)
        return count
