"""What must hold for every policy, on the path that users run: the default model, compiled, bf16.

Random histories with failures and Ctrl-C in the middle of calls, stores, forks, spans and pins.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from histories import ACTIONS, BY_HEADS, SETTINGS, TEXT, act, new
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from interrupting import broken_off_at, interrupted_from
from whole_state import differences, whole_state

from kvkeep import PrefixStore, Session
from kvkeep.errors import KvkeepError
from kvkeep.model import Model

QUICK = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# What goes wrong in the middle of a call: nothing, a failure or a Ctrl-C at one of its lines.
TROUBLE = st.tuples(st.sampled_from(["none", "fails", "interrupted"]), st.integers(0, 900))
# Each but the first two, which say what there is to compress and what stays.
BROKEN_OFF = [("none", 0)] * 2 + [("fails", 150), ("interrupted", 400)] * 5


def require_sound(session: Session) -> None:
    """What holds after every call, whatever became of it."""
    memory, cache = session._state.memory, session.cache
    serials = list(memory.serials)
    live = [serial for serial in cache.serials() if serial >= 0]
    assert cache.cells <= session.max_kv_size
    assert len(session.tokens) == len(serials)
    assert len(set(serials)) == len(serials)
    assert len(set(live)) == len(live)
    assert set(live) <= set(serials)
    assert set(memory.pins) <= set(live)
    assert all(0 <= span.start <= span.end <= len(serials) for span in session.spans.values())
    # What a segment holds is seen neither from the future nor from further than the model learnt.
    for segment in cache.segments:
        distance = segment.map(cache.time) - segment.positions()
        assert int(distance.min()) > 0
        assert int(distance.max()) <= memory.decoder.spec.max_positions
    assert bool(session.logits.isfinite().all())


def do(session: Session, action: tuple[Any, ...], trouble: tuple[str, int]) -> Session:
    """Does it, with trouble on the way; the session to go on with."""
    kind, line = trouble
    before, found = whole_state(session), [session]

    def call() -> None:
        found[0] = act(session, action)

    if kind == "fails":
        broken = broken_off_at(line, call)
    elif kind == "interrupted":
        broken = interrupted_from(line, call)
    else:
        broken = call() is not None
    steps = action[0] in ("feed", "next")  # whole after each step
    after = whole_state(session)
    if broken and not steps and after["tokens"] == before["tokens"]:
        changed = {
            where.split()[0].split("[")[0].rstrip(":") for where in differences(before, after)
        }
        # Through, or as before: what was pinned, kept or compressed is so with all that belongs
        # to it; nothing else differs.
        assert changed <= {"pins", "policy", "segments", "window", "time", "serial"}
        assert ("pins" in changed) <= ("segments" in changed)
    return found[0]


@QUICK
@given(SETTINGS, ACTIONS, st.lists(TROUBLE, min_size=7, max_size=7))
@example({"policy": "full"}, BY_HEADS, [("none", 0)] * len(BY_HEADS))
@example({"policy": "full"}, BY_HEADS, BROKEN_OFF)
def test_it_is_sound_after_every_call_whatever_went_wrong(
    smollm2: Model, setting: dict[str, Any], actions: list[Any], troubles: list[Any]
) -> None:
    session = new(smollm2, setting)
    for action, trouble in zip(actions, troubles, strict=False):
        session = do(session, action, trouble)
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
def test_how_a_prompt_is_cut_and_whether_it_was_stored_are_rounding(
    smollm2: Model, tmp_path: Path, setting: dict[str, Any], step: int, count: int
) -> None:
    """Archives decide by what they see, so that rounding may change which cells stay."""
    store = PrefixStore(tmp_path / "prefixes")
    ways = [
        smollm2.session(prefill_step=512, **setting),
        smollm2.session(prefill_step=step, **setting),
        smollm2.session(prefill_step=128, store=store, **setting),
        smollm2.session(prefill_step=128, store=store, **setting),
    ]
    for session in ways:
        session.feed(TEXT[: min(count, session.max_kv_size) if session.room else count])
        require_sound(session)
    assert {session.cache.cells for session in ways} == {ways[0].cache.cells}
    if setting["policy"] == "archive":
        return
    first = ways[0].logits.log_softmax(-1)
    for session in ways[1:]:
        other = session.logits.log_softmax(-1)
        divergence = float((first.exp() * (first - other)).sum())
        assert divergence < (0.02 if setting.get("kv_bits") else 0.005)
        assert torch.equal(first.argmax(), other.argmax()) or divergence < 0.005
