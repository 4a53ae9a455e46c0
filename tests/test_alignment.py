"""A session aligned with another text: the tokens, the cells that stay, and what is evaluated."""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupt_at_step import interrupting
from session_state import same, whole_state
from small_models import local_spec, small_model, state_specs
from topics import topic_text

from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits
from kvkeep.model import Model
from kvkeep.session.alignment import (
    AlignmentOptions,
    AlignmentPlan,
    AlignmentReport,
    TokenEdit,
    changed_ranges,
    plan_alignment,
)
from kvkeep.session.held_tokens import is_edited_in_place
from kvkeep.session.session import Session
from kvkeep.session.token_diff import equal_runs
from tests.examples import examples

MODEL = small_model()
LOCAL_MODEL = small_model(spec=local_spec(8))
VOCABULARY = 200


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two texts: the second is the first with some spans deleted, inserted and replaced."""
    seed = draw(st.integers(0, 1000))
    old = some_tokens(draw(st.integers(1, 400)), seed)
    new = list(old)
    for number in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(new)))
        new[at : at + draw(st.integers(0, 30))] = some_tokens(draw(st.integers(0, 30)), number)
    return old, new or old


def in_place(reread: int, share: float) -> AlignmentOptions:
    return AlignmentOptions("in_place", 0, reread, share)


def counted_tokens(model: Model, function: Callable[[], AlignmentReport]) -> tuple[int, object]:
    """Return how many tokens the model evaluates in a call, and its result."""
    counts, forward = [], model.decoder.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model.decoder,
            "forward",
            lambda tokens, step: counts.append(len(tokens)) or forward(tokens, step),
        )
        result = function()
    return sum(counts), result


@given(texts())
@settings(max_examples=examples(25))
def test_equal_runs_are_equal_in_order_and_maximal(pair):
    old, new = pair
    runs = equal_runs(old, new, 10)
    old_end = new_end = 0
    for run in runs:
        assert run.old >= old_end
        assert run.new >= new_end
        old_end, new_end = run.old + run.length, run.new + run.length
        assert old[run.old : old_end] == new[run.new : new_end]
        assert old[old_end : old_end + 1] != new[new_end : new_end + 1] or old_end == len(old)


@pytest.mark.parametrize("cut", [0, 2])
def test_what_is_appended_follows_the_text_though_that_ends_alike(cut: int) -> None:
    """So the tokens before it stay where they are, and nothing comes between pinned ones."""
    message = some_tokens(40, 1)
    old = [*some_tokens(100), *message]
    new = [*old[:50], *old[50 + cut :], *message, *message]
    plan = plan_alignment(old, new, in_place(16, 1))
    assert (plan.seams, plan.tail) == (int(cut > 0), TokenEdit(140, 140, (*message, *message)))
    is_cut = cut > 0
    assert changed_ranges(old, new) == ((50, 50 + cut, 0),) * is_cut + ((140 - cut,) * 2 + (80,),)
    assert changed_ranges(new, old) == ((50, 50, cut),) * is_cut + ((140, 220, 0),)


@pytest.mark.parametrize("vocabulary", [1, 2, 50_000])
def test_long_texts_are_compared_in_a_moment(vocabulary):
    """Also those in which each piece occurs often, for which other diffs take minutes."""
    old = random.Random(0).choices(range(vocabulary), k=20_000)
    new = [*old[:7_000], *old[7_300:12_000], *some_tokens(100), *old[12_000:]]
    covered = sum(run.length for run in equal_runs(old, new, 32))
    assert covered >= 0.9 * len(old)


@given(texts(), st.sampled_from([(0, 0), (1, 1), (16, 0.1), (16, 1)]), st.integers(0, 1))
@settings(max_examples=examples(8))
def test_aligned_session_holds_the_text_as_after_the_same_edits(pair, rereads, is_full):
    old, new = pair
    policy = "full" if is_full else "sliding"
    session = MODEL.session(policy=policy, max_kv_size=1024, prefill_step=64)
    session.feed(old)
    original, before = session.fork(), whole_state(session.fork())
    reread, share = rereads
    plan = plan_alignment(old, new, in_place(reread, share))
    assert plan.kept + plan.moved + plan.evaluated == len(new)
    counted, report = counted_tokens(
        MODEL, lambda: session.align(new, min_saved=0, reread=reread, reread_share=share)
    )
    assert session.tokens == new
    if report.mode == "in_place":
        assert (report.seams, report.kept, report.moved) == (plan.seams, plan.kept, plan.moved)
        assert is_edited_in_place(session.cache, session.core.memory.serials)
    assert counted == report.evaluated
    assert same(whole_state(original), before)
    if report.mode == "in_place":
        expected = edited(original.fork(), plan)
        torch.testing.assert_close(session.logits, expected.logits, atol=1e-4, rtol=1e-4)


@given(texts())
@settings(max_examples=examples(8))
def test_rereading_everything_is_a_fresh_evaluation(pair):
    """Up to rounding, as the steps differ; an engine keeps to its steps, and to the bit."""
    old, new = pair
    session, fresh = (MODEL.session(max_kv_size=1024, prefill_step=64) for _ in range(2))
    session.feed(old)
    fresh.feed(new)
    report = session.align(new, min_saved=0, reread=len(new), reread_share=1)
    assert (report.mode, report.moved) == ("exact", 0)
    assert session.tokens == fresh.tokens
    torch.testing.assert_close(session.logits, fresh.logits, atol=1e-4, rtol=1e-4)


@given(texts(), st.integers(0, 60), st.floats(0, 1))
@settings(max_examples=examples(25))
def test_seams_share_what_is_evaluated_again(pair, reread, share):
    old, new = pair
    without = plan_alignment(old, new, in_place(0, 0))
    plan = plan_alignment(old, new, in_place(reread, share))
    sinks = 4  # of a text whose beginning was removed
    limit = max(without.evaluated + reread, share * len(new)) + sinks
    assert plan.evaluated <= max(limit, without.evaluated + sinks)
    assert all(edit.reread <= max(reread, sinks) for edit in plan.edits)
    assert plan.evaluated <= plan_alignment(old, new, in_place(reread, 1)).evaluated


def test_larger_changes_have_more_evaluated_again_after_them():
    old = some_tokens(2000, 1)
    new = [*old[:100], *some_tokens(10, 2), *old[100:1000], *some_tokens(30, 3), *old[1000:]]
    plan = plan_alignment(old, new, in_place(64, 0.06))
    assert [edit.reread for edit in plan.edits] == [21, 60]
    plan = plan_alignment(old, new, in_place(64, 1))
    assert [edit.reread for edit in plan.edits] == [64, 64]
    plan = plan_alignment(old, new, in_place(64, 0))
    assert [edit.reread for edit in plan.edits] == [16, 48]


def edited(session: Session, plan: AlignmentPlan) -> Session:
    """Apply a plan by the edits of a session, each of which evaluates the last token anew."""
    session.feed([0])
    growth = 0
    for edit in plan.edits:
        start, end = edit.start + growth, edit.end + growth
        if start == end:
            session.insert(start, edit.ids)
        elif edit.ids:
            session.replace(start, end, edit.ids)
        else:
            session.delete(start, end)
        growth += edit.growth
    session.take_back(len(session.tokens) - plan.tail.start - growth)
    session.feed(plan.tail.ids)
    return session


@pytest.mark.parametrize("reread", [0, 16])
def test_local_layers_are_aligned_as_by_edits(reread):
    old = some_tokens(300, 1)
    new = [*old[:90], *old[100:200], *some_tokens(30, 2), *old[200:280], *some_tokens(9, 3)]
    session = LOCAL_MODEL.session(prefill_step=64)
    session.feed(old)
    plan = plan_alignment(old, new, in_place(reread, 1), refill=16)
    expected = edited(session.fork(), plan)
    counted, report = counted_tokens(
        LOCAL_MODEL, lambda: session.align(new, min_saved=0, reread=reread, reread_share=1)
    )
    assert (session.tokens == new, report.seams) == (True, 2)
    assert report.evaluated <= counted <= report.evaluated + plan.refilled
    torch.testing.assert_close(session.logits, expected.logits, atol=1e-4, rtol=1e-4)


def test_a_text_that_saves_too_little_is_evaluated_exactly():
    old = some_tokens(300, 1)
    new = [*old[:50], *old[60:], 7]
    session, fresh = (MODEL.session(prefill_step=64) for _ in range(2))
    session.feed(old)
    fresh.feed(new)
    report = session.align(new)
    assert (report.mode, report.seams, report.moved) == ("exact", 0, 0)
    assert report.reason == "it would save 224 tokens; 256 or more must be saved"
    assert session.tokens == new
    assert not is_edited_in_place(session.cache, session.core.memory.serials)
    torch.testing.assert_close(session.logits, fresh.logits, atol=1e-4, rtol=1e-4)
    assert session.align(new, mode="exact").evaluated <= 2


def test_names_follow_the_text():
    old = some_tokens(200, 1)
    session = MODEL.session()
    with session.span("system"):
        session.feed(old[:100])
    with session.span("question"):
        session.feed(old[100:])
    session.align([*old[:10], 1, 2, 3, *old[20:180], 5], min_saved=0)
    assert session.span_ranges == {"system": (0, 93), "question": (93, 174)}


def test_interrupted_or_failed_alignment_changes_nothing():
    old = some_tokens(300, 1)
    new = [*old[:50], *some_tokens(200, 2), *old[60:], *some_tokens(200, 3)]
    session = MODEL.session(prefill_step=64)
    session.feed(old)
    before = whole_state(session)
    for step in (1, 3, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.nn.functional.embedding", interrupting(step))
            with pytest.raises(KeyboardInterrupt):
                session.align(new, min_saved=0)
        assert same(whole_state(session), before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODEL.decoder, "logits", lambda hidden: fail())
        with pytest.raises(NonFiniteLogits):
            session.align(new, min_saved=0)
    assert same(whole_state(session), before)


def fail() -> None:
    raise NonFiniteLogits("the logits are not finite")


def test_sessions_that_cannot_be_aligned_are_refused_by_name():
    old, new = some_tokens(300, 1), [*some_tokens(300, 1)[20:], 1]
    state_model = small_model(spec=next(iter(state_specs().values())))
    hybrid, compressed = state_model.session(), MODEL.session(policy="full")
    evicted, grouped = MODEL.session(200), MODEL.session(512, policy="self_extend", window=64)
    cases = {hybrid: "states", compressed: "compressed", evicted: "evicted", grouped: "grouped"}
    for session, reason in cases.items():
        session.feed(old)
        if session is compressed:
            session.compress(2, "knorm")
        before = whole_state(session)
        with pytest.raises(InvalidArgument, match=f"{reason}.*exact"):
            session.align(new, min_saved=0)
        assert same(whole_state(session), before)
    fresh = MODEL.session(200)
    fresh.feed(new)
    report = evicted.align(new, mode="exact")  # "exact" is what the errors say to use
    assert (report.kept, report.evaluated) == (0, len(new))
    assert same(evicted.logits, fresh.logits)
    for session in (hybrid, compressed, grouped):
        assert session.align(new, mode="exact").mode == "exact"
        assert list(session.tokens) == new
    session = MODEL.session(300, policy="full")
    session.feed(old[:200])
    with pytest.raises(ContextFull, match="holds 300 tokens"):
        session.align([*old, *old], min_saved=0)
    with pytest.raises(InvalidArgument, match='"exact" or "in_place"'):
        session.align(old, mode="other")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="empty"):
        session.align([])


def test_small_changes_leave_most_predictions_of_a_real_model(smollm2):
    """A header line that changed, of 900 tokens: the next token is seldom another."""
    text = smollm2.text.encode(topic_text()[:4_000])
    old = [*text[:40], *smollm2.text.encode(" version 1.2, Monday"), *text[40:]]
    new = [*text[:40], *smollm2.text.encode(" version 1.3, Tuesday, late"), *text[40:]]
    session, fresh = smollm2.session(), smollm2.session()
    session.feed(old)
    report = session.align(new)
    fresh.feed(new)
    assert (report.mode, report.seams) == ("in_place", 1)
    assert report.evaluated < 0.05 * len(new)
    divergence = torch.nn.functional.kl_div(
        session.logits.log_softmax(-1),
        fresh.logits.log_softmax(-1),
        log_target=True,
        reduction="sum",
    )
    assert divergence < 0.5
