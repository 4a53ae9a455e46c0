"""Policy `archive`: what each token sees, and that nothing else decides its logits."""

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policies.archives import MODEL, TEXT, Setting, archived, archives, distances

from kvkeep.errors import KvkeepError
from kvkeep.session.session import Session

BITS = 16  # tokens told by one element of a value


class Watched:
    """A session whose values say which tokens they are of, read back through attention itself.

    Keys and queries are zeroes: every visible cell has the same weight, and the first token, which
    is kept, says how large that is.
    """

    def __init__(self, setting: Setting):
        self.session = setting.session()
        self.step = setting.prefill_step
        self.seen: list[set[int]] = []

    def feed(self, count: int) -> None:
        """Runs `count` tokens through the policy on bare attention."""
        cache, policy = self.session.cache, self.session._memory.policy
        layout, done = cache.layout, 0
        while done < count:
            n = policy.open(cache, min(count - done, self.step))
            codes = torch.zeros(n, layout.kv_heads, layout.head_dim)
            for row, time in enumerate(range(cache.time, cache.time + n)):
                codes[row, :, 0] = float(time == 0)
                codes[row, :, 1 + time // BITS] = 2.0 ** (time % BITS)
            nothing = torch.zeros(n, layout.kv_heads, layout.head_dim)
            with cache.step(n) as step:
                for layer in range(layout.layers):
                    q = torch.zeros(n, cache.heads, layout.head_dim)
                    out = step.attend(layer, q, nothing, codes).view(n, cache.heads, -1)
            policy.settle(cache)
            self.seen += [decoded(row[0].double()) for row in out]
            done += n


def decoded(found: torch.Tensor) -> set[int]:
    sums = [round(float(x / found[0])) for x in found[1:]]
    bits = [(index, bit) for index in range(len(sums)) for bit in range(BITS)]
    return {index * BITS + bit for index, bit in bits if sums[index] >> bit & 1}


@settings(max_examples=15)
@given(archives(), st.integers(1, 240))
def test_each_token_sees_the_kept_ones_the_window_and_what_is_archived(
    setting: Setting, count: int
) -> None:
    kept = max(1, setting.keep)
    numbers = vars(setting) | {"keep": kept, "method": "keydiff", "budget": ""}
    watched = Watched(Setting(**numbers | {"max_kv_size": setting.max_kv_size + 1, "span": 4000}))
    watched.feed(count)
    for time, seen in enumerate(watched.seen):
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
        for each in (session, other):
            each.feed(TEXT[first : first + 100])
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


@settings(max_examples=30)
@given(EDITS)
@example([("rewind", 1, 5)] * 6)  # all tokens
def test_an_archive_that_loses_nothing_says_what_full_attention_says(
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
        if session.logits is None or other.logits is None:  # all tokens were taken back
            assert session.logits is other.logits
            continue
        assert (session.logits - other.logits).abs().max() <= 1e-3
    assert archived(session) > 0


@pytest.mark.parametrize("seed", range(8))
def test_what_is_archived_on_both_sides_of_an_edit_is_moved_on_one(seed: int) -> None:
    """A pin stands where the window left it; what was read before it and after it is archived."""
    draw = random.Random(seed)
    setting = Setting(500, window=6, block=draw.choice([1, 5]), ratio=1.0, span=4000)
    session, other = setting.session(), MODEL.session(policy="full")
    for each in (session, other):
        each.feed(TEXT[:30])
    session.pin(25, 29)
    for turn in range(5):
        pinned = sorted(map(list(session._memory.serials).index, session._memory.pins))
        start, new = draw.choice(pinned), TEXT[turn:][: draw.randrange(1, 9)]
        end = min(start + draw.randrange(3), pinned[-1] + 1)
        for each in (session, other):
            each.replace(start, end, new) if end > start else each.insert(start, new)
            each.feed(TEXT[:11])
        assert session.cache.cells == other.cache.cells == len(session.tokens)
        assert (session.logits - other.logits).abs().max() <= 1e-3
    assert archived(session) > 50


def test_nothing_is_seen_from_beyond_the_span_however_long_it_runs() -> None:
    setting = Setting(prefill_step=64)
    session, furthest = setting.session(), 0
    for first in range(0, 2400, 60):
        session.feed(TEXT[first : first + 60])
        now = distances(session.cache)
        furthest = max(furthest, int(now.max()))
        assert (now.diff() <= 0).all()  # the oldest is seen from furthest
        assert session.cache.nbytes <= 1.1 * setting.max_kv_size * session.cache.layout.cell_bytes
    assert setting.span / 2 < furthest < setting.span
