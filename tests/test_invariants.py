"""Invariants of bounded sessions: budget, window, prefill steps, distances and errors."""

from dataclasses import dataclass

import pytest
import torch
from attention_hooks import attending
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from kvkeep.cache import KVCache
from kvkeep.errors import KvkeepError
from kvkeep.models.layers.executor import AnyStep
from kvkeep.policies import Sliding
from kvkeep.session.session import Session

MODEL = small_model()
TOKENS = st.lists(st.integers(1, 255), min_size=1, max_size=60)


@dataclass(frozen=True)
class Setting:
    max_kv_size: int
    keep: int
    prefill_step: int

    def session(self) -> Session:
        return MODEL.session(self.max_kv_size, self.keep, prefill_step=self.prefill_step)


@st.composite
def bounded(draw: st.DrawFn) -> Setting:
    max_kv_size = draw(st.integers(1, 24))
    keep = draw(st.integers(0, max_kv_size - 1))
    return Setting(max_kv_size, keep, draw(st.sampled_from([1, 2, 3, 7, 64])))


# Calls: feed tokens, rewind some, or change how many of the first ones are kept.
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), TOKENS),
        st.tuples(st.just("rewind"), st.integers(0, 8)),
        st.tuples(st.just("keep"), st.integers(0, 24)),
    ),
    min_size=1,
    max_size=8,
)


def act(session: Session, action: tuple[str, object]) -> None:
    kind, value = action
    if kind == "feed":
        session.feed(value)  # type: ignore[arg-type]
    elif kind == "rewind":
        session.rewind(value)  # type: ignore[arg-type]
    else:
        session.keep = value  # type: ignore[assignment]


def state(session: Session) -> tuple[object, ...]:
    """Return the complete state of a session, to compare it bit for bit."""
    segments = [
        (*vars(segment.read(0, segment.length)).values(), segment.position_map, segment.is_anchor)
        for segment in session.cache.all_segments
    ]
    return session.tokens, session.cache.time, session.keep, session.logits, segments


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=60)
@given(bounded(), ACTIONS)
def test_the_budget_binds_after_every_call(setting: Setting, actions: list) -> None:
    session = setting.session()
    cell_bytes = session.cache.layout.cell_bytes
    for action in actions:
        try:
            if action[0] == "feed":
                report = session.feed(action[1])
                assert report.peak_cells <= setting.max_kv_size + setting.prefill_step
            else:
                act(session, action)
        except KvkeepError:
            pass
        assert session.cache.cells <= setting.max_kv_size
        # A change of `keep` cuts storage in two, of which at most an eighth is idle.
        most = setting.max_kv_size + setting.max_kv_size // 8
        assert session.cache.nbytes <= most * cell_bytes


@settings(max_examples=60)
@given(bounded(), ACTIONS)
def test_a_refused_call_changes_nothing(setting: Setting, actions: list) -> None:
    session = setting.session()
    invalid = [("feed", []), ("feed", [256]), ("feed", [3, -1]), ("rewind", -1), ("keep", -2)]
    for action in [*actions, *invalid]:
        before = state(session)
        try:
            act(session, action)
        except KvkeepError:
            assert same(state(session), before)
        else:
            assert action not in invalid


class ForwardFailed(Exception):
    """Raised in the middle of a forward."""


@settings(max_examples=40)
@given(bounded(), TOKENS, st.integers(0, 1), st.lists(st.integers(1, 255), min_size=1, max_size=7))
def test_a_step_that_fails_inside_the_model_changes_nothing(
    setting: Setting, tokens: list[int], layer: int, more: list[int]
) -> None:
    session, untouched = setting.session(), setting.session()
    session.feed(tokens)
    untouched.feed(tokens)
    before = state(session)

    def failing(step: AnyStep, index: int, *args: torch.Tensor) -> torch.Tensor:
        out = step.attend(index, *args)
        if index == layer:
            raise ForwardFailed
        return out

    more = more[: setting.prefill_step]
    with attending(MODEL.decoder, failing), pytest.raises(ForwardFailed):
        session.feed(more)
    assert same(state(session), before)
    session.feed(more)
    untouched.feed(more)
    assert torch.equal(session.logits, untouched.logits)


@settings(max_examples=60)
@given(bounded(), st.lists(TOKENS, min_size=1, max_size=4), st.sampled_from([1, 5, 64]))
def test_the_prefill_step_does_not_change_logits(
    setting: Setting, prompts: list[list[int]], other_step: int
) -> None:
    session = setting.session()
    other = MODEL.session(setting.max_kv_size, setting.keep, prefill_step=other_step)
    for prompt in prompts:
        session.feed(prompt)
        other.feed(prompt)
        assert (session.logits - other.logits).abs().max() <= 1e-3


class AttentionProbe:
    """A session whose values encode their tokens' times, so that attention shows which it saw.

    Keys and queries are zeros: then every visible cell has the same weight, and the output gives
    the number of cells and, by a second element, their mean time.
    """

    def __init__(self, setting: Setting):
        self.session = setting.session()
        self.policy = Sliding(setting.max_kv_size, keep=setting.keep)
        self.cache: KVCache = self.session.cache
        self.outputs: list[tuple[float, float]] = []

    def feed(self, count: int, step: int) -> None:
        """Run `count` tokens through the policy and attention in steps, without a model."""
        layout = self.cache.layout
        fed = 0
        while fed < count:
            n = min(self.policy.open(self.cache, count - fed), step)
            times = torch.arange(self.cache.time, self.cache.time + n, dtype=torch.float32)
            codes = torch.zeros(n, layout.kv_heads, layout.head_dim)
            codes[:, :, 0] = (times == 0)[:, None]
            codes[:, :, 1] = times[:, None]
            zeros = torch.zeros(n, layout.kv_heads, layout.head_dim)
            with self.cache.step(n) as current:
                for layer in range(layout.layers):
                    q = torch.zeros(n, 4, layout.head_dim)
                    out = current.attend(layer, q, zeros, codes).view(n, 4, -1)
            self.outputs += [(float(row[0, 0]), float(row[0, 1])) for row in out]
            fed += n


@settings(max_examples=60)
@given(bounded(), st.integers(1, 70))
def test_each_token_sees_the_kept_tokens_and_the_whole_window(setting: Setting, count: int) -> None:
    probe = AttentionProbe(setting)
    probe.feed(count, setting.prefill_step)
    for time, (first_seen, mean_time) in enumerate(probe.outputs):
        kept = list(range(min(setting.keep, time + 1)))
        newest = range(time, max(time - setting.max_kv_size + setting.keep, setting.keep - 1), -1)
        seen = kept + [t for t in newest if t not in kept]
        assert len(seen) == min(time + 1, setting.max_kv_size)
        assert mean_time == pytest.approx(sum(seen) / len(seen), abs=1e-3)
        assert first_seen == pytest.approx((0 in seen) / len(seen), abs=1e-4)


@settings(max_examples=60)
@given(bounded(), ACTIONS)
def test_no_distance_exceeds_the_budget(setting: Setting, actions: list) -> None:
    session = setting.session()
    for action in actions:
        try:
            act(session, action)
        except KvkeepError:
            continue
        current = session.cache.time - 1
        for segment in session.cache.segments:
            if segment.length:
                positions = segment.read(0, segment.length).positions
                distances = segment.position_map(current) - positions
                assert 0 <= int(distances.min()) <= int(distances.max()) < setting.max_kv_size
