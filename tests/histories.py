"""Random histories of sessions: every operation that a user can apply, drawn by hypothesis.

A history is a setting and a list of actions. The same history gives the same session, bit for bit.
"""

from typing import Any

import torch
from hypothesis import strategies as st

from kvkeep import Calibration, Sampling
from kvkeep.compression.methods.base import Budget
from kvkeep.compression.methods.statistics import Statistics, Surrogate
from kvkeep.errors import KvkeepError
from kvkeep.loaded_model import LoadedModel
from kvkeep.model import Model
from kvkeep.session.session import Session

SAMPLING = Sampling(temperature=1.0, top_k=40, seed=7)
TEXT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(2000)]

BUDGETS = st.sampled_from([260, 300, 520])
SETTINGS = st.one_of(
    st.builds(dict, policy=st.just("full"), max_kv_size=st.just(1500), kv_bits=st.just(None)),
    st.builds(
        dict,
        policy=st.sampled_from(["sliding", "shift"]),
        max_kv_size=BUDGETS,
        keep=st.sampled_from([0, 4, 40]),
        kv_bits=st.sampled_from([None, None, "8", "8/4"]),
    ),
    st.builds(
        dict,
        policy=st.just("archive"),
        max_kv_size=BUDGETS,
        method=st.sampled_from(["fitted", "snapkv"]),
        far_bits=st.sampled_from([None, "4"]),
    ),
    st.builds(
        dict,
        policy=st.just("archive"),
        max_kv_size=BUDGETS,
        method=st.sampled_from(["knorm", "keydiff"]),
        budget=st.just("heads"),
        far_bits=st.sampled_from([None, "8/4"]),
    ),
    st.builds(
        dict, policy=st.just("self_extend"), group=st.just(2), window=st.sampled_from([64, 256])
    ),
)
# Compressed twice by heads and once uniformly, with edits, rewinds and generation in between.
BY_HEADS = [
    ("feed", 300),
    ("pin", 0.2, 20),
    ("compress", "heads"),
    ("next", 4),
    ("delete", 0.98, 5),
    ("fork", 3),
    ("feed", 60),
    ("compress", "heads"),
    ("insert", 0.99, 9),
    ("rewind", 3),
    ("compress", "uniform"),
    ("next", 4),
]
_RELATIVE_POSITIONS = st.floats(0, 1)  # among the tokens held: 0 is the oldest, 1 the newest
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 400)),
        st.tuples(st.just("next"), st.integers(1, 12)),
        st.tuples(st.just("rewind"), st.integers(1, 100)),
        st.tuples(st.just("delete"), _RELATIVE_POSITIONS, st.integers(1, 60)),
        st.tuples(st.just("insert"), _RELATIVE_POSITIONS, st.integers(1, 60)),
        st.tuples(st.just("replace"), _RELATIVE_POSITIONS, st.integers(1, 60)),
        st.tuples(st.just("pin"), _RELATIVE_POSITIONS, st.integers(1, 30)),
        st.tuples(st.just("unpin")),
        st.tuples(st.just("keep"), st.integers(0, 60)),
        st.tuples(st.just("compress"), st.sampled_from(["uniform", "heads"])),
        st.tuples(st.just("fork"), st.integers(0, 60)),
    ),
    min_size=1,
    max_size=7,
)


def new(model: Model, setting: dict[str, Any]) -> Session:
    """Return a session of 200 tokens with a setting."""
    session = model.session(prefill_step=128, **setting)
    session.feed(TEXT[:200])
    return session


def act(session: Session, action: tuple[Any, ...]) -> Session:
    """Apply an action unless it is refused. Returns the session to continue with."""
    try:
        return _ACTIONS_BY_NAME[action[0]](session, *action[1:]) or session
    except KvkeepError:
        return session


def _next(session: Session, count: int) -> None:
    for _ in range(count):
        session.next_token(SAMPLING)


def _range(session: Session, relative_position: float, count: int) -> tuple[int, int]:
    """Return the start and end of a range of held tokens, cut off at the last token."""
    total = len(session.tokens)
    oldest = max(0, total - session.cache.cells + session.keep % 1000)
    start = oldest + int(relative_position * max(0, total - oldest - count - 1))
    return start, min(total, start + count)


def _unpin(session: Session) -> None:
    pinned = [i for i, status in enumerate(session.token_status) if status == "pinned"]
    session.unpin(pinned[0], pinned[len(pinned) // 2] + 1) if pinned else None


def _keep(session: Session, keep: int) -> None:
    session.keep = keep


def _replace(session: Session, relative_position: float, count: int) -> None:
    session.replace(*_range(session, relative_position, count), TEXT[count : count + 30])


def _insert(session: Session, relative_position: float, count: int) -> None:
    session.insert(_range(session, relative_position, count)[0], TEXT[count : 2 * count])


def _compress(session: Session, budget: Budget) -> None:
    """Compress uniformly, or by heads with residual cells."""
    if budget == "uniform":
        session.compress(2.0, "fitted", recent=16, budget=budget)
        return
    calibration = random_calibration(session.core.model)
    session.compress(2.0, "kvzap", recent=16, calibration=calibration)


def random_calibration(model: LoadedModel) -> Calibration:
    """Return a calibration that measured nothing: its surrogate gives each cell a random score."""
    random, layout = torch.Generator().manual_seed(0), model.decoder.new_cache().layout
    shape, width = (layout.layers, layout.kv_heads), layout.head_dim
    weights = torch.randn(*shape, 2 * width + 1, generator=random)
    mean = torch.zeros(*shape, width)
    statistics = Statistics(
        mean, torch.diag_embed(mean + 1), torch.full(shape, 0.9), Surrogate.from_weights(weights)
    )
    return Calibration(statistics, model.fingerprint.to_dict(), model.name, 1)


_ACTIONS_BY_NAME: dict[str, Any] = {
    "feed": lambda s, n: (s.feed(TEXT[len(s.tokens) % 900 :][:n]), None)[1],
    "next": _next,
    "rewind": lambda s, n: (s.rewind(n), None)[1],
    "delete": lambda s, relative_position, n: (s.delete(*_range(s, relative_position, n)), None)[1],
    "insert": _insert,
    "replace": _replace,
    "pin": lambda s, relative_position, n: s.pin(*_range(s, relative_position, n)),
    "unpin": _unpin,
    "keep": _keep,
    "compress": _compress,
    "fork": lambda s, n: s.fork(max(0, len(s.tokens) - n)),
}
