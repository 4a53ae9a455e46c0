"""Sessions of policy `archive` that are so small that a few tokens fill them."""

from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import strategies as st
from small_models import small_model

from kvkeep import Calibration, calibrate
from kvkeep.cache import KVCache, RaggedCells
from kvkeep.policies import Policy, make_policy
from kvkeep.session.session import Session

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(3000)]


@cache
def calibration() -> Calibration:
    return calibrate(MODEL, [(i * i * 5 + i) % 255 + 1 for i in range(2048)])


@dataclass(frozen=True)
class Setting:
    max_kv_size: int = 48
    keep: int = 4
    window: int = 16
    block: int = 8
    ratio: float = 4.0
    span: int = 200
    method: str = "keydiff"
    budget: str = ""
    prefill_step: int = 512

    def policy(self) -> Policy:
        numbers = {k: v for k, v in vars(self).items() if k not in ("max_kv_size", "prefill_step")}
        policy = make_policy("archive", self.max_kv_size, **numbers)
        if self.method == "kvzap":
            calibration_used = calibration()
            policy = policy.with_calibration(calibration_used.statistics, calibration_used.digest)
        return policy

    def session(self) -> Session:
        return Session(MODEL, self.policy(), self.prefill_step)

    def fed(self, count: int) -> Session:
        session = self.session()
        session.feed(TEXT[:count])
        return session


WAYS: list[dict[str, str]] = [
    *({"method": each} for each in ("fitted", "keydiff", "random", "average", "snapkv")),
    *({"method": each, "budget": "heads"} for each in ("knorm", "keydiff", "snapkv", "random")),
    {"method": "kvzap"},
]


@st.composite
def archives(draw: st.DrawFn) -> Setting:
    """Any settings that the policy accepts, for small budgets."""
    window, block = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    keep, ratio = draw(st.integers(0, 6)), draw(st.sampled_from([1.0, 1.5, 2.0, 4.0, 20.0]))
    least = keep + window + block + int(block / ratio) + 1
    size = least + draw(st.integers(0, 12))
    return Setting(
        max_kv_size=size,
        keep=keep,
        window=window,
        block=block,
        ratio=ratio,
        span=2 * (size + block) + draw(st.integers(0, 60)),
        **draw(st.sampled_from(WAYS)),
        prefill_step=draw(st.sampled_from([1, 2, 7, 64])),
    )


def distances(cache: KVCache) -> torch.Tensor:
    """Return the distance from the newest token to each cell, `[layers, kv_heads, n]`."""
    parts = []
    for segment in cache.segments:
        positions = segment.read(0, segment.length).positions
        parts.append((segment.position_map(cache.time - 1) - positions).expand(2, 2, -1))
    return torch.cat(parts, -1)


def archived(session: Session) -> int:
    return sum(segment.length for segment in session.cache.segments if segment.compressed)


def state(session: Session) -> list[object]:
    """Return the complete state of a session, to compare it bit for bit."""
    cache = session.cache
    observed = cache.observer.queries() if cache.observer else None
    parts: list[object] = [session.tokens, cache.time, session.keep, session.logits]
    parts += [] if observed is None else [observed.vectors, observed.times]
    for segment in cache.segments:
        cells = segment.read(0, segment.length)
        parts += [cells.keys, cells.values, cells.positions, cells.serials, cells.bias]
        parts += [
            cells.counts if isinstance(cells, RaggedCells) else None,
            segment.position_map,
            segment.is_anchor,
        ]
    return parts


def same(parts: list[object], other: list[object]) -> bool:
    return len(parts) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(parts, other, strict=True)
    )
