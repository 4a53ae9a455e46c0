"""What an engine takes on, and what it says that it did."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """What an engine takes on.

    memory: bytes of cells, of all sessions. running: generations at a time, of all owners.
    running_per_owner: of one owner. sessions_per_owner: named sessions. prompt_tokens: of one
    prompt. save_idle_after: seconds that a session is idle before its changes go to disk.
    """

    memory: int = 4_000_000_000
    running: int = 256
    running_per_owner: int = 128
    sessions_per_owner: int = 1_000
    prompt_tokens: int = 250_000
    save_idle_after: float = 2.0


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

    ended: generations by the reason of their end. prefilled, reused, generated: tokens.
    prefill_seconds, decode_seconds: of all generations. running: generations now. in_memory,
    on_disk: sessions. nbytes: held or reserved, of memory_limit.
    """

    ended: dict[str, int]
    prefilled: int
    reused: int
    generated: int
    prefill_seconds: float
    decode_seconds: float
    running: int
    in_memory: int
    on_disk: int
    nbytes: int
    memory_limit: int
