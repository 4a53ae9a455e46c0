"""Sessions at every kind of moment, and how they go on: here, or in another process.

As a script: `python going_on.py FOLDER MODEL DTYPE THREADS` restores each snapshot of a folder and
writes beside it what came next.
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
from kvkeep.model import Model, load_model
from kvkeep.policies import make_policy
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

NEXT = 64  # tokens
DRAWN = 13  # tokens before: the random generator is then in its middle
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.2, top_k=50, repetition_penalty=1.1, seed=11),
}
TEXT = list(b"Nothing is written twice: keys stay where they are, and queries choose a place. ")


def full(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Sessions of policy `full`, by moment."""

    def fed(tokens: list[int], how: Sampling, budget: int = 256) -> Session:
        session = model.session(budget, policy="full", prefill_step=32)
        return drawn(session, tokens, how)

    return {
        "empty": lambda how: model.session(256, policy="full"),
        "first-fill": lambda how: fed(TEXT, how),
        "full-after-64": lambda how: fed(TEXT, how, budget=len(TEXT) + DRAWN + NEXT),
        "exactly-full": lambda how: fed(TEXT, how, budget=len(TEXT) + DRAWN),
        "rewound": lambda how: rewound(fed(TEXT, how), 9),
        "forked": lambda how: fed(TEXT, how).fork(),
        "fork-went-on": lambda how: drawn(fed(TEXT, how).fork(), TEXT[:20], how),
        "parent-went-on": lambda how: went_on_beside_a_fork(fed(TEXT, how), how),
        "fork-of-fork": lambda how: drawn(fed(TEXT, how).fork(), TEXT[:9], how).fork(at=40),
    }


def bounded(model: Model, policy: str) -> dict[str, Callable[[Sampling], Session]]:
    """Sessions of a policy with a window, by moment."""

    def fed(tokens: list[int], how: Sampling, budget: int = 48, keep: int = 4) -> Session:
        return drawn(model.session(budget, keep, policy, prefill_step=32), tokens, how)

    return {
        "empty": lambda how: model.session(48, policy=policy),
        "anchors-only": lambda how: fed(TEXT[:5], how, keep=20),
        "first-fill": lambda how: fed(TEXT[:20], how),
        "exactly-full": lambda how: fed(TEXT[: 48 - DRAWN], how),
        "wrapped": lambda how: fed(TEXT, how),
        "wrapped-without-keep": lambda how: fed(TEXT, how, keep=0),
        "wrapped-twice": lambda how: fed(TEXT * 2, how),
        "rewound-after-wrapping": lambda how: rewound(fed(TEXT, how), 9),
        "rewound-and-fed": lambda how: drawn(rewound(fed(TEXT, how), 9), TEXT[:3], how),
        "forked": lambda how: fed(TEXT[:20], how).fork(),
        "forked-after-wrapping": lambda how: fed(TEXT, how).fork(),
        "fork-went-on": lambda how: drawn(fed(TEXT[:10], how).fork(), TEXT[:9], how),
        "fork-wrapped": lambda how: drawn(fed(TEXT[:20], how).fork(), TEXT, how),
        "wrapped-fork-went-on": lambda how: drawn(fed(TEXT, how).fork(), TEXT[:9], how),
        "parent-went-on": lambda how: went_on_beside_a_fork(fed(TEXT, how), how),
        "more-kept": lambda how: keeping(fed(TEXT, how), 12),
        "fewer-kept": lambda how: keeping(fed(TEXT, how, keep=12), 2),
        "more-kept-went-on": lambda how: drawn(keeping(fed(TEXT, how), 12), TEXT, how),
        "edited": lambda how: edited(fed(TEXT[:20], how)),
        "edited-went-on": lambda how: drawn(edited(fed(TEXT[:20], how)), TEXT, how),
        "edited-after-wrapping": lambda how: edited(fed(TEXT, how), len(TEXT)),
        "pinned": lambda how: pinning(fed(TEXT, how)),
        "pinned-went-on": lambda how: drawn(pinning(fed(TEXT, how)), TEXT, how),
        "whole-prompt-to-be-kept": lambda how: model.session(200, keep=-1, policy=policy),
    }


def self_extend(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Sessions of policy `self_extend`, by moment."""

    def fed(tokens: list[int], how: Sampling) -> Session:
        return drawn(
            model.session(policy="self_extend", group=4, window=32, prefill_step=32), tokens, how
        )

    return {
        "empty": lambda how: model.session(policy="self_extend"),
        "within-the-window": lambda how: fed(TEXT[:10], how),
        "beyond-the-window": lambda how: fed(TEXT, how),
        "rewound": lambda how: rewound(fed(TEXT, how), 9),
        "forked": lambda how: fed(TEXT, how).fork(),
        "fork-went-on": lambda how: drawn(fed(TEXT, how).fork(), TEXT, how),
        "parent-went-on": lambda how: went_on_beside_a_fork(fed(TEXT, how), how),
    }


def archive(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Sessions of policy `archive`, by moment."""

    def new(method: str = "fitted") -> Session:
        policy = make_policy("archive", 48, keep=4, window=16, block=8, span=200, method=method)
        return Session(model, policy, prefill_step=32)

    def fed(tokens: list[int], how: Sampling, method: str = "fitted") -> Session:
        return drawn(new(method), tokens, how)

    return {
        "before-the-first-block": lambda how: fed(TEXT[:5], how),
        "half-full": lambda how: fed(TEXT[:40], how),
        "after-coarsening": lambda how: fed(TEXT * 2, how),
        "after-drawing-closer": lambda how: fed(TEXT * 4, how),
        "observing": lambda how: fed(TEXT * 2, how, "snapkv"),
        "pinned-went-on": lambda how: drawn(pinning(fed(TEXT, how)), TEXT, how),
        "edited-went-on": lambda how: drawn(edited(fed(TEXT, how), len(TEXT)), TEXT, how),
    }


def quantised(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Sessions whose cells are kept in fewer bits, by moment."""

    def fed(how: Sampling, tokens: list[int] = TEXT, **kind: Any) -> Session:
        return drawn(model.session(prefill_step=32, **kind), tokens, how)

    return {
        "full-4-forked": lambda how: drawn(
            fed(how, policy="full", kv_bits="4").fork(), TEXT[:9], how
        ),
        "wrapped-8-4": lambda how: fed(how, max_kv_size=48, kv_bits="8/4"),
        "wrapped-far-4-pinned": lambda how: pinning(fed(how, max_kv_size=48, far_bits="4")),
        "archive-far-8-4": lambda how: fed(
            how, TEXT * 2, max_kv_size=100, policy="archive", method="knorm", far_bits="8/4"
        ),
    }


def ragged(model: Model) -> dict[str, Callable[[Sampling], Session]]:
    """Sessions of which each layer and KV head has a number of cells of its own, by moment."""

    def fed(how: Sampling, **kind: Any) -> Session:
        session = model.session(256, policy="full", prefill_step=32, **kind)
        session.feed(TEXT)
        session.compress(2.0, "knorm", recent=8, budget="heads")
        return drawn(session, TEXT[:20], how)

    def again(session: Session, **kind: Any) -> Session:
        session.compress(2.0, "knorm", recent=8, **kind)
        return session

    def archive(how: Sampling, **kind: Any) -> Session:
        session = model.session(
            100, policy="archive", prefill_step=32, method="knorm", budget="heads", **kind
        )
        return drawn(session, TEXT * 4, how)

    return {
        "once": lambda how: fed(how),
        "twice": lambda how: again(fed(how), budget="heads"),
        "then-all-alike": lambda how: again(fed(how), budget="uniform"),
        "edited": lambda how: edited(fed(how), len(TEXT)),
        "forked": lambda how: drawn(fed(how).fork(), TEXT[:9], how),
        "parent-went-on": lambda how: went_on_beside_a_fork(fed(how), how),
        "rewound": lambda how: rewound(fed(how), 9),
        "in-8-4-bits": lambda how: again(fed(how, kv_bits="8/4"), budget="heads"),
        "archive": lambda how: archive(how),
        "archive-far-4": lambda how: archive(how, far_bits="4"),
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


def drawn(session: Session, tokens: list[int], how: Sampling) -> Session:
    """Fed, and `DRAWN` tokens further."""
    session.feed(tokens)
    for _ in range(DRAWN):
        session.next_token(how)
    return session


def rewound(session: Session, count: int) -> Session:
    session.rewind(count)
    return session


def keeping(session: Session, keep: int) -> Session:
    session.keep = keep
    return session


def edited(session: Session, at: int = 12) -> Session:
    session.delete(at, at + 3)
    session.insert(at + 2, TEXT[:5])
    return session


def pinning(session: Session) -> Session:
    session.pin(len(TEXT), len(TEXT) + 6)
    return session


def went_on_beside_a_fork(session: Session, how: Sampling) -> Session:
    fork = session.fork()
    drawn(fork, TEXT[:7], how)
    return drawn(session, TEXT[:11], how)


def go_on(session: Session, how: Sampling) -> dict[str, Tensor]:
    """The next tokens, and the logits before each and after the last."""
    if session.logits is None:
        session.feed(TEXT)
    tokens, logits = [], [session.logits]
    try:
        for _ in range(NEXT):
            tokens.append(session.next_token(how))
            logits.append(session.logits)
    except ContextFull:
        pass
    return {"tokens": torch.tensor(tokens), "logits": torch.stack(logits)}


def main(folder: Path, model_name: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = load_model(model_name, dtype=dtype)
    for path in sorted(folder.glob("*.kvkeep")):
        how = next(how for name, how in SAMPLINGS.items() if name in path.name)
        session = model.restore(Snapshot.load(path))
        torch.save(go_on(session, how), path.with_suffix(".pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
