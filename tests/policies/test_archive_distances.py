"""Policy `archive`: distances stay within the span beside any pins, and every call ends."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.archives import MODEL, TEXT, Setting, archives, distances
from policies.test_archive import ACTIONS, act
from small_models import small_model

from kvkeep.errors import KvkeepError
from kvkeep.session.session import Session
from tests.examples import examples


def exact_size(session: Session) -> int:
    """Return the number of anchors and of cells in a full window."""
    policy, pinned = session.settings, session.token_status.count("pinned")
    return policy["keep"] + pinned + policy["window"] + policy["block"]


@pytest.mark.parametrize("pins", [64, 66, 90])
@pytest.mark.parametrize("runs", [1, 5])
def test_distances_beside_pins_stay_within_the_trained_length(pins: int, runs: int) -> None:
    session = small_model(max_positions=512).session(policy="archive")
    session.feed(TEXT[:200])
    starts = [10 + index * (pins // runs + 5) for index in range(runs)]
    for start in starts:
        session.pin(start, start + pins // runs)
    for first in range(200, 1800, 50):
        session.feed(TEXT[first : first + 50])
        assert int(distances(session.cache).max()) < 512
    pinned = {start + index for start in starts for index in range(pins // runs)}
    assert pinned <= set(session.cache.serials())


def test_a_long_pin_in_a_context_of_the_default_models_length() -> None:
    """8,192 positions: 1,400 pinned cells and a window of 6,144 leave 644 for all older text."""
    session = small_model(max_positions=8192).session(policy="archive")
    session.feed(TEXT[:2000])
    session.pin(10, 1410)
    for _ in range(5):
        session.feed(TEXT[:1600])
        assert int(distances(session.cache).max()) < 8192
    assert session.cache.cells <= 8192


def pin_newest(session: Session, count: int) -> None:
    """Pin the newest tokens that are not pinned, as many as there is room for, up to `count`."""
    statuses = session.token_status
    end = max((i + 1 for i, status in enumerate(statuses) if status == "window"), default=0)
    start = end
    while start > 0 and statuses[start - 1] == "window" and end - start < count:
        start -= 1
    if room := session.memory_use.pin_room:
        session.pin(max(start, end - room), end)


@settings(max_examples=examples(5))
@given(
    archives(),
    st.integers(0, 40),
    st.integers(0, 30),
    st.lists(st.one_of(ACTIONS.map(lambda x: x[0]), st.integers(1, 40)), max_size=12),
    st.booleans(),
)
def test_every_call_ends_with_the_shortest_spans(
    setting: Setting,
    larger: int,
    longer: int,
    actions: list[tuple[str, int, int] | int],
    restored: bool,
) -> None:
    """Numbers among the actions are tokens to be pinned, within the room for pins."""
    setting = replace(
        setting,
        max_kv_size=setting.max_kv_size + larger,
        span=setting.keep + setting.window + 2 * setting.block + longer,
        method="keydiff",
        budget="",
    )
    session = setting.session()
    for action in [*actions, ("feed", 60, 0), 40, *[("feed", 60, 0)] * 4, ("unpin", 0, 0)]:
        try:
            pin_newest(session, action) if isinstance(action, int) else act(session, action)
        except KvkeepError:
            continue
        if restored:
            session = MODEL.restore(session.snapshot())
        if session.cache.cells:
            allowed = max(setting.span, exact_size(session) + 1)
            assert int(distances(session.cache).max()) < allowed
            assert allowed <= max(setting.span, setting.max_kv_size)
