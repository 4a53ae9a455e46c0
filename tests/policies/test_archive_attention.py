"""Policy `archive`: what each token attends to, and that its logits depend on nothing else."""

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policies.archives import MODEL, TEXT, Setting, archived, archives, distances

from kvkeep.errors import KvkeepError
from kvkeep.session.session import Session
from tests.examples import examples

BITS = 16  # tokens that one element of a value encodes


class AttentionProbe:
    """A session whose values encode their tokens, so that attention shows which cells it saw.

    Keys and queries are zeros: every visible cell has the same weight, which the first token, a
    kept one, gives.
    """

    def __init__(self, setting: Setting):
        self.session = setting.session()
        self.policy = setting.policy().for_model(MODEL.spec.max_positions)
        self.step = setting.prefill_step
        self.seen: list[set[int]] = []

    def feed(self, count: int) -> None:
        """Run `count` tokens through the policy and attention, without a model."""
        cache, policy = self.session.cache, self.policy
        layout, fed = cache.layout, 0
        while fed < count:
            n = policy.open(cache, min(count - fed, self.step))
            codes = torch.zeros(n, layout.kv_heads, layout.head_dim)
            for row, time in enumerate(range(cache.time, cache.time + n)):
                codes[row, :, 0] = float(time == 0)
                codes[row, :, 1 + time // BITS] = 2.0 ** (time % BITS)
            zeros = torch.zeros(n, layout.kv_heads, layout.head_dim)
            with cache.step(n) as step:
                for layer in range(layout.layers):
                    q = torch.zeros(n, cache.attention.heads, layout.head_dim)
                    out = step.attend(layer, q, zeros, codes).view(n, cache.attention.heads, -1)
            policy.enforce_bounds(cache)
            self.seen += [decode_tokens(row[0].double()) for row in out]
            fed += n


def decode_tokens(sums_by_element: torch.Tensor) -> set[int]:
    sums = [round(float(x / sums_by_element[0])) for x in sums_by_element[1:]]
    bits = [(index, bit) for index in range(len(sums)) for bit in range(BITS)]
    return {index * BITS + bit for index, bit in bits if sums[index] >> bit & 1}


@settings(max_examples=examples(15))
@given(archives(), st.integers(1, 240))
def test_each_token_sees_the_kept_tokens_the_window_and_the_archive(
    setting: Setting, count: int
) -> None:
    kept = max(1, setting.keep)
    numbers = vars(setting) | {"keep": kept, "method": "keydiff", "budget": ""}
    probe = AttentionProbe(
        Setting(**numbers | {"max_kv_size": setting.max_kv_size + 1, "span": 4000})
    )
    probe.feed(count)
    for time, seen in enumerate(probe.seen):
        newest = range(max(0, time - setting.window), time + 1)
        assert seen >= {*newest, *range(min(kept, time + 1))}
        assert max(seen) == time
        assert len(seen) <= setting.max_kv_size + setting.prefill_step + 1


@pytest.mark.parametrize("method", ["fitted", "keydiff"])
@pytest.mark.parametrize("step", [1, 7, 64])
def test_the_prefill_step_does_not_change_logits(method: str, step: int) -> None:
    setting = Setting(method=method)
    session = setting.session()
    other = Setting(**vars(setting) | {"prefill_step": step}).session()
    for first in range(0, 300, 100):
        for item in (session, other):
            item.feed(TEXT[first : first + 100])
        assert (session.logits - other.logits).abs().max() <= 1e-3
    assert archived(session) == archived(other) > 0


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["feed", "feed", "delete", "insert", "rewind", "pin"]),
        st.integers(1, 20),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=8,
)


def act(session: Session, kind: str, amount: int, more: int) -> None:
    start = len(session.tokens) - amount
    if kind == "feed":
        session.feed(TEXT[:amount])
    elif kind == "delete":
        session.delete(start, start + more)
    elif kind == "insert":
        session.insert(start, TEXT[: 3 * more])
    elif kind == "rewind":
        session.rewind(more)
    elif session.policy == "archive":
        session.pin(start, start + more)


@settings(max_examples=examples(30))
@given(EDITS)
@example([("rewind", 1, 5)] * 6)  # all tokens
def test_an_archive_at_ratio_1_equals_full_attention(
    actions: list[tuple[str, int, int]],
) -> None:
    setting = Setting(500, window=14, block=6, ratio=1.0, span=4000)
    session, other = setting.session(), MODEL.session(policy="full")
    for action in [("feed", 20, 0), *actions, ("feed", 40, 0)]:
        try:
            act(session, *action)
        except KvkeepError:
            continue
        act(other, *action)
        assert session.tokens == other.tokens
        assert session.cache.cells == other.cache.cells
        if session.logits is None or other.logits is None:  # all tokens were rewound
            assert session.logits is other.logits
            continue
        assert (session.logits - other.logits).abs().max() <= 1e-3
    assert archived(session) > 0


@pytest.mark.parametrize("seed", range(8))
def test_an_edit_between_archived_cells_moves_one_side(seed: int) -> None:
    """A pin is where the window left it; the tokens before and after it are archived."""
    draw = random.Random(seed)
    setting = Setting(500, window=6, block=draw.choice([1, 5]), ratio=1.0, span=4000)
    session, other = setting.session(), MODEL.session(policy="full")
    for item in (session, other):
        item.feed(TEXT[:30])
    session.pin(25, 29)
    for turn in range(5):
        pinned = [i for i, status in enumerate(session.token_status) if status == "pinned"]
        start, new = draw.choice(pinned), TEXT[turn:][: draw.randrange(1, 9)]
        end = min(start + draw.randrange(3), pinned[-1] + 1)
        for item in (session, other):
            item.replace(start, end, new) if end > start else item.insert(start, new)
            item.feed(TEXT[:11])
        assert session.cache.cells == other.cache.cells == len(session.tokens)
        assert (session.logits - other.logits).abs().max() <= 1e-3
    assert archived(session) > 50


def test_no_distance_exceeds_the_span_in_a_long_run() -> None:
    setting = Setting(prefill_step=64)
    session, furthest = setting.session(), 0
    for first in range(0, 2400, 60):
        session.feed(TEXT[first : first + 60])
        current = distances(session.cache)
        furthest = max(furthest, int(current.max()))
        assert (current.diff() <= 0).all()  # the oldest is seen from furthest
        assert session.cache.nbytes <= 1.1 * setting.max_kv_size * session.cache.layout.cell_bytes
    assert setting.span / 2 < furthest < setting.span
