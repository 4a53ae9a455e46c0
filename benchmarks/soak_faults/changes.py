"""Changes that simulated users make to their sessions."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.soak_faults.effects import ALIGNMENT, COMPRESSION, message_tokens
from benchmarks.soak_faults.records import Change, Tokens, UserSession
from kvkeep import Model
from kvkeep.client.remote import RemoteSession

GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0}
MIN_TOKENS = 40  # of a session that is edited
MAX_ANSWER = 4  # tokens of an answer to a turn
PIECES = (
    "The cache holds {} cells of the window. ",
    "def {}(key, value): return key @ value\n",
    "Error: {} was not found; expected a number, found nothing. ",
)


@dataclass(frozen=True)
class Proposal:
    """A change, and the request that makes it at a revision."""

    change: Change
    call: Callable[[RemoteSession, int], Any]


def _piece(rng: random.Random, held: UserSession) -> str:
    return rng.choice(PIECES).format(held.word)


def _encoded(model: Model, text: str) -> Tokens:
    return tuple(model.text.encode(text))


def _is_editable(held: UserSession) -> bool:
    return len(held.points[-1].tokens) >= MIN_TOKENS and not held.has("compress")


def feed(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    text, end = _piece(rng, held), len(held.points[-1].tokens)
    return Proposal(
        Change("feed", end, end, _encoded(model, text)),
        lambda remote, revision: remote.feed(text, revision=revision),
    )


def generate(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    count, end = rng.randrange(1, 6), len(held.points[-1].tokens)
    return Proposal(
        Change("generate", end, end, max_answer=count),
        lambda remote, revision: remote.generate(
            revision=revision, max_tokens=count, ignore_eos=True, **GREEDY
        ),
    )


def turn(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    question, old = _piece(rng, held), held.points[-1].tokens
    start, ids = message_tokens(model.text, model.end_token_ids, old, question)
    return Proposal(
        Change("turn", start, len(old), ids, MAX_ANSWER, model.end_token_ids),
        lambda remote, revision: remote.say(
            question, revision=revision, max_tokens=MAX_ANSWER, **GREEDY
        ),
    )


def cut(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    if not _is_editable(held):
        return None
    start = rng.randrange(8, len(held.points[-1].tokens) - 20)
    end = start + rng.randrange(1, 8)
    return Proposal(
        Change("delete", start, end),
        lambda remote, revision: remote.delete(start, end, revision=revision),
    )


def insert(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    if not _is_editable(held):
        return None
    text, at = _piece(rng, held), rng.randrange(8, len(held.points[-1].tokens) - 10)
    return Proposal(
        Change("insert", at, at, _encoded(model, text)),
        lambda remote, revision: remote.insert(at, text, revision=revision),
    )


def align(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    if not _is_editable(held):
        return None
    old = held.points[-1].tokens
    start = rng.randrange(8, len(old) - 20)
    wanted = (*old[:start], *old[start + 2 :], *old[4:8])
    return Proposal(
        Change("align", start, tokens=wanted),
        lambda remote, revision: remote.align(list(wanted), revision=revision, **ALIGNMENT),
    )


def rewind(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    if not _is_editable(held):
        return None
    count, end = rng.randrange(1, 4), len(held.points[-1].tokens)
    return Proposal(
        Change("rewind", end - count, end),
        lambda remote, revision: remote.rewind(count, revision=revision),
    )


def pin(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    if not _is_editable(held) or held.has("pin"):
        return None
    start = rng.randrange(8, len(held.points[-1].tokens) - 10)
    return Proposal(
        Change("pin", start, start + 4),
        lambda remote, revision: remote.pin(start, start + 4, revision=revision),
    )


def compress(rng: random.Random, held: UserSession, model: Model) -> Proposal | None:
    if not _is_editable(held) or held.policy != "full" or rng.random() < 0.7:
        return None
    return Proposal(
        Change("compress"),
        lambda remote, revision: remote.compress(revision=revision, **COMPRESSION),
    )


PROPOSALS = (feed, generate, turn, cut, insert, align, rewind, pin, compress)
