"""Views of all cells at once: the status of each token, and runs of cells that match."""

from typing import Any

from edit_actions import MODEL
from histories import ACTIONS, BY_HEADS, SETTINGS, act, new
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.cache import Segment, are_in
from kvkeep.cache.cell_runs import split_by
from kvkeep.session.session import Session
from tests.examples import examples

FULL = {"policy": "full", "max_kv_size": 1500, "kv_bits": None}
SELF_EXTEND = {"policy": "self_extend", "group": 2, "window": 64}
SLIDING = {"policy": "sliding", "max_kv_size": 260, "keep": 40, "kv_bits": None}


def statuses_cell_by_cell(session: Session) -> list[str]:
    memory, statuses, without_cell = session.core.memory, dict[int, str](), "forgotten"
    for segment in session.cache.segments:
        if segment.compressed:
            without_cell = "compressed"
            continue
        for serial in segment.serials():
            if segment.position_map.group > 1:
                statuses[serial] = "grouped"
            elif segment.is_anchor and len(statuses) < memory.policy.keep:
                statuses[serial] = "kept"
            else:
                statuses[serial] = "pinned" if serial in memory.pins else "window"
    return [statuses.get(serial, without_cell) for serial in memory.serials]


def runs_cell_by_cell(
    session: Session, keep: int, chosen: set[int]
) -> list[tuple[Segment, bool, int, int]]:
    runs, rank = list[tuple[Segment, bool, int, int]](), 0
    for segment in session.cache.segments:
        for index, serial in enumerate(segment.serials()):
            matches = rank < keep or serial in chosen
            if index and runs[-1][1] == matches:
                runs[-1] = (segment, matches, runs[-1][2], runs[-1][3] + 1)
            else:
                runs.append((segment, matches, index, 1))
            rank += 1
    return runs


@settings(max_examples=examples(40), deadline=None)
@given(setting=SETTINGS, actions=ACTIONS, keep=st.integers(0, 300), step=st.integers(1, 40))
@example(FULL, BY_HEADS, 4, 7)
@example(FULL, [("pin", 0.3, 20), ("insert", 0.5, 30), ("delete", 0.1, 9)], 0, 3)
@example(SELF_EXTEND, [("feed", 300), ("rewind", 20)], 100, 5)
@example(SLIDING, [("pin", 0.5, 30), ("feed", 100), ("keep", 10)], 60, 5)
def test_views_of_all_cells_are_those_of_each_cell(
    setting: dict[str, Any], actions: list[tuple[Any, ...]], keep: int, step: int
) -> None:
    session = new(MODEL, setting)
    assert session.token_status == statuses_cell_by_cell(session)
    for action in actions:
        session = act(session, action)
        assert session.token_status == statuses_cell_by_cell(session)
    chosen, calls = set(range(0, len(session.tokens), step)), list[int]()

    def matches(ranks: Tensor, serials: Tensor) -> Tensor:
        calls.append(len(ranks))
        return (ranks < keep) | are_in(serials, chosen)

    runs = split_by(session.cache.segments, matches)
    assert runs == runs_cell_by_cell(session, keep, chosen)
    assert calls == [len(session.cache.serials())]  # in one call


def test_a_session_without_tokens_has_no_status() -> None:
    session = MODEL.session(64)
    assert session.token_status == []
    assert split_by(session.cache.segments, lambda ranks, serials: are_in(serials, {1})) == []
    session.feed([1, 2, 3])
    session.rewind(3)
    assert session.token_status == []
    assert not are_in(new(MODEL, FULL).cache.segments[0].live_serials(), set()).any()
