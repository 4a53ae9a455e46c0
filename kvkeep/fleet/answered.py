"""Requests that were carried out, kept with the session: one that comes again is answered again."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NOTE = "answered"  # of a session's notes
_KEPT = 8  # of a session, the newest
_LARGEST = 100_000  # bytes of an answer
_SEEDS = 2**53


@dataclass(frozen=True)
class Answered:
    """What a request with a key was told. key, request: digests. body: None for one that was too
    large to be kept."""

    key: str
    request: str
    status: int
    headers: list[list[str]] = field(default_factory=list)
    body: str | None = None


def remembered(notes: Mapping[str, Any]) -> list[Answered]:
    """Of a snapshot's notes; nothing of what is not as it was written."""
    found = []
    for each in notes.get(NOTE, ()):
        try:
            found.append(Answered(**each))
        except TypeError:
            continue
    return found


def noted(answers: Sequence[Answered]) -> dict[str, Any]:
    """For a snapshot's notes."""
    return {NOTE: [asdict(each) for each in answers[-_KEPT:]]}


def record(
    key: str, request: str, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
) -> Answered:
    told = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    kept = body.decode() if len(body) <= _LARGEST else None
    return Answered(key, request, status, told, kept)


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def seed_of(key: str) -> int:
    """The same for the same key: whoever carries the request out again draws the same tokens."""
    return int(key[:16], 16) % _SEEDS
