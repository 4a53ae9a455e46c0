"""The poll API: feed, next_token, stream, rewind, keep."""

import pytest
import torch
from small_models import local_spec, small_model, state_specs

import kvkeep
from kvkeep import Sampling
from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits
from kvkeep.model import Model

MODEL = small_model()
LONG = [7 + n % 40 for n in range(90)]
TEXT = list(b"keys are written once; queries choose where they stand")


def test_feed_reports_what_it_did() -> None:
    session = MODEL.session(max_kv_size=16, keep=4, prefill_step=8)
    report = session.feed(TEXT)
    assert report.tokens == len(TEXT)
    assert report.seconds > 0
    assert report.peak_cells == 24
    assert session.tokens == TEXT
    assert session.cache.cells == 16
    assert session.logits.shape == (256,)
    assert session.logits.dtype == torch.float32


def test_text_is_fed_without_special_tokens(smollm2_fp32: Model) -> None:
    session = smollm2_fp32.session()
    assert session.logits is None
    session.feed("Hello")
    assert session.tokens == smollm2_fp32.text.encode("Hello")
    assert session.text() == "Hello"


def test_feeding_in_parts_equals_feeding_at_once() -> None:
    once, parts = MODEL.session(max_kv_size=16), MODEL.session(max_kv_size=16)
    once.feed(TEXT)
    for part in (TEXT[:5], TEXT[5:30], TEXT[30:]):
        parts.feed(part)
    assert (once.logits - parts.logits).abs().max() <= 1e-4


def test_changing_the_logits_handed_out_does_not_change_the_session() -> None:
    session = MODEL.session()
    session.feed(TEXT)
    first = int(session.logits.argmax())
    session.logits[first] = -torch.inf
    assert session.next_token() == first


def test_next_token_is_appended_and_evaluated() -> None:
    session, fed = MODEL.session(max_kv_size=16), MODEL.session(max_kv_size=16)
    session.feed(TEXT)
    fed.feed(TEXT)
    for _ in range(20):
        expected = int(fed.logits.argmax())
        assert session.next_token() == expected
        fed.feed([expected])
    assert session.tokens == fed.tokens
    assert torch.equal(session.logits, fed.logits)


def test_asking_before_feeding_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="feed a prompt"):
        MODEL.session().next_token()


def test_full_stops_at_the_trained_length_before_anything_changes() -> None:
    model = small_model(max_positions=64)
    session = model.session(policy="full")
    session.feed(TEXT)
    room, before = 64 - len(TEXT), session.logits
    with pytest.raises(ContextFull, match="sliding"):
        session.feed([1] * (room + 1))
    assert session.tokens == TEXT
    assert torch.equal(session.logits, before)
    session.feed([1] * room)
    with pytest.raises(ContextFull, match="sliding"):
        session.next_token(Sampling(temperature=1, seed=3))
    assert len(session.tokens) == 64


def test_a_refused_draw_leaves_the_random_generator_alone() -> None:
    model, how = small_model(max_positions=64), Sampling(temperature=1.5, seed=3)
    refused, other = model.session(policy="full"), model.session(policy="full")
    for session in (refused, other):
        session.feed([1] * 63)
        session.next_token(how)
    with pytest.raises(ContextFull):
        refused.next_token(how)
    for session in (refused, other):
        session.rewind(5)
    assert refused.next_token(how) == other.next_token(how)


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_rewind_returns_to_the_logits_that_were(policy: str) -> None:
    session = MODEL.session(max_kv_size=128, policy=policy)
    session.feed(TEXT)
    before = session.logits
    session.feed([5, 6, 7])
    assert session.rewind(3) == [5, 6, 7]
    assert session.tokens == TEXT
    assert session.cache.cells == len(TEXT)
    assert (session.logits - before).abs().max() <= 1e-4


def test_rewinding_everything_leaves_an_empty_session() -> None:
    session, fresh = MODEL.session(max_kv_size=128), MODEL.session(max_kv_size=128)
    session.feed(TEXT)
    assert session.rewind(len(TEXT)) == TEXT
    assert session.logits is None
    assert session.cache.cells == 0
    for each in (session, fresh):
        each.feed(TEXT)
    assert torch.equal(session.logits, fresh.logits)


@pytest.mark.parametrize("policy", ["sliding", "shift", "archive"])
def test_all_can_be_taken_back_whatever_was_forgotten(policy: str) -> None:
    """And the session goes on to the bit as one that has just begun."""
    session, fresh = (MODEL.session(64, policy=policy) for _ in range(2))
    session.feed(LONG)
    session.pin(len(LONG) - 3, len(LONG))
    session.name("end", len(LONG) - 2, len(LONG))
    fork = session.fork()
    assert session.rewind(len(LONG)) == LONG
    assert (session.tokens, session.logits, session.cache.cells) == ([], None, 0)
    assert session.spans == {}
    session.feed(LONG[3:9])
    fresh.feed(LONG[3:9])
    assert torch.equal(session.logits, fresh.logits)
    assert session.cache.cells == fresh.cache.cells
    assert fork.tokens == LONG
    assert fork.next_token() == fork.tokens[-1]


def test_taking_back_no_tokens_changes_nothing() -> None:
    session = MODEL.session(64)
    session.feed(LONG)  # of which the first are evicted
    logits = session.logits
    session.take_back(0)
    assert session.tokens == LONG
    assert torch.equal(session.logits, logits)
    session.next_token()


def test_rewind_within_the_ring_shortens_the_window_until_it_fills_again() -> None:
    session = MODEL.session(max_kv_size=16, keep=4)
    session.feed(TEXT)
    assert session.rewind(3) == TEXT[-3:]
    assert session.cache.cells == 13
    session.feed(TEXT[-3:])
    assert session.cache.cells == 16
    with pytest.raises(InvalidArgument, match="rewind takes 0 to 11"):
        session.rewind(12)
    assert session.tokens == TEXT
    assert session.rewind(11) == TEXT[-11:]
    assert session.cache.cells == 5


def test_a_rewind_beyond_the_text_names_its_length() -> None:
    session = MODEL.session(max_kv_size=100, keep=4)
    session.feed(TEXT)
    expected = f"^rewind takes 0 to {len(TEXT)} tokens; found {len(TEXT) + 1}$"
    with pytest.raises(InvalidArgument, match=expected):
        session.rewind(len(TEXT) + 1)


def test_a_larger_keep_pins_the_oldest_cells_still_held() -> None:
    session = MODEL.session(max_kv_size=24, keep=4)
    session.feed(TEXT)
    pinned = {0, 1, 2, 3, *range(len(TEXT) - 20, len(TEXT) - 14)}
    session.keep = 10
    assert session.keep == 10
    assert session.cache.cells == 24
    session.feed(TEXT)
    now = held(session)
    assert pinned < now
    assert now - pinned == set(range(2 * len(TEXT) - 14, 2 * len(TEXT)))


def test_a_smaller_keep_lets_the_newest_anchors_go() -> None:
    session = MODEL.session(max_kv_size=24, keep=10)
    session.feed(TEXT)
    session.keep = 2
    assert held(session) == {*range(10), *range(len(TEXT) - 14, len(TEXT))}
    session.feed(TEXT[:8])
    assert held(session) == {0, 1, *range(len(TEXT) - 14, len(TEXT) + 8)}
    session.rewind(8)
    session.keep = 0
    session.feed(TEXT)
    assert held(session) == set(range(2 * len(TEXT) - 24, 2 * len(TEXT)))


def test_anchors_let_go_before_anything_was_forgotten_return_to_the_window() -> None:
    session, other = MODEL.session(max_kv_size=24, keep=10), MODEL.session(max_kv_size=24, keep=2)
    for each in (session, other):
        each.feed(TEXT[:20])
    session.keep = 2
    for each in (session, other):
        each.feed(TEXT[20:])
    assert held(session) == held(other)
    assert (session.logits - other.logits).abs().max() <= 1e-4


def test_keep_minus_one_keeps_the_whole_first_prompt() -> None:
    session = MODEL.session(max_kv_size=32, keep=-1)
    assert session.keep == -1
    session.feed(TEXT[:12])
    assert session.keep == 12
    session.feed(TEXT * 2)
    assert set(range(12)) < held(session)
    with pytest.raises(InvalidArgument, match="keep"):
        MODEL.session(max_kv_size=32, keep=-1).feed(TEXT)


def held(session: kvkeep.Session) -> set[int]:
    """The indices of the tokens that are still remembered."""
    return {session.core.memory.serials.index(serial) for serial in session.cache.serials()}


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_kv_size": 0},
        {"max_kv_size": -1},
        {"max_kv_size": 4096 + 1},
        {"max_kv_size": 4, "keep": 4},
        {"keep": -2},
        {"prefill_step": 0},
        {"policy": "wishful"},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidArgument, match="found"):
        MODEL.session(**wrong)


def test_broken_weights_are_told_and_change_nothing() -> None:
    model = small_model()
    session = model.session()
    session.feed(TEXT)
    before = session.logits
    broken = model.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
    sound = broken.clone()
    broken[3, 3] = torch.nan
    with pytest.raises(NonFiniteLogits, match="NaN"):
        session.feed([1, 2])
    with pytest.raises(NonFiniteLogits, match="NaN"):
        session.next_token()
    broken.copy_(sound)
    assert session.tokens == TEXT
    assert torch.equal(session.logits, before)
    session.feed([1, 2])


def test_stream_yields_the_text_of_the_tokens(smollm2: Model) -> None:
    session = smollm2.session(max_kv_size=64)
    session.feed("The capital of France is")
    start = len(session.tokens)
    pieces = list(session.stream(max_tokens=40, ignore_eos=True))
    assert session.finish_reason == "length"
    assert len(session.tokens) == start + 40
    assert "Paris" in "".join(pieces)
    decoded = smollm2.text.decode(session.tokens[start:], skip_special=True)
    assert "".join(pieces) == decoded


def test_stream_ends_at_end_of_text_and_before_a_stop_string(smollm2: Model) -> None:
    prompt = smollm2.text.chat([{"role": "user", "content": "Say hello."}])
    session = smollm2.session()
    session.feed(prompt)
    answer = "".join(session.stream(max_tokens=200))
    assert session.finish_reason == "eos"
    assert session.tokens[-1] in smollm2.spec.eos_token_ids
    assert "<|im_end|>" not in answer

    word = answer.split()[2]
    again = smollm2.session()
    again.feed(prompt)
    cut = "".join(again.stream(max_tokens=200, sampling=Sampling(stop=(word,))))
    assert again.finish_reason == "stop"
    assert cut == answer[: answer.index(word)]


def test_score_gives_each_token_the_probability_that_the_logits_gave_it() -> None:
    session, scored = MODEL.session(max_kv_size=16), MODEL.session(max_kv_size=16, prefill_step=7)
    scores = scored.score(TEXT)
    assert scores[0].isnan()
    for token, score in zip(TEXT, scores, strict=True):
        if session.logits is not None:
            assert session.logits.double().log_softmax(-1)[token] == pytest.approx(
                float(score), abs=1e-4
            )
        session.feed([token])
    assert torch.allclose(session.logits, scored.logits, atol=1e-4)


def test_former_names_are_deprecated_aliases() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    session, scored = (MODEL.session(max_kv_size=64) for _ in range(2))
    with pytest.warns(DeprecationWarning, match="use token_by_token"):
        scores = session.score(TEXT, written=True)
    assert torch.equal(scores[1:], scored.score(TEXT, token_by_token=True)[1:])
    start = session.fork()
    drawn = [session.next_token(sampling) for _ in range(4)]
    session.rewind(4)
    with pytest.warns(DeprecationWarning, match="use Session.reset_sampler"):
        session.draw_anew()
    start.reset_sampler()
    again = [[each.next_token(sampling) for _ in range(4)] for each in (session, start)]
    assert again == [drawn, drawn]
    with pytest.warns(DeprecationWarning, match="use Session.keep_checkpoint_at"):
        session.branch_at(3)


def test_a_step_is_not_taken_in_if_what_is_asked_of_one_of_its_rows_overflows() -> None:
    model = small_model()
    asked = [1, 2]
    probe = model.session()
    probe.feed(TEXT)
    others = [probe.core.memory.hidden[0]]
    for token in asked:
        probe.feed([token])
        others.append(probe.core.memory.hidden[0])
    first = others.pop(1)
    # A token that is in no prompt, whose logit is beyond float32 after the first row alone.
    apart = first.abs() / torch.stack(others).abs().amax(0)
    where = int(torch.where(first.abs() > 1.2, apart, 0).argmax())
    assert apart[where] > 1.2
    loud = torch.zeros_like(first)
    loud[where] = 1.1 * torch.finfo(torch.float32).max / float(first[where])
    model.decoder.tensors["model.embed_tokens.weight"][200] = loud
    session = model.session()
    session.feed(TEXT)
    before = session.logits
    with pytest.raises(NonFiniteLogits, match="rolled back"):
        session.score(asked)
    assert session.tokens == TEXT
    assert torch.equal(session.logits, before)


@pytest.mark.parametrize("spec", [None, local_spec(), state_specs()["delta_net"]])
def test_scores_after_removed_tokens_are_those_of_a_session_that_never_had_them(spec) -> None:
    """`take_back` and `beginning` leave no hidden state of the last token, and change no other."""
    model, tokens = small_model(spec=spec), LONG[:60]
    fresh, plain = model.session(), model.session()
    for session in (fresh, plain):
        session.feed(tokens[:40])
    scores = fresh.score(tokens[40:])
    assert not scores.isnan().any()
    longer = model.session()
    longer.feed(tokens[:40])
    longer.feed(tokens[40:50])
    beginning = longer.beginning(40)
    longer.take_back(10)
    for session in (longer, beginning):
        unscored = session.fork()
        unscored.feed(tokens[40:])
        torch.testing.assert_close(session.score(tokens[40:]), scores, atol=1e-4, rtol=1e-4)
        assert torch.equal(session.logits, unscored.logits)
        again = session.beginning(40)
        steps = list(again.feeding(tokens[40:], top_logprobs=2))
        torch.testing.assert_close(steps[0].scores.logprobs, scores, atol=1e-4, rtol=1e-4)
