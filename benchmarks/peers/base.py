"""The interface of peers, and the settings that they share."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from kvkeep.types import DtypeName

DTYPE: DtypeName = "bfloat16"  # of weights and cells, for those peers that read the model's folder


@dataclass(frozen=True)
class Setup:
    """Settings of all peers.

    model: as for `load_model`. folder: in Hugging Face layout, for peers that read no packed
    weights. threads: number of compute threads.
    """

    model: str
    folder: Path
    device: str
    threads: int


@dataclass(frozen=True)
class Variant:
    """One way to run a peer.

    peer: a name of `plan.PEERS`. weights: format of the weights, if a peer has several variants.
    file: read instead of the model's folder. libraries: folder of another build of the peer; build:
    what it is called, None for the folder's name.
    """

    peer: str
    weights: str | None = None
    file: Path | None = None
    libraries: Path | None = None
    build: str | None = None

    @property
    def label(self) -> str:
        build = self.build or (self.libraries.name if self.libraries else None)
        return " ".join(part for part in (self.peer, self.weights, build) if part)


@dataclass(frozen=True)
class About:
    """version: of the peer and its backend. how: its settings."""

    version: str
    how: str


class Forked(NamedTuple):
    """Seconds of a fork, alone and with its first token, since some peers copy lazily."""

    alone: float
    with_token: float


class TokenPeer(Protocol):
    """A program under test with one context at a time; decodes greedily, ignoring end of text."""

    def about(self) -> About: ...

    def open(self, max_tokens: int, forks: int = 0) -> None:
        """Open an empty context for up to `max_tokens`, with up to `forks` forks at once."""

    def close(self) -> None:
        """Free the context."""

    def read(self, ids: list[int]) -> float:
        """Prefill tokens; return the seconds until the logits of the last one."""

    def write(self, count: int) -> list[float]:
        """Decode `count` tokens greedily; return the seconds of each."""

    def tokens(self) -> list[int]:
        """Return the tokens in the context, in order."""


class Peer(TokenPeer, Protocol):
    """A peer with a cache that evicts, and that can be saved, forked and edited.

    A method returns None if the peer does not offer it.
    """

    def open_endless(self, budget: int, keep: int) -> None:
        """Open an empty context of `budget` tokens that evicts when full.

        The first `keep` tokens are kept, if the peer can do that.
        """

    def save(self, path: Path) -> float:
        """Save the context to a file; return the seconds."""

    def restore(self, path: Path) -> float:
        """Restore a saved context; return the seconds until the logits of its last token."""

    def fork(self) -> Forked:
        """Fork the context, decode one token in the fork, and return to the original."""

    def delete(self, start: int, end: int) -> float | None:
        """Delete tokens without evaluating later ones again.

        Returns the seconds until the logits of the last token after the deletion.
        """
