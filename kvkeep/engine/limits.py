"""What an engine takes on, and what it says that it did."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """What an engine takes on.

    memory: bytes of cells, of all sessions. answers: at work at a time, of all owners; each: of
    one. sessions: that one owner may have by name. prompt: tokens of one. saved_after: seconds for
    which a session is idle before what is new in it is written to disk.
    """

    memory: int = 4_000_000_000
    answers: int = 256
    each: int = 128
    sessions: int = 1_000
    prompt: int = 250_000
    saved_after: float = 2.0


@dataclass(frozen=True)
class Operation:
    """Something was done to a session: `what` with `tokens` of them, in `seconds`.

    revision: that it is at since. nbytes: of its cells. when: in seconds since 1970.
    """

    owner: str
    session: str
    what: str
    revision: int
    tokens: int
    seconds: float
    nbytes: int
    when: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Totals:
    """What an engine has done since it began, and what it does now.

    answers: by how they ended. read, reused, written: tokens. reading, writing: seconds. working:
    answers at work. live, on_disk: sessions. nbytes: reserved of the limit.
    """

    answers: dict[str, int]
    read: int
    reused: int
    written: int
    reading: float
    writing: float
    working: int
    live: int
    on_disk: int
    nbytes: int
    limit: int
