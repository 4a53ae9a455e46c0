"""Whatever is done to a session, in whatever order: its logits are those of the naive memory."""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from dense_reference import DenseMemory, Token
from edit_actions import (
    ACTIONS,
    ALTUP_MODEL,
    LOCAL_MODEL,
    MODEL,
    NOPE_MODEL,
    Action,
    Pair,
    Setting,
    loud_model,
    settings_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_state import held_state, same, whole_state
from topics import topic_text

from kvkeep import Snapshot
from kvkeep.errors import ContextFull, InvalidArgument, KvkeepError, NonFiniteLogits
from kvkeep.model import Model
from kvkeep.models.spec import cells
from kvkeep.session.editing import prepare_edit
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.store import PrefixStore
from tests.examples import examples

TEXT = MODEL.text.encode("keys are written once; queries choose where they stand")
NOT_HELD = r"in the cache"
POLICIES = ("full", "sliding", "shift")


@pytest.fixture(autouse=True, scope="module")
def few_to_take_back() -> Iterator[None]:
    """So that edits of short texts, too, reach what local layers have forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "UNDO_TOKENS", 3)
        yield


TMP = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def check(setting: Setting, actions: list[Action], folder) -> None:
    pair = setting.pair()
    pair.session.checkpoint_bytes = 0  # the reference goes back by evaluating again
    for action in actions:
        before = whole_state(pair.session)
        done = pair.act(action, folder)
        session, cells = pair.session, pair.session.cache.cells
        assert done or same(whole_state(session), before), (
            f"{action} was refused and changed something"
        )
        assert session.tokens == pair.dense.ids
        assert cells == len(pair.dense.held) <= setting.max_kv_size
        assert session.keep == pair.dense.keep
        assert held(session) == [i for i, t in enumerate(pair.dense.tokens) if t.held]
        assert distances(session) == list(range(cells - 1, -1, -1))
        assert pair.difference() <= 1e-3
    for left, logits, tokens in pair.others:
        assert left.tokens == tokens
        assert torch.equal(left.logits, logits)
        left.feed([7]) if left.room != 0 else None


def held(session: Session) -> list[int]:
    """The indices of the tokens that are still remembered."""
    return [session.core.memory.serials.index(serial) for serial in session.cache.serials()]


def distances(session: Session) -> list[int]:
    """How far the last token stands from each cell."""
    now, found = session.cache.time - 1, []
    for segment in session.cache.segments:
        found += (segment.position_map(now) - segment.read(0, segment.length).positions).tolist()
    return found


@settings(max_examples=examples(15), suppress_health_check=TMP)
@given(setting=settings_of(("sliding", "shift")), actions=ACTIONS)
def test_a_bounded_session_equals_the_naive_memory(setting, actions, tmp_path) -> None:
    check(setting, actions, tmp_path)


@settings(max_examples=examples(20), suppress_health_check=TMP)
@given(setting=settings_of(("full",)), actions=ACTIONS)
def test_a_full_session_equals_the_naive_memory(setting, actions, tmp_path) -> None:
    check(setting, actions, tmp_path)


@settings(max_examples=examples(15), suppress_health_check=TMP)
@given(setting=settings_of(POLICIES, LOCAL_MODEL), actions=ACTIONS)
def test_a_session_with_local_layers_equals_the_naive_memory(setting, actions, tmp_path) -> None:
    check(setting, actions, tmp_path)


@settings(max_examples=examples(12), suppress_health_check=TMP)
@given(setting=settings_of(POLICIES, NOPE_MODEL), actions=ACTIONS)
def test_a_session_with_layers_without_rotation_equals_the_naive_memory(
    setting, actions, tmp_path
) -> None:
    check(setting, actions, tmp_path)


@settings(max_examples=examples(10), suppress_health_check=TMP)
@given(setting=settings_of(POLICIES, ALTUP_MODEL), actions=ACTIONS)
def test_a_session_with_several_residual_streams_equals_the_naive_memory(
    setting, actions, tmp_path
) -> None:
    check(setting, actions, tmp_path)


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=TMP)
@given(setting=settings_of(POLICIES, LOCAL_MODEL), actions=ACTIONS)
def test_many_sequences_with_local_layers_equal_it(setting, actions, tmp_path) -> None:
    check(setting, actions, tmp_path)


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=TMP)
@given(setting=settings_of(("full", "sliding", "shift")), actions=ACTIONS)
def test_many_sequences_equal_the_naive_memory(setting, actions, tmp_path) -> None:
    check(setting, actions, tmp_path)


def on_its_own(session: Session, action: Action) -> None:
    """What `action` does to a session alone."""
    pair = Pair(session, DenseMemory(MODEL.decoder, session.max_kv_size, max(session.keep, 0)))
    pair.dense.bounded = session.policy != "full"
    pair.dense.tokens = [Token(each) for each in session.tokens]
    if action[0] not in ("fork", "snapshot"):
        with suppress(KvkeepError):
            getattr(pair, f"_{action[0]}")(*action[1])[0]()


def assert_bit_equal(a: Session, b: Session, actions: list[Action]) -> None:
    assert same(held_state(a), held_state(b))
    for action in actions:
        on_its_own(a, action)
        on_its_own(b, action)
        assert same(held_state(a), held_state(b)), f"after {action}"


EITHER = st.one_of(settings_of(POLICIES), settings_of(POLICIES, LOCAL_MODEL))


@settings(max_examples=examples(25), suppress_health_check=TMP)
@given(setting=EITHER, actions=ACTIONS, more=ACTIONS, forked=st.booleans())
def test_a_restored_session_goes_on_bit_equal(setting, actions, more, forked, tmp_path) -> None:
    session = setting.pair().session
    for action in actions:
        on_its_own(session, action)
    if forked:
        session = session.fork()
    session.snapshot().save(tmp_path / "session.kvkeep")
    restored = setting.model.restore(Snapshot.load(tmp_path / "session.kvkeep"))
    assert_bit_equal(session, restored, more)


@settings(max_examples=examples(25))
@given(settings_of(("sliding",)), ACTIONS)
def test_shift_by_one_is_sliding_bit_for_bit(setting: Setting, actions: list[Action]) -> None:
    sliding = setting.pair().session
    shift = replace(setting, policy="shift", discard=1).pair().session
    actions = [action for action in actions if action[0] != "discard"]
    assert_bit_equal(sliding, shift, actions)


@settings(max_examples=examples(25))
@given(EITHER, ACTIONS, ACTIONS)
def test_what_a_fork_does_the_other_does_not_see(
    setting: Setting, actions: list[Action], more: list[Action]
) -> None:
    session = setting.pair().session
    for action in actions:
        on_its_own(session, action)
    fork, before = session.fork(), whole_state(session)
    for action in more:
        on_its_own(fork, action)
    assert same(whole_state(session), before)
    after = whole_state(fork)
    for action in more:
        on_its_own(session, action)
    assert same(whole_state(fork), after)


def edited(policy: str = "full", budget: int = 128) -> Session:
    session = MODEL.session(budget, policy=policy)
    session.feed(TEXT)
    return session


def test_tokens_and_text_follow_each_edit() -> None:
    session = edited()
    assert session.delete(4, 8).recompute == "none"
    assert session.text() == "keys written once; queries choose where they stand"
    session.insert(5, "are ")
    assert session.text() == "keys are written once; queries choose where they stand"
    session.replace(0, 4, "Keys", "suffix")
    session.delete(len(TEXT) - 6, len(TEXT))
    session.insert(len(TEXT) - 6, "!")
    assert session.text() == "Keys are written once; queries choose where they!"
    assert session.tokens == MODEL.text.encode(session.text())
    assert session.cache.cells == len(session.tokens)


@pytest.mark.parametrize("policy", ["full", "sliding", "shift"])
def test_a_suffix_edit_is_a_session_that_was_fed_the_edited_text(policy: str) -> None:
    session, fresh = edited(policy), MODEL.session(128, policy=policy)
    session.replace(9, 16, list(b"carved"), "suffix")
    session.insert(4, list(b" (all)"), "suffix")
    session.delete(20, 25, "suffix")
    fresh.feed(session.tokens)
    assert (session.logits - fresh.logits).abs().max() <= 1e-3


def test_an_edit_in_place_leaves_later_cells_as_they_were_computed() -> None:
    session = edited()
    values = torch.cat([c.values for _, c in session.cache.read(20, 30)], 2)
    keys = torch.cat([c.keys for _, c in session.cache.read(20, 30)], 2)
    report = session.replace(9, 16, list(b"carved in stone"))
    assert torch.equal(torch.cat([c.values for _, c in session.cache.read(28, 30)], 2), values)
    assert torch.equal(torch.cat([c.keys for _, c in session.cache.read(28, 30)], 2), keys)
    assert (report.cells_moved, report.tokens_evaluated) == (9, 16)
    fresh = MODEL.session(128, policy="full")
    fresh.feed(session.tokens)
    assert (session.logits - fresh.logits).abs().max() > 1e-3


def test_a_report_says_what_was_evaluated() -> None:
    report = edited().delete(10, 20, "suffix")
    assert (report.cells_moved, report.tokens_evaluated) == (0, len(TEXT) - 20 + 1)
    assert report.recompute == "suffix"
    assert report.seconds > 0
    assert edited().delete(10, 20).cells_moved == 10
    assert edited().delete(10, 20).tokens_evaluated == 1
    assert edited().replace(10, 20, TEXT[:10]).cells_moved == 0
    assert edited().insert(len(TEXT), TEXT[:3]).tokens_evaluated == 3


@pytest.mark.parametrize("prefill_step", [1, 3, 512])
def test_a_long_insertion_does_not_depend_on_the_prefill_step(prefill_step: int) -> None:
    session = MODEL.session(128, policy="full", prefill_step=prefill_step)
    dense = DenseMemory(MODEL.decoder, 128, 128, bounded=False)
    for each in (session, dense):
        each.feed(TEXT)
    session.insert(7, TEXT[:40])
    dense.edit(7, 7, TEXT[:40], False)
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_an_edit_that_is_prepared_has_changed_nothing(recompute) -> None:
    session, done = edited("sliding", 64), edited("sliding", 64)
    before = whole_state(session)
    complete, evaluated = prepare_edit(session.core.memory, 9, 16, TEXT[:4], recompute, 512)
    assert same(whole_state(session), before)
    successor = session.core.memory.successor()
    memory, _ = complete(successor)
    assert memory.tokens == TEXT[:9] + TEXT[:4] + TEXT[16:]
    assert done.replace(9, 16, TEXT[:4], recompute).tokens_evaluated == evaluated
    assert torch.equal(memory.logits(), done.logits)
    successor.cache.rollback()
    assert same(whole_state(session), before)
    done = edited("sliding", 64)
    for each in (session, done):
        each.feed(TEXT * 2)
    assert torch.equal(session.logits, done.logits)


WRONG = {
    "out of order": (InvalidArgument, lambda s: s.delete(9, 4)),
    "negative": (InvalidArgument, lambda s: s.delete(-3, 4)),
    "past the end": (InvalidArgument, lambda s: s.delete(4, 55)),
    "no end": (InvalidArgument, lambda s: s.delete(4)),
    "nothing to delete": (InvalidArgument, lambda s: s.delete(4, 4)),
    "nothing to insert": (InvalidArgument, lambda s: s.insert(4, "")),
    "insert before the start": (InvalidArgument, lambda s: s.insert(-1, "x")),
    "insert past the end": (InvalidArgument, lambda s: s.insert(55, "x")),
    "outside the vocabulary": (InvalidArgument, lambda s: s.insert(4, [3, 256])),
    "replace out of order": (InvalidArgument, lambda s: s.replace(9, 4, "x")),
    "recompute misspelt": (InvalidArgument, lambda s: s.delete(4, 9, "suffixes")),
    "recompute misspelt at the end": (InvalidArgument, lambda s: s.insert(54, "x", "all")),
    "insert too long": (ContextFull, lambda s: s.insert(4, "x" * 80)),
    "insert too long anew": (ContextFull, lambda s: s.insert(4, "x" * 80, "suffix")),
    "insert too long at the end": (ContextFull, lambda s: s.insert(54, "x" * 80)),
    "make room for nothing": (InvalidArgument, lambda s: s.make_room(0)),
    "make room for too many": (InvalidArgument, lambda s: s.make_room(60)),
    "make room beside too many": (InvalidArgument, lambda s: s.make_room(10, keep=50)),
    "make room before the start": (InvalidArgument, lambda s: s.make_room(10, keep=-2)),
}


@pytest.mark.parametrize(("error", "wrong"), WRONG.values(), ids=WRONG)
def test_an_edit_that_cannot_be_is_refused(error, wrong) -> None:
    session = edited()
    before = whole_state(session)
    with pytest.raises(error) as raised:
        wrong(session)
    assert len(str(raised.value)) > 20
    assert same(whole_state(session), before)


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_what_is_forgotten_cannot_be_edited(recompute: str) -> None:
    session = edited("sliding", 24)
    before = whole_state(session)
    for start, end in ((2, 6), (30, 40), (20, 35)):
        with pytest.raises(InvalidArgument, match=NOT_HELD):
            session.delete(start, end, recompute)
    with pytest.raises(InvalidArgument, match=NOT_HELD):
        session.insert(20, "x", recompute)
    with pytest.raises(InvalidArgument, match=NOT_HELD):
        session.make_room(4)
    assert same(whole_state(session), before)


def test_an_insertion_among_the_oldest_of_a_full_window_does_not_fit() -> None:
    session = edited("sliding", 24)
    before = whole_state(session)
    with pytest.raises(ContextFull, match="do not fit"):
        session.insert(36, "too long")
    assert same(whole_state(session), before)
    session.insert(50, "fits")
    assert session.cache.cells == 24


def test_make_room_drops_what_follows_the_beginning_and_goes_on() -> None:
    session = edited("full", len(TEXT))
    with pytest.raises(ContextFull):
        session.next_token()
    session.make_room(20)
    assert session.text() == "keys (...) choose where they stand"
    assert session.room == 20
    for _ in range(20):
        session.next_token()


def test_make_room_takes_no_pinned_token_out() -> None:
    session = edited()
    session.pin(10, 12)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="pinned"):
        session.make_room(20)
    assert same(whole_state(session), before)
    session.make_room(20, bridge="", keep=12)
    assert len(session.tokens) == len(TEXT) - 20


def test_self_extend_groups_cells_by_where_an_edit_has_put_them() -> None:
    session = MODEL.session(400, policy="self_extend", group=4, window=32)
    session.feed(TEXT[:20])
    session.insert(5, TEXT[:3])
    session.delete(10, 12)
    session.feed(TEXT * 2)
    found = distances(session)
    assert found == sorted(found, reverse=True)
    assert found[-32:] == list(range(31, -1, -1))
    far = found[:-32]
    assert all(sum(each == group for each in far) <= 4 for group in far)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match='needs recompute="suffix"'):
        session.delete(len(session.tokens) - 9, len(session.tokens) - 5)
    assert same(whole_state(session), before)
    session.delete(len(session.tokens) - 9, len(session.tokens) - 5, "suffix")


@pytest.mark.parametrize("seed", range(6))
def test_self_extend_without_groups_is_a_full_memory(seed: int) -> None:
    """Cells that left the window are seen as before; edits must keep them in their order."""
    draw, window = random.Random(seed), 4 + 3 * seed
    session = MODEL.session(160, policy="self_extend", group=1, window=window)
    dense = DenseMemory(MODEL.decoder, 160, 160, bounded=False)
    for each in (session, dense):
        each.feed(TEXT[:32])
    for _ in range(8):
        start = draw.randrange(len(session.tokens) - 4)
        end, new = start + draw.randrange(4), TEXT[: draw.randrange(1, 9)]
        session.replace(start, end, new) if end > start else session.insert(start, new)
        dense.edit(start, end, new, False)
        more, back = TEXT[: draw.randrange(1, 7)], draw.randrange(3)
        for each in (session, dense):
            each.feed(more)
            each.rewind(back)
        assert held(session) == list(range(len(session.tokens)))
        assert distances(session) == list(range(session.cache.cells - 1, -1, -1))
        assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("policy", ["sliding", "shift"])
def test_storage_of_an_edited_window_stays_near_the_budget(policy: str) -> None:
    session = MODEL.session(256, 4, policy)
    cell, idle = session.cache.layout.cell_bytes, 256 // 8
    session.feed(TEXT * 4)
    for place in range(180, 20, -10):
        session.replace(place, place + 3, TEXT[:4])
    assert session.cache.nbytes <= (256 + idle) * cell
    for count in range(300):
        session.feed(TEXT[count % 50 :][:1])
        assert session.cache.nbytes <= (256 + idle + 256 // 16 + 1) * cell
    session.feed(TEXT * 5)
    assert session.cache.nbytes <= 256 * cell


@pytest.mark.parametrize("policy", ["sliding", "shift"])
def test_an_edited_session_of_some_length_comes_back_bit_equal(policy: str, tmp_path) -> None:
    session = MODEL.session(160, 4, policy)
    session.feed(TEXT * 2)
    for place in (90, 60, 30):
        session.replace(place, place + 3, TEXT[:5])
    session.feed(TEXT[:20])
    for index in range(8):
        session.snapshot().save(tmp_path / f"{index}.kvkeep")
        restored = MODEL.restore(Snapshot.load(tmp_path / f"{index}.kvkeep"))
        for token in TEXT:
            for each in (session, restored):
                each.feed([token])
            assert torch.equal(session.logits, restored.logits)


def test_a_session_edited_to_nothing_is_a_new_one(tmp_path) -> None:
    """Cells of the next prompt may come from a prefix store, at positions from 0."""
    store = PrefixStore(tmp_path)
    session = MODEL.session(600, policy="full", store=store)
    session.feed(TEXT)
    session.delete(4, 9)
    session.delete(0, len(session.tokens))
    assert session.logits is None
    fresh = MODEL.session(600, policy="full", store=store)
    prompt = TEXT * 10
    for each in (session, fresh):
        each.feed(prompt)
    assert (session.logits - fresh.logits).abs().max() <= 1e-3
    session.rewind(len(prompt))
    assert session.feed(prompt).reused == 512
    assert (session.logits - fresh.logits).abs().max() <= 1e-3


def test_an_insertion_can_be_the_first_prompt() -> None:
    session = MODEL.session(32, keep=-1)
    session.insert(0, TEXT[:10])
    assert session.keep == 10
    session.feed(TEXT)
    assert held(session)[:10] == list(range(10))
    refused = MODEL.session(32, keep=-1)
    with pytest.raises(InvalidArgument, match="room for a window"):
        refused.insert(0, TEXT)
    assert refused.tokens == []
    assert refused.keep == -1


BROKEN = {
    "delete": lambda s: s.delete(40, 44),
    "insert": lambda s: s.insert(48, "xy"),
    "replace anew": lambda s: s.replace(48, 50, "xyz", "suffix"),
    "rewind": lambda s: s.rewind(5),
    "make room": lambda s: s.make_room(5, keep=38),
}


@pytest.mark.parametrize("policy", ["full", "sliding", "shift"])
@pytest.mark.parametrize("call", BROKEN.values(), ids=BROKEN)
def test_an_edit_that_fails_inside_the_model_changes_nothing(call, policy: str) -> None:
    model = loud_model()
    session = model.session(128 if policy == "full" else 24, policy=policy)
    with session.span("all"):
        session.feed(TEXT)
    if policy != "full":
        session.pin(51, 53)
    before, spans = whole_state(session), session.spans
    broken = model.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
    sound = broken.clone()
    broken[3, 3] = torch.nan
    with pytest.raises(NonFiniteLogits):
        call(session)
    broken.copy_(sound)
    assert same(whole_state(session), before)
    assert session.spans == spans
    call(session)
    session.feed(TEXT)


@pytest.mark.slow
def test_the_real_model_equals_the_naive_memory_through_edits(smollm2_fp32: Model) -> None:
    ids = smollm2_fp32.text.encode(topic_text()[:4000])[:420]
    session = smollm2_fp32.session(96, keep=4)
    dense = DenseMemory(smollm2_fp32.decoder, 96, 4)
    for each in (session, dense):
        each.feed(ids[:150])
        each.pin(100, 110)
    for start, end, new in (
        (120, 131, ids[200:205]),
        (104, 107, ids[210:216]),
        (118, 118, ids[:9]),
    ):
        session.replace(start, end, new) if end > start else session.insert(start, new)
        dense.edit(start, end, new, False)
        assert (session.logits - dense.logits()).abs().max() <= 1e-3
    for each in (session, dense):
        each.feed(ids[220:300])
    assert float(session.logits.abs().max()) > 10
    assert (session.logits - dense.logits()).abs().max() <= 1e-3
