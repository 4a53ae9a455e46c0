"""Sessions in every kind of state, and their continuations in this or another process.

As a script, `python continuation.py FOLDER MODEL DTYPE THREADS` restores each snapshot of a folder
and writes the next tokens and logits beside it.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep import Sampling
from kvkeep.errors import ContextFull
from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.policies import make_policy
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

NEXT = 24  # tokens
GENERATED = 13  # tokens generated before, so that the sampler state is not the initial one
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.2, top_k=50, repetition_penalty=1.1, seed=11),
}
TEXT = list(b"Nothing is written twice: keys stay where they are, and queries choose a place. ")


def full(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Return constructors of sessions of policy `full`, by state."""

    def fed(tokens: list[int], sampling: Sampling, budget: int = 256) -> Session:
        session = model.session(budget, policy="full", prefill_step=32)
        return feed_and_generate(session, tokens, sampling)

    return {
        "empty": lambda sampling: model.session(256, policy="full"),
        "first-fill": lambda sampling: fed(TEXT, sampling),
        "full-after-some": lambda sampling: fed(
            TEXT, sampling, budget=len(TEXT) + GENERATED + NEXT
        ),
        "exactly-full": lambda sampling: fed(TEXT, sampling, budget=len(TEXT) + GENERATED),
        "rewound": lambda sampling: rewind(fed(TEXT, sampling), 9),
        "forked": lambda sampling: fed(TEXT, sampling).fork(),
        "fork-continued": lambda sampling: feed_and_generate(
            fed(TEXT, sampling).fork(), TEXT[:20], sampling
        ),
        "parent-continued": lambda sampling: continue_beside_a_fork(fed(TEXT, sampling), sampling),
        "fork-of-fork": lambda sampling: feed_and_generate(
            fed(TEXT, sampling).fork(), TEXT[:9], sampling
        ).fork(at=40),
    }


def bounded(model: Model, policy: str) -> dict[str, Callable[[Sampling], Session]]:
    """Return constructors of sessions of a policy with a window, by state."""

    def fed(tokens: list[int], sampling: Sampling, budget: int = 48, keep: int = 4) -> Session:
        return feed_and_generate(
            model.session(budget, keep, policy, prefill_step=32), tokens, sampling
        )

    return {
        "empty": lambda sampling: model.session(48, policy=policy),
        "anchors-only": lambda sampling: fed(TEXT[:5], sampling, keep=20),
        "first-fill": lambda sampling: fed(TEXT[:20], sampling),
        "exactly-full": lambda sampling: fed(TEXT[: 48 - GENERATED], sampling),
        "wrapped": lambda sampling: fed(TEXT, sampling),
        "wrapped-without-keep": lambda sampling: fed(TEXT, sampling, keep=0),
        "wrapped-twice": lambda sampling: fed(TEXT * 2, sampling),
        "rewound-after-wrapping": lambda sampling: rewind(fed(TEXT, sampling), 9),
        "rewound-and-fed": lambda sampling: feed_and_generate(
            rewind(fed(TEXT, sampling), 9), TEXT[:3], sampling
        ),
        "forked": lambda sampling: fed(TEXT[:20], sampling).fork(),
        "forked-after-wrapping": lambda sampling: fed(TEXT, sampling).fork(),
        "fork-continued": lambda sampling: feed_and_generate(
            fed(TEXT[:10], sampling).fork(), TEXT[:9], sampling
        ),
        "fork-wrapped": lambda sampling: feed_and_generate(
            fed(TEXT[:20], sampling).fork(), TEXT, sampling
        ),
        "wrapped-fork-continued": lambda sampling: feed_and_generate(
            fed(TEXT, sampling).fork(), TEXT[:9], sampling
        ),
        "parent-continued": lambda sampling: continue_beside_a_fork(fed(TEXT, sampling), sampling),
        "more-sinks": lambda sampling: set_keep(fed(TEXT, sampling), 12),
        "fewer-sinks": lambda sampling: set_keep(fed(TEXT, sampling, keep=12), 2),
        "more-sinks-continued": lambda sampling: feed_and_generate(
            set_keep(fed(TEXT, sampling), 12), TEXT, sampling
        ),
        "edited": lambda sampling: edit(fed(TEXT[:20], sampling)),
        "edited-continued": lambda sampling: feed_and_generate(
            edit(fed(TEXT[:20], sampling)), TEXT, sampling
        ),
        "edited-after-wrapping": lambda sampling: edit(fed(TEXT, sampling), len(TEXT)),
        "pinned": lambda sampling: pin(fed(TEXT, sampling)),
        "pinned-continued": lambda sampling: feed_and_generate(
            pin(fed(TEXT, sampling)), TEXT, sampling
        ),
        "keep-whole-prompt": lambda sampling: model.session(200, keep=-1, policy=policy),
    }


def self_extend(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Return constructors of sessions of policy `self_extend`, by state."""

    def fed(tokens: list[int], sampling: Sampling) -> Session:
        return feed_and_generate(
            model.session(policy="self_extend", group=4, window=32, prefill_step=32),
            tokens,
            sampling,
        )

    return {
        "empty": lambda sampling: model.session(policy="self_extend"),
        "within-the-window": lambda sampling: fed(TEXT[:10], sampling),
        "beyond-the-window": lambda sampling: fed(TEXT, sampling),
        "rewound": lambda sampling: rewind(fed(TEXT, sampling), 9),
        "forked": lambda sampling: fed(TEXT, sampling).fork(),
        "fork-continued": lambda sampling: feed_and_generate(
            fed(TEXT, sampling).fork(), TEXT, sampling
        ),
        "parent-continued": lambda sampling: continue_beside_a_fork(fed(TEXT, sampling), sampling),
    }


def archive(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Return constructors of sessions of policy `archive`, by state."""

    def new(method: str = "fitted") -> Session:
        policy = make_policy("archive", 48, keep=4, window=16, block=8, span=200, method=method)
        return Session(model, policy, prefill_step=32)

    def fed(tokens: list[int], sampling: Sampling, method: str = "fitted") -> Session:
        return feed_and_generate(new(method), tokens, sampling)

    return {
        "before-the-first-block": lambda sampling: fed(TEXT[:5], sampling),
        "half-full": lambda sampling: fed(TEXT[:40], sampling),
        "after-coarsening": lambda sampling: fed(TEXT * 2, sampling),
        "after-drawing-closer": lambda sampling: fed(TEXT * 4, sampling),
        "observing": lambda sampling: fed(TEXT * 2, sampling, "snapkv"),
        "pinned-continued": lambda sampling: feed_and_generate(
            pin(fed(TEXT, sampling)), TEXT, sampling
        ),
        "edited-continued": lambda sampling: feed_and_generate(
            edit(fed(TEXT, sampling), len(TEXT)), TEXT, sampling
        ),
    }


def quantised(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Return constructors of sessions with quantised cells, by state."""

    def fed(sampling: Sampling, tokens: list[int] = TEXT, **kind: Any) -> Session:
        return feed_and_generate(model.session(prefill_step=32, **kind), tokens, sampling)

    return {
        "full-4-forked": lambda sampling: feed_and_generate(
            fed(sampling, policy="full", kv_bits="4").fork(), TEXT[:9], sampling
        ),
        "wrapped-8-4": lambda sampling: fed(sampling, max_kv_size=48, kv_bits="8/4"),
        "wrapped-far-4-pinned": lambda sampling: pin(fed(sampling, max_kv_size=48, far_bits="4")),
        "archive-far-8-4": lambda sampling: fed(
            sampling, TEXT * 2, max_kv_size=100, policy="archive", method="knorm", far_bits="8/4"
        ),
    }


def ragged(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Return constructors of sessions with ragged cells (a count per layer and head), by state."""

    def fed(sampling: Sampling, **kind: Any) -> Session:
        session = model.session(256, policy="full", prefill_step=32, **kind)
        session.feed(TEXT)
        session.compress(2.0, "knorm", recent=8, budget="heads")
        return feed_and_generate(session, TEXT[:20], sampling)

    def residual(sampling: Sampling) -> Session:
        session = model.session(256, policy="full", prefill_step=32, kv_bits="8")
        session.feed(TEXT)
        session.compress(2.0, "kvzip", recent=8)
        return feed_and_generate(session, TEXT[:20], sampling)

    def compress_again(session: Session, **kind: Any) -> Session:
        session.compress(2.0, "knorm", recent=8, **kind)
        return session

    def archive(sampling: Sampling, **kind: Any) -> Session:
        session = model.session(
            100, policy="archive", prefill_step=32, method="knorm", budget="heads", **kind
        )
        return feed_and_generate(session, TEXT * 4, sampling)

    return {
        "once": lambda sampling: fed(sampling),
        "twice": lambda sampling: compress_again(fed(sampling), budget="heads"),
        "then-uniform": lambda sampling: compress_again(fed(sampling), budget="uniform"),
        "residual": lambda sampling: residual(sampling),
        "residual-edited": lambda sampling: edit(residual(sampling), len(TEXT)),
        "edited": lambda sampling: edit(fed(sampling), len(TEXT)),
        "forked": lambda sampling: feed_and_generate(fed(sampling).fork(), TEXT[:9], sampling),
        "parent-continued": lambda sampling: continue_beside_a_fork(fed(sampling), sampling),
        "rewound": lambda sampling: rewind(fed(sampling), 9),
        "in-8-4-bits": lambda sampling: compress_again(
            fed(sampling, kv_bits="8/4"), budget="heads"
        ),
        "archive": lambda sampling: archive(sampling),
        "archive-far-4": lambda sampling: archive(sampling, far_bits="4"),
    }


POLICIES = {
    "archive": archive,
    "full": full,
    "self_extend": self_extend,
    "sliding": partial(bounded, policy="sliding"),
    "shift": partial(bounded, policy="shift"),
    "quantised": quantised,
    "ragged": ragged,
}


def feed_and_generate(session: Session, tokens: list[int], sampling: Sampling) -> Session:
    """Feed tokens and generate `GENERATED` more."""
    session.feed(tokens)
    for _ in range(GENERATED):
        session.next_token(sampling)
    return session


def rewind(session: Session, count: int) -> Session:
    session.rewind(count)
    return session


def set_keep(session: Session, keep: int) -> Session:
    session.keep = keep
    return session


def edit(session: Session, at: int = 12) -> Session:
    session.delete(at, at + 3)
    session.insert(at + 2, TEXT[:5])
    return session


def pin(session: Session) -> Session:
    session.pin(len(TEXT), len(TEXT) + 6)
    return session


def continue_beside_a_fork(session: Session, sampling: Sampling) -> Session:
    fork = session.fork()
    feed_and_generate(fork, TEXT[:7], sampling)
    return feed_and_generate(session, TEXT[:11], sampling)


def continue_session(session: Session, sampling: Sampling) -> dict[str, Tensor]:
    """Generate `NEXT` tokens. Returns them and the logits before each and after the last."""
    if session.logits is None:
        session.feed(TEXT)
    tokens, logits = [], [session.logits]
    try:
        for _ in range(NEXT):
            tokens.append(session.next_token(sampling))
            logits.append(session.logits)
    except ContextFull:
        pass
    return {"tokens": torch.tensor(tokens), "logits": torch.stack(logits)}


def main(folder: Path, model_name: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = load_model(model_name, dtype=dtype)
    for path in sorted(folder.glob("*.kvkeep")):
        sampling = next(sampling for name, sampling in SAMPLINGS.items() if name in path.name)
        session = model.restore(Snapshot.load(path))
        torch.save(continue_session(session, sampling), path.with_suffix(".pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
