"""Invariants of bounded sessions: budget, window, prefill steps, distances and errors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from attention_hooks import attending
from hypothesis import given, settings
from hypothesis import strategies as st
from session_state import same, whole_state
from small_models import local_spec, small_model, state_specs

from kvkeep.cache import KVCache
from kvkeep.errors import KvkeepError
from kvkeep.models.layers.executor import AnyStep
from kvkeep.policies import Sliding
from kvkeep.session.session import Session
from tests.examples import examples

MODEL = small_model()
MODELS = {
    "plain": MODEL,
    "local": small_model(spec=local_spec()),
    "delta_net": small_model(spec=state_specs()["delta_net"]),
}
TOKENS = st.lists(st.integers(1, 255), min_size=1, max_size=60)


@dataclass(frozen=True)
class Setting:
    max_kv_size: int
    keep: int
    prefill_step: int
    model: str = "plain"

    def session(self) -> Session:
        model = MODELS[self.model]
        return model.session(self.max_kv_size, self.keep, prefill_step=self.prefill_step)


@st.composite
def bounded(draw: st.DrawFn, models: Sequence[str] = ("plain",)) -> Setting:
    max_kv_size = draw(st.integers(1, 24))
    keep = draw(st.integers(0, max_kv_size - 1))
    step, model = draw(st.sampled_from([1, 2, 3, 7, 64])), draw(st.sampled_from(models))
    return Setting(max_kv_size, keep, step, model)


ALL = ("plain", "local", "delta_net")
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


@settings(max_examples=examples(25))
@given(bounded(ALL), ACTIONS)
def test_the_budget_binds_after_every_call(setting: Setting, actions: list) -> None:
    session, spec = setting.session(), MODELS[setting.model].spec
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
        use = session.memory_use
        assert use.cells <= most * cell_bytes
        if session.cache.local_cache is not None:
            assert use.windows <= setting.max_kv_size * session.cache.local_cache.layout.cell_bytes
        if spec.states is not None and session.tokens:
            assert use.states == spec.states.nbytes(torch.float32)


@pytest.mark.parametrize(
    ("max_kv_size", "keep", "lower"), [(29, 25, 2), (30, 20, 7), (4, 3, 2)], ids=str
)
def test_a_lower_keep_frees_the_slots_of_tokens_that_did_not_come(
    max_kv_size: int, keep: int, lower: int
) -> None:
    session = MODELS["plain"].session(max_kv_size, keep, prefill_step=7)
    session.feed([1, 1])
    session.keep = lower
    for count in (12, 37):
        session.feed([1] * count)
        cells = session.memory_use.cells / session.cache.layout.cell_bytes
        assert cells <= max_kv_size + max_kv_size // 8


@settings(max_examples=examples(25))
@given(bounded(ALL), ACTIONS)
def test_a_refused_call_changes_nothing(setting: Setting, actions: list) -> None:
    session = setting.session()
    invalid = [("feed", []), ("feed", [256]), ("feed", [3, -1]), ("rewind", -1), ("keep", -2)]
    for action in [*actions, *invalid]:
        before = whole_state(session)
        try:
            act(session, action)
        except KvkeepError:
            assert same(whole_state(session), before)
        else:
            assert action not in invalid


class ForwardFailed(Exception):
    """Raised in the middle of a forward."""


@settings(max_examples=examples(20))
@given(
    bounded(("plain", "delta_net")),
    TOKENS,
    st.integers(0, 1),
    st.lists(st.integers(1, 255), min_size=1, max_size=7),
)
def test_a_step_that_fails_inside_the_model_changes_nothing(
    setting: Setting, tokens: list[int], layer: int, more: list[int]
) -> None:
    session, untouched = setting.session(), setting.session()
    session.feed(tokens)
    untouched.feed(tokens)
    before, model = whole_state(session), MODELS[setting.model]

    def failing(step: AnyStep, index: int, *args: torch.Tensor) -> torch.Tensor:
        out = step.attend(index, *args)
        if index >= layer:  # state layers do not attend
            raise ForwardFailed
        return out

    more = more[: setting.prefill_step]
    with attending(model.decoder, failing), pytest.raises(ForwardFailed):
        session.feed(more)
    assert same(whole_state(session), before)
    session.feed(more)
    untouched.feed(more)
    assert torch.equal(session.logits, untouched.logits)


@settings(max_examples=examples(25))
@given(bounded(ALL), st.lists(TOKENS, min_size=1, max_size=4), st.sampled_from([1, 5, 64]))
def test_the_prefill_step_does_not_change_logits(
    setting: Setting, prompts: list[list[int]], other_step: int
) -> None:
    session = setting.session()
    other = replace(setting, prefill_step=other_step).session()
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


@settings(max_examples=examples(25))
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


@settings(max_examples=examples(25))
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
