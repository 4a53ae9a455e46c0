"""Changes that simulated users make to their sessions, and what must hold after each."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.soak_faults.records import Change, Check, Content, Tokens, UserSession
from kvkeep.client.remote import RemoteSession

GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0}
ALIGNMENT: dict[str, Any] = {"mode": "in_place", "min_saved": 16, "reread": 4}
COMPRESSION: dict[str, Any] = {"ratio": 1.5, "method": "knorm", "recent": 8}
MIN_TOKENS = 40  # of a session that is edited
PIECES = (
    "The cache holds {} cells of the window. ",
    "def {}(key, value): return key @ value\n",
    "Error: {} was not found; expected a number, found nothing. ",
)


@dataclass(frozen=True)
class Proposal:
    """A change, the request that makes it at a revision, and what must hold after it."""

    change: Change
    call: Callable[[RemoteSession, int], Any]
    check: Check


def _appended(before: Content, after: Content) -> bool:
    old, new = before.tokens, after.tokens
    return len(new) > len(old) and new[: len(old)] == old and after.pinned == before.pinned


def _is_inserted(before: Tokens, after: Tokens, at: int) -> bool:
    tail = len(before) - at
    return len(after) > len(before) and after[:at] + after[-tail:] == before


def _piece(rng: random.Random, held: UserSession) -> str:
    return rng.choice(PIECES).format(held.word)


def _is_editable(held: UserSession) -> bool:
    return len(held.points[-1].tokens) >= MIN_TOKENS and not held.has("compress")


def feed(rng: random.Random, held: UserSession) -> Proposal | None:
    text = _piece(rng, held)
    return Proposal(
        Change("feed"), lambda remote, revision: remote.feed(text, revision=revision), _appended
    )


def generate(rng: random.Random, held: UserSession) -> Proposal | None:
    count = rng.randrange(1, 6)
    return Proposal(
        Change("generate", end=count),
        lambda remote, revision: remote.generate(
            revision=revision, max_tokens=count, ignore_eos=True, **GREEDY
        ),
        lambda old, new: _appended(old, new) and len(new.tokens) == len(old.tokens) + count,
    )


def turn(rng: random.Random, held: UserSession) -> Proposal | None:
    question = _piece(rng, held)
    return Proposal(
        Change("turn"),
        lambda remote, revision: remote.say(question, revision=revision, max_tokens=4, **GREEDY),
        _appended,
    )


def cut(rng: random.Random, held: UserSession) -> Proposal | None:
    if not _is_editable(held):
        return None
    start = rng.randrange(8, len(held.points[-1].tokens) - 20)
    end = start + rng.randrange(1, 8)
    return Proposal(
        Change("delete", start, end),
        lambda remote, revision: remote.delete(start, end, revision=revision),
        lambda old, new: new.tokens == old.tokens[:start] + old.tokens[end:],
    )


def insert(rng: random.Random, held: UserSession) -> Proposal | None:
    if not _is_editable(held):
        return None
    text, at = _piece(rng, held), rng.randrange(8, len(held.points[-1].tokens) - 10)
    return Proposal(
        Change("insert", at),
        lambda remote, revision: remote.insert(at, text, revision=revision),
        lambda old, new: _is_inserted(old.tokens, new.tokens, at),
    )


def align(rng: random.Random, held: UserSession) -> Proposal | None:
    if not _is_editable(held):
        return None
    old = held.points[-1].tokens
    start = rng.randrange(8, len(old) - 20)
    wanted = (*old[:start], *old[start + 2 :], *old[4:8])
    return Proposal(
        Change("align"),
        lambda remote, revision: remote.align(list(wanted), revision=revision, **ALIGNMENT),
        lambda _, new: new.tokens == wanted,
    )


def rewind(rng: random.Random, held: UserSession) -> Proposal | None:
    if not _is_editable(held):
        return None
    count = rng.randrange(1, 4)
    return Proposal(
        Change("rewind", end=count),
        lambda remote, revision: remote.rewind(count, revision=revision),
        lambda old, new: new.tokens == old.tokens[:-count],
    )


def pin(rng: random.Random, held: UserSession) -> Proposal | None:
    if not _is_editable(held) or held.has("pin"):
        return None
    start = rng.randrange(8, len(held.points[-1].tokens) - 10)
    return Proposal(
        Change("pin", start, start + 4),
        lambda remote, revision: remote.pin(start, start + 4, revision=revision),
        lambda old, new: (
            new.tokens == old.tokens and new.pinned == old.pinned | set(range(start, start + 4))
        ),
    )


def compress(rng: random.Random, held: UserSession) -> Proposal | None:
    if not _is_editable(held) or held.policy != "full" or rng.random() < 0.7:
        return None
    return Proposal(
        Change("compress"),
        lambda remote, revision: remote.compress(revision=revision, **COMPRESSION),
        lambda old, new: new.tokens == old.tokens and "compressed" in new.status,
    )


PROPOSALS = (feed, generate, turn, cut, insert, align, rewind, pin, compress)
