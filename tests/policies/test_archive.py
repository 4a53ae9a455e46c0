"""Policy `archive`: the bound, distances and order after random calls."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.archives import TEXT, Setting, archives, calibration, distances

from kvkeep.cache import RaggedCells
from kvkeep.compression.methods import make_method
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.kvzip import KVzap
from kvkeep.errors import KvkeepError
from kvkeep.policies.archive_cells import archived_segments
from kvkeep.session.session import Session
from tests.examples import examples

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 60), st.just(0)),
        st.tuples(st.just("feed"), st.integers(1, 60), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("keep"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pin"), st.integers(1, 20), st.integers(1, 4)),
        st.tuples(st.just("unpin"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("delete"), st.integers(1, 15), st.integers(1, 4)),
        st.tuples(st.just("insert"), st.integers(0, 15), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=12,
)


def act(session: Session, action: tuple[str, int, int]) -> None:
    """Make one call, near the end of the text, since the rest is in the archive."""
    kind, amount, more = action
    start = len(session.tokens) - amount
    if kind == "feed":
        session.feed(TEXT[len(session.tokens) :][:amount])
    elif kind == "rewind":
        session.rewind(amount)
    elif kind == "keep":
        session.keep = amount
    elif kind == "pin":
        session.pin(start, start + more)
    elif kind == "unpin":
        pinned = [i for i, status in enumerate(session.token_status) if status == "pinned"]
        if pinned:
            first = pinned[amount % len(pinned)]
            session.unpin(first, first + 3)
    elif kind == "delete":
        session.delete(start, start + more)
    else:
        session.insert(start, TEXT[:more])


@settings(max_examples=examples(10))
@given(archives(), ACTIONS)
def test_the_budget_and_the_span_bind_after_every_call(
    setting: Setting, actions: list[tuple[str, int, int]]
) -> None:
    session = setting.session()
    for action in [*actions, ("feed", 60, 0), ("feed", 60, 0)]:
        serials = session.cache.serials()
        try:
            if action[0] == "feed":
                report = session.feed(TEXT[len(session.tokens) :][: action[1]])
                assert report.peak_cells <= setting.max_kv_size + setting.prefill_step
            else:
                act(session, action)
        except KvkeepError:
            assert session.cache.serials() == serials
        if session.cache.cells:
            assert session.cache.cells <= setting.max_kv_size
            assert int(distances(session.cache).max()) < setting.span
            assert int(distances(session.cache).min()) >= 0


def test_scores_of_archived_cells_fall_with_each_token() -> None:
    """Or an archive of long texts fills up with the highest scores of all that it ever got."""
    setting = Setting(method="kvzap", ratio=1.0)
    session = setting.fed(400)
    method, block = make_method("kvzap"), setting.block
    assert isinstance(method, KVzap)
    (archived,) = archived_segments(session.cache)
    cells = archived.read(0, archived.length)
    assert isinstance(cells, RaggedCells)
    assert cells.scores is not None
    statistics, rope = calibration().statistics, session.cache.rope
    candidates = Candidates(replace(cells, scores=None), rope, 1.0, statistics=statistics)
    lost = method.cell_score(candidates) - cells.scores
    blocks = lost / (method.decay_per_token * block)  # that came later
    torch.testing.assert_close(blocks, blocks.round(), atol=0.1, rtol=0)
    assert blocks.min().round() == 0
    assert blocks.max().round() >= 3
