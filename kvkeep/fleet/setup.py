"""What a fleet is made of, as it is sent to where its servers run."""

from dataclasses import dataclass
from typing import Any

from kvkeep.server.keys import ApiKeys


@dataclass(frozen=True)
class Setup:
    """What each server is made of. It is sent to where they run.

    model, dtype, weights: as `load_model` has them. store: URL. settings: of sessions, but for a
    calibration. threads: that each computes with. hosts, alias: as `kvkeep serve` has them.
    """

    model: str
    dtype: str | None
    weights: str | None
    store: str
    secret: bytes
    settings: dict[str, Any]
    memory: int
    prefixes: bool
    threads: int
    lease: float
    keys: ApiKeys
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    alias: str | None


@dataclass(frozen=True)
class Scale:
    """How many servers. least, most: there are between these, by how many requests wait; each is
    to have `each` of them. grace: seconds for answers to end where a server is to stop."""

    least: int
    most: int
    each: int
    grace: float
