"""What every peer can be asked to do, and what all of them are given."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from kvkeep.types import DtypeName

DTYPE: DtypeName = "bfloat16"  # of weights and cells, for those peers that read the model's folder


@dataclass(frozen=True)
class Setup:
    """What all peers are given.

    model: as `load_model` takes it. folder: in Hugging Face layout, for peers that
    read no packed weights.
    threads: that each peer computes with.
    """

    model: str
    folder: Path
    device: str
    threads: int


@dataclass(frozen=True)
class Variant:
    """One way to run a peer.

    peer: its name, of `plan.PEERS`. weights: how this variant holds them, where a peer has
    several. file: what it reads in the place of the model's folder.
    """

    peer: str
    weights: str | None = None
    file: Path | None = None

    @property
    def label(self) -> str:
        return f"{self.peer} {self.weights}" if self.weights else self.peer


@dataclass(frozen=True)
class About:
    """version: of the peer and of what it computes with. how: the settings it was run with."""

    version: str
    how: str


class Forked(NamedTuple):
    """Seconds that a fork took, alone and with its first token.

    Both, since some peers put work off until a token is evaluated.
    """

    alone: float
    with_token: float


class Peer(Protocol):
    """One context at a time, read and written greedily; end-of-text tokens are ignored.

    A method that returns None is not offered by the peer.
    """

    def about(self) -> About: ...

    def open(self, most: int, forks: int = 0) -> None:
        """An empty context for up to `most` tokens, of which `forks` forks can be made at once."""

    def open_endless(self, budget: int, keep: int) -> None:
        """An empty context of `budget` tokens that goes on when it is full.

        The first `keep` tokens stay, where the peer can do that.
        """

    def close(self) -> None:
        """Lets the context go, and its memory."""

    def read(self, ids: list[int]) -> float:
        """Evaluates tokens; seconds until the logits of the last one are there."""

    def write(self, count: int) -> list[float]:
        """Seconds of each of `count` tokens: the likeliest one, evaluated."""

    def tokens(self) -> list[int]:
        """What is in the context, in its order."""

    def save(self, path: Path) -> float:
        """Seconds to save the context to a file."""

    def restore(self, path: Path) -> float:
        """Goes on with a saved context; seconds until the logits of its last token are there."""

    def fork(self) -> Forked:
        """A second context that shares its past; the first one goes on."""

    def delete(self, start: int, end: int) -> float | None:
        """Takes tokens out of the context; later ones stay as they were evaluated.

        Seconds until the logits of the last token, as it now sees its past, are there.
        """
