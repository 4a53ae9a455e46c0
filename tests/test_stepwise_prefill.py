"""A prompt that is read step by step: each step is whole, and it comes to what feed gives."""

import pytest
import torch
from interrupts import interrupted_from, lines_of
from session_state import differences, whole_state
from small_models import small_model

from kvkeep import Feeding, FeedStep, PrefixStore, Session
from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits

MODEL = small_model()
TEXT = [1 + i * 7 % 250 for i in range(700)]


def session(**options) -> Session:
    return MODEL.session(**{"max_kv_size": 48, "prefill_step": 16, **options})


def test_stepwise_prefill_equals_feed() -> None:
    one, other = session(), session()
    feeding = one.feeding(TEXT[:100])
    steps = list(feeding)
    report = other.feed(TEXT[:100])
    assert list(differences(whole_state(one), whole_state(other))) == []
    assert [(step.tokens, step.done) for step in steps[:2]] == [(4, 4), (12, 16)]
    assert steps[-1] == FeedStep(100 - steps[-2].done, 100, 100)
    assert sum(step.tokens for step in steps) == feeding.done == feeding.total == 100
    assert (feeding.report.tokens, feeding.report.peak_cells) == (100, report.peak_cells)


def test_the_session_is_usable_between_two_steps() -> None:
    one = session()
    for step in one.feeding(TEXT[:100]):
        assert one.tokens == TEXT[: step.done]
        alone = session()
        alone.feed(TEXT[: step.done])
        if step.done == step.total:
            assert torch.equal(one.logits, alone.logits)
        assert one.fork().next_token() == alone.next_token()


def test_closing_early_keeps_the_steps_already_evaluated() -> None:
    one, other = session(), session()
    feeding = one.feeding(TEXT[:100])
    done = next(feeding).done + next(feeding).tokens
    feeding.close()
    assert list(feeding) == []
    assert feeding.report.tokens == done
    other.feed(TEXT[:done])
    assert one.tokens == other.tokens
    assert one.next_token() == other.next_token()


def test_sessions_can_prefill_alternately() -> None:
    several, alone = [session() for _ in "abc"], [session() for _ in "abc"]
    feedings = [one.feeding(TEXT[i : i + 80]) for i, one in enumerate(several)]
    while {next(feeding, None) for feeding in feedings} != {None}:
        pass
    for i, (one, other) in enumerate(zip(several, alone, strict=True)):
        other.feed(TEXT[i : i + 80])
        assert torch.equal(one.logits, other.logits)


def test_a_prompt_that_feed_refuses_is_refused_before_the_first_step() -> None:
    one = session(policy="full")
    before = whole_state(one)
    for prompt, error in (
        ([], InvalidArgument),
        ([256], InvalidArgument),
        (TEXT[:49], ContextFull),
    ):
        with pytest.raises(error):
            one.feeding(prompt)
    assert list(differences(whole_state(one), before)) == []


def test_a_failed_step_can_be_retried() -> None:
    one, other = session(), session()
    feeding = one.feeding(TEXT[:60])
    first = next(feeding).done
    weight = MODEL.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
    sound = weight.clone()
    weight[0, 0] = torch.nan
    try:
        with pytest.raises(NonFiniteLogits):
            next(feeding)
    finally:
        weight.copy_(sound)
    assert feeding.done == first == len(one.tokens)
    for _ in feeding:
        pass
    other.feed(TEXT[:60])
    assert torch.equal(one.logits, other.logits)


def read_on(feeding: Feeding) -> None:
    """Reads what is left."""
    while feeding.done < feeding.total:
        next(feeding)


def test_interrupted_at_any_line_each_token_is_evaluated_once() -> None:
    expected = session()
    expected.feed(TEXT[:60])
    total = lines_of(lambda: read_on(session().feeding(TEXT[:60])))
    for line in range(0, total, total // 20):
        one = session()
        feeding = one.feeding(TEXT[:60])
        interrupted_from(line, lambda feeding=feeding: read_on(feeding))
        assert one.tokens == TEXT[: feeding.done]
        read_on(feeding)
        assert list(differences(whole_state(one), whole_state(expected))) == []


def test_a_prefix_store_supplies_the_first_step_and_receives_the_rest(tmp_path) -> None:
    store = PrefixStore(tmp_path)
    wide = {"max_kv_size": 1024, "prefill_step": 128}
    first = session(**wide, store=store).feeding(TEXT[:600])
    assert not any(step.reused for step in first)
    second = session(**wide, store=store)
    feeding = second.feeding(TEXT[:600])
    steps = list(feeding)
    assert steps[0] == FeedStep(512, 512, 600, reused=True)
    assert [step.reused for step in steps[1:]] == [False]
    assert (feeding.report.reused, feeding.report.tokens) == (512, 600)
    plain = session(**wide)
    plain.feed(TEXT[:600])
    assert (second.logits - plain.logits).abs().max() < 1e-4


def test_a_session_changed_between_steps_stores_no_prefix(tmp_path) -> None:
    store = PrefixStore(tmp_path)
    one = session(max_kv_size=1024, prefill_step=200, store=store)
    feeding = one.feeding(TEXT[:600])
    while one.tokens != TEXT[:200]:
        next(feeding)
    one.delete(50, 60)
    for _ in feeding:
        pass
    assert one.tokens == TEXT[:50] + TEXT[60:600]
    assert store.find(MODEL.fingerprint, one.tokens[:512]).token_count == 0
    assert store.find(MODEL.fingerprint, TEXT[:512]).token_count == 0


def test_the_first_token_after_a_long_prompt_moves_no_cells() -> None:
    one = MODEL.session(policy="full", max_kv_size=2048)
    one.feed(TEXT)
    where = one.cache.segments[0].block.slots.keys.data_ptr()
    one.next_token()
    assert one.cache.segments[0].block.slots.keys.data_ptr() == where
