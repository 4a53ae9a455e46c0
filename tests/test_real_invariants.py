"""Invariants of every policy on the default path: the default model, compiled kernels, bf16.

Random histories with failures and Ctrl-C in the middle of calls, stores, forks, spans and pins.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from histories import ACTIONS, BY_HEADS, SETTINGS, TEXT, act, new
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from interrupts import broken_off_at, interrupted_from
from session_state import differences, whole_state

from kvkeep import PrefixStore, Session
from kvkeep.errors import KvkeepError
from kvkeep.model import Model
from tests.examples import examples

QUICK = settings(
    max_examples=examples(2),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# The fault in the middle of a call: none, or a failure or a Ctrl-C at one of its lines.
FAULT = st.tuples(st.sampled_from(["none", "fails", "interrupted"]), st.integers(0, 900))
# None in the first two calls, which feed what is compressed, and pin what stays.
FAULTS_BY_HEADS = [("none", 0)] * 2 + [("fails", 150), ("interrupted", 400)] * 5


def require_sound(session: Session) -> None:
    """Check what holds after every call, failed ones included."""
    memory, cache = session.core.memory, session.cache
    serials = list(memory.serials)
    live = [serial for serial in cache.serials() if serial >= 0]
    assert cache.cells <= session.max_kv_size
    assert len(session.tokens) == len(serials)
    assert len(set(serials)) == len(serials)
    assert len(set(live)) == len(live)
    assert set(live) <= set(serials)
    assert set(memory.pins) <= set(live)
    assert all(0 <= span.start <= span.end <= len(serials) for span in session.spans.values())
    # No cell is seen from before its position or from beyond the trained length.
    for segment in cache.segments:
        distance = segment.position_map(cache.time) - segment.positions()
        assert int(distance.min()) > 0
        assert int(distance.max()) <= memory.decoder.spec.max_positions
    assert bool(session.logits.isfinite().all())


def act_with_fault(session: Session, action: tuple[Any, ...], fault: tuple[str, int]) -> Session:
    """Make one call with a fault in its middle; return the session to continue with."""
    kind, line = fault
    before, result = whole_state(session), [session]

    def call() -> None:
        result[0] = act(session, action)

    if kind == "fails":
        broken = broken_off_at(line, call)
    elif kind == "interrupted":
        broken = interrupted_from(line, call)
    else:
        broken = call() is not None
    steps = action[0] in ("feed", "next")  # these commit after each step
    after = whole_state(session)
    if broken and not steps and after["tokens"] == before["tokens"]:
        changed = {
            where.split()[0].split("[")[0].rstrip(":") for where in differences(before, after)
        }
        # Committed or rolled back as a whole: pins, keep or a compression with all that belongs to
        # them, and nothing else.
        assert changed <= {"pins", "policy", "segments", "window", "time", "serial"}
        assert ("pins" in changed) <= ("segments" in changed)
    return result[0]


@QUICK
@given(SETTINGS, ACTIONS, st.lists(FAULT, min_size=7, max_size=7))
@example({"policy": "full"}, BY_HEADS, [("none", 0)] * len(BY_HEADS))
@example({"policy": "full"}, BY_HEADS, FAULTS_BY_HEADS)
def test_invariants_hold_after_every_call_and_fault(
    smollm2: Model, setting: dict[str, Any], actions: list[Any], faults: list[Any]
) -> None:
    session = new(smollm2, setting)
    for action, fault in zip(actions, faults, strict=False):
        session = act_with_fault(session, action, fault)
        require_sound(session)


@QUICK
@given(SETTINGS, ACTIONS)
@example({"policy": "full"}, BY_HEADS)
def test_a_refused_call_changes_nothing(
    smollm2: Model, setting: dict[str, Any], actions: list[Any]
) -> None:
    session = new(smollm2, setting)
    for action in actions:
        session = act(session, action)
    before, total = whole_state(session), len(session.tokens)
    refused = (
        lambda: session.feed([]),
        lambda: session.feed([1, 10**9]),
        lambda: session.rewind(total + 1),
        lambda: session.delete(5, total + 1),
        lambda: session.replace("no such span", None, [1]),
        lambda: session.insert(-1, [1]),
        lambda: session.pin(0, total + 1),
        lambda: session.unpin(total - 1, total - 1),
        lambda: session.compress(0.5),
        lambda: session.compress(1e9, "keydiff", budget="heads"),
        lambda: session.compress(2.0, "fitted", budget="heads"),
        lambda: session.fork(total + 1),
        lambda: session.__setattr__("keep", -2),
        lambda: session.score([-1]),
        lambda: session.make_room(10**6),
    )
    for call in refused:
        with pytest.raises(KvkeepError):
            call()
        assert list(differences(before, whole_state(session))) == []


@QUICK
@given(SETTINGS, st.sampled_from([7, 64, 300]), st.integers(257, 400))
def test_prefill_steps_and_stored_prefixes_change_logits_by_rounding_only(
    smollm2: Model, tmp_path: Path, setting: dict[str, Any], step: int, count: int
) -> None:
    """Archives score cells by attention, so rounding may change which cells stay."""
    store = PrefixStore(tmp_path / "prefixes")
    sessions = [
        smollm2.session(prefill_step=512, **setting),
        smollm2.session(prefill_step=step, **setting),
        smollm2.session(prefill_step=128, store=store, **setting),
        smollm2.session(prefill_step=128, store=store, **setting),
    ]
    for session in sessions:
        session.feed(TEXT[: min(count, session.max_kv_size) if session.room else count])
        require_sound(session)
    assert {session.cache.cells for session in sessions} == {sessions[0].cache.cells}
    if setting["policy"] == "archive":
        return
    first = sessions[0].logits.log_softmax(-1)
    for session in sessions[1:]:
        other = session.logits.log_softmax(-1)
        divergence = float((first.exp() * (first - other)).sum())
        assert divergence < (0.02 if setting.get("kv_bits") else 0.005)
        assert torch.equal(first.argmax(), other.argmax()) or divergence < 0.005
