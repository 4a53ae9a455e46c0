"""Reports about a session: its parts, what a rewind evaluates, how many cells can be pinned."""

from typing import Any

import pytest
from edit_actions import LOCAL_MODEL, MODEL, loud_model
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import local_spec, small_model, state_specs

from kvkeep import SessionGroup
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.session.memory_use import evaluated_by_rewind
from kvkeep.session.session import Session
from tests.examples import examples

MODELS = {
    "plain": MODEL,
    "local": LOCAL_MODEL,
    "wide": loud_model(local_spec(window=60)),
    "delta_net": small_model(spec=state_specs()["delta_net"]),
}
IDS = [(17 * i * i + 5 * i) % 251 + 1 for i in range(400)]


def fed(model: Model, count: int = 300, **options: object) -> Session:
    session = model.session(max_kv_size=600, prefill_step=50, **{"policy": "full", **options})
    session.feed(IDS[:count])
    return session


@settings(max_examples=examples(25), deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    policy=st.sampled_from(["full", "sliding"]),
    counts=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    removed=st.integers(0, 260),
)
def test_a_rewind_evaluates_as_many_tokens_as_announced(
    name: str, policy: str, counts: list[int], removed: int
) -> None:
    session = MODELS[name].session(200, policy=policy, prefill_step=50)
    for count in counts:
        room = session.room
        if room is None or count <= room:
            session.feed(IDS[:count])
    evaluated, decoder = 0, session.core.memory.decoder
    announced = evaluated_by_rewind(session.core.memory, removed)
    forward = decoder.forward

    def counting(tokens: object, *rest: object) -> object:
        nonlocal evaluated
        evaluated += len(tokens)  # type: ignore[arg-type]
        return forward(tokens, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "forward", counting)
        if announced is None:
            with pytest.raises(InvalidArgument):
                session.rewind(removed)
        else:
            session.rewind(removed)
            assert evaluated == (announced if removed else 0)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "sliding"},
        {"policy": "shift"},
        {"policy": "shift", "discard": 12},
        {"policy": "archive", "window": 30, "block": 8, "ratio": 2},
    ],
)
def test_as_many_cells_can_be_pinned_as_announced(options: dict[str, Any]) -> None:
    session = MODEL.session(64, keep=4, prefill_step=50, **options)
    session.feed(IDS[:64])
    first = session.token_status.index("window")
    session.pin(first, first + 3)
    room = session.memory_use.pin_room
    assert room is not None
    end = first + 3 + room
    assert end < 64
    with pytest.raises(InvalidArgument):
        session.pin(first + 3, end + 1)
    session.pin(first + 3, end)
    assert session.memory_use.pin_room == 0


@pytest.mark.parametrize("policy", ["full", "self_extend"])
def test_policies_that_evict_nothing_let_everything_be_pinned(policy: str) -> None:
    session = MODEL.session(64, policy=policy, **({"window": 32} if policy != "full" else {}))
    session.feed(IDS[:64])
    assert session.memory_use.pin_room is None


@pytest.mark.parametrize("num_tokens", [54, 60, 120, 400, 1200])
@pytest.mark.parametrize("pins", [(), ((10, 14), (20, 22), (30, 34))])
def test_a_session_is_compressed_as_far_as_announced(
    num_tokens: int, pins: tuple[tuple[int, int], ...]
) -> None:
    session = MODEL.session(2000, policy="full")
    session.feed((IDS * 3)[:num_tokens])
    for start, end in pins:
        session.pin(start, end)
    highest = session.memory_use.highest_ratio
    above = (highest or 1.0) + 0.5
    if highest is not None:
        assert session.fork().compress(highest, "kvzip", budget="heads").cells_after
    if above <= 16:
        with pytest.raises(InvalidArgument):
            session.compress(above, "kvzip", budget="heads")


def test_a_compressed_session_is_compressed_as_far_as_announced() -> None:
    session = MODEL.session(2000, policy="full")
    session.feed((IDS * 3)[:400])
    session.compress(2, "snapkv", recent=1)
    highest = session.memory_use.highest_ratio
    assert highest is not None
    assert session.fork().compress(highest).cells_after
    if highest < 16:
        with pytest.raises(InvalidArgument):
            session.compress(highest + 0.5)


@pytest.mark.parametrize("policy", ["sliding", "archive"])
def test_other_policies_than_full_are_not_compressed(policy: str) -> None:
    session = MODEL.session(64, policy=policy)
    session.feed(IDS[:60])
    assert session.memory_use.highest_ratio is None
    with pytest.raises(InvalidArgument):
        session.compress(1.5)


_REMOVED: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"keep": 4},
    "archive": {"window": 16, "block": 8, "ratio": 2},
    "self_extend": {"window": 32},
}


@pytest.mark.parametrize(
    ("name", "policy"), [*(("plain", policy) for policy in _REMOVED), ("delta_net", "sliding")]
)
def test_tokens_are_removed_as_announced(name: str, policy: str) -> None:
    """Each run of a status before others, and the newest tokens."""
    session = MODELS[name].session(64, **{"policy": policy, **_REMOVED[policy]})
    session.feed(IDS[: session.room or 150])
    use, status = session.memory_use, session.token_status
    for kind in set(status):
        start = status.index(kind)
        end = next((i for i in range(start, len(status) - 1) if status[i + 1] != kind), start + 2)
        if kind in use.removable:
            session.fork().delete(start, end)
        else:
            with pytest.raises(InvalidArgument):
                session.fork().delete(start, end)
    session.fork().rewind(use.rewind_room)
    if use.rewind_room + 1 < len(status):
        with pytest.raises(InvalidArgument):
            session.rewind(use.rewind_room + 1)


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_add_up(name: str) -> None:
    session = fed(MODELS[name])
    use = session.memory_use
    assert use.cells + use.windows + use.states + use.checkpoints == session.nbytes
    assert list(use.checkpoint_ends) == session.checkpoints
    assert bool(use.windows) == (name in ("local", "wide"))
    assert bool(use.states) == (name == "delta_net")
    assert bool(use.checkpoints) == (name != "plain")
    session.checkpoint_bytes = 0
    without = session.memory_use
    assert (without.checkpoints, without.checkpoint_ends) == (0, ())
    assert without.states == use.states


@pytest.mark.parametrize("name", MODELS)
def test_a_group_counts_states_and_what_sessions_share_once(name: str) -> None:
    session, other = fed(MODELS[name]), fed(MODELS[name])
    assert SessionGroup([session, other]).nbytes == session.nbytes + other.nbytes
    group = SessionGroup([session, session.fork()])
    assert group.nbytes == session.nbytes
    group.next_tokens()
    assert session.nbytes < group.nbytes < 2 * session.nbytes
