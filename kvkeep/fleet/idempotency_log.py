"""Requests that were carried out, kept with the session: one that comes again is answered again."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

NOTE = "answered"  # of a session's notes
_KEPT = 256  # of a session, the newest
_WHOLE = 8  # of these, with what was answered
LARGEST = 100_000  # bytes of an answer
_SEEDS = 2**53


@dataclass(frozen=True)
class Answered:
    """What a request with a key was told. key, request: digests. body: None for one that was too
    large to be kept, or is long ago."""

    key: str
    request: str
    status: int
    headers: list[list[str]] = field(default_factory=list)
    body: str | None = None


def remembered(notes: Mapping[str, Any]) -> list[Answered]:
    """Of a snapshot's notes; nothing of what is not as it was written."""
    found, told = list[Answered](), notes.get(NOTE)
    for each in told if isinstance(told, list) else ():
        try:
            one = Answered(**each)
            kinds = (type(one.key), type(one.request), type(one.status))
            if kinds == (str, str, int) and isinstance(one.body, str | None):
                found.append(replace(one, headers=[[str(a), str(b)] for a, b in one.headers]))
        except (TypeError, ValueError):
            continue
    return found


def noted(answers: Sequence[Answered]) -> dict[str, Any]:
    """For a snapshot's notes."""
    old = [replace(each, body=None, headers=[]) for each in answers[-_KEPT:-_WHOLE]]
    return {NOTE: [asdict(each) for each in (*old, *answers[-_WHOLE:])]}


def record(
    key: str, request: str, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes | None
) -> Answered:
    told = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    kept = None if body is None else body.decode()
    return Answered(key, request, status, told, kept)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def seed_of(key: str) -> int:
    """The same for the same key: whoever carries the request out again draws the same tokens."""
    return int(key[:16], 16) % _SEEDS
