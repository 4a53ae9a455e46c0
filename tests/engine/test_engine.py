"""Answers of the default model, as users run it: the same to the bit, whoever else is served."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from topics import topic_ids

from kvkeep import engine as engine_package
from kvkeep.engine import (
    Engine,
    Finished,
    GeneratedToken,
    Generation,
    GenerationRequest,
    Limits,
    PrefillProgress,
)
from kvkeep.engine.record import prefill_step_at
from kvkeep.errors import Cancelled, InvalidArgument, NonFiniteLogits
from kvkeep.model import Model
from kvkeep.session.sampling import Sampling

WRITTEN = 24
DRAWN = Sampling(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture
def engine(smollm2: Model) -> Iterator[Engine]:
    with Engine(smollm2, settings={"max_kv_size": 600}) as made:
        yield made


def prompts(model: Model, count: int, length: int = 300) -> list[tuple[int, ...]]:
    ids = topic_ids(model)
    return [tuple(ids[at * 97 : at * 97 + length + 31 * at]) for at in range(count)]


def ask(
    prompt: tuple[int, ...], sampling: Sampling = DRAWN, count: int = WRITTEN
) -> GenerationRequest:
    return GenerationRequest(prompt, count, sampling, ignore_eos=True, logprobs=0)


def told(answer: Generation) -> list[tuple[int, float]]:
    """Each token with the log of its probability, which tells any other bit of its logits."""
    found = [event for event in answer if isinstance(event, GeneratedToken)]
    return [(each.token, each.logprob.logprob) for each in found if each.logprob]


def alone(
    model: Model, prompt: tuple[int, ...], sampling: Sampling = DRAWN
) -> list[tuple[int, float]]:
    """In an engine that has nothing else to do."""
    with Engine(model, settings={"max_kv_size": 600}) as other:
        return told(other.generate(ask(prompt, sampling)))


def test_an_answer_is_what_a_session_gives(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1, 500)
    session = smollm2.session(600, prefill_step=128)
    session.feed(prompt)
    expected = [session.next_token(DRAWN) for _ in range(WRITTEN)]
    assert [token for token, _ in told(engine.generate(ask(prompt)))] == expected


def test_in_company_an_answer_is_the_same_to_the_bit(engine: Engine, smollm2: Model) -> None:
    """Some begin when others write already, some go past the budget, and one is cancelled."""
    all_prompts = prompts(smollm2, 6)
    answers = [engine.generate(ask(prompt)) for prompt in all_prompts[:3]]
    gone = engine.generate(ask(all_prompts[5], count=500))
    answers += [engine.generate(ask(prompt)) for prompt in all_prompts[3:]]
    gone.cancel()
    assert [told(each) for each in answers] == [alone(smollm2, p) for p in all_prompts]


def test_what_is_reused_changes_no_bit(engine: Engine, smollm2: Model) -> None:
    """A prompt that was read before, its beginning, and one that goes another way."""
    ids = topic_ids(smollm2)
    first = tuple(ids[:550])
    told(engine.generate(ask(first)))
    other = first[:290] + tuple(ids[2000:2150])
    for prompt, reused in ((first, 512), (first[:400], 384), (other, 256)):
        answer = engine.generate(ask(prompt))
        assert told(answer) == alone(smollm2, prompt)
        assert answer.reuse.tokens == reused


def test_a_prompt_that_goes_on_where_another_was_read_to_is_read_as_if_alone(
    engine: Engine, smollm2: Model
) -> None:
    (prompt,) = prompts(smollm2, 1, 300)
    list(engine.generate(GenerationRequest(prompt[:50], 0)))
    assert told(engine.generate(ask(prompt))) == alone(smollm2, prompt)


def test_a_turn_goes_on_where_the_last_one_ended(engine: Engine, smollm2: Model) -> None:
    ids = topic_ids(smollm2)
    prompt, more = tuple(ids[:200]), tuple(ids[700:760])
    session = smollm2.session(600, prefill_step=128)
    session.feed(prompt)
    written = tuple(session.next_token(DRAWN) for _ in range(WRITTEN))
    session.feed(more)
    session.draw_anew()
    first = engine.generate(ask(prompt))
    assert tuple(token for token, _ in told(first)) == written
    second = engine.generate(ask(prompt + written + more))
    assert second.reuse.tokens == len(prompt) + WRITTEN
    assert [token for token, _ in told(second)] == [
        session.next_token(DRAWN) for _ in range(WRITTEN)
    ]


def test_moved_to_disk_and_back_a_session_goes_on_to_the_bit(
    smollm2: Model, tmp_path: Path
) -> None:
    """Room for one and a half of them: each has to go for the other."""
    cell = smollm2.session(600).cache.layout.cell_bytes
    limits = Limits(memory=int(1.8 * 600 * cell))
    settings = {"max_kv_size": 600, "prefill_step": 128}
    texts = prompts(smollm2, 2, 500)
    whole = []
    for prompt in texts:
        session = smollm2.session(**settings)
        session.feed(prompt)
        whole.append([session.next_token(DRAWN) for _ in range(3 * WRITTEN)])
    with Engine(smollm2, settings=settings, limits=limits, folder=tmp_path) as engine:
        found: list[list[int]] = [[], []]
        for name, prompt in zip("ab", texts, strict=True):
            engine.create(name=name).result()
            told(engine.generate(GenerationRequest(prompt, 0), session=name))
        for _ in range(3):
            for name, other, tokens in zip("ab", "ba", found, strict=True):
                tokens += [t for t, _ in told(engine.generate(ask(()), session=name))]
                kept = {each.name: each for each in engine.sessions().result()}
                assert kept[name].session is not None
                assert kept[other].session is None
        assert found == whole


def test_several_answers_share_one_reading_of_the_prompt(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1, 500)
    ways = [Sampling(temperature=1.0, seed=seed) for seed in range(4)]
    answers = engine.submit_many(ask(prompt), ways).result()
    written = [told(answer) for answer in answers]
    assert written[0] == alone(smollm2, prompt, ways[0])
    assert len({tuple(each) for each in written}) == 4
    for again in range(2):
        more = engine.submit_many(ask(prompt), ways[again:]).result()
        assert [told(answer) for answer in more][1:] == written[again + 1 :]
        assert more[0].reuse.tokens == 384
        assert sum(answer.usage.prefill_seconds for answer in more[1:]) == 0


def test_one_that_fails_fails_alone(engine: Engine, smollm2: Model) -> None:
    """One by its cells, which are no numbers; one by a bias for a token that there is not."""
    one, two, three = prompts(smollm2, 3)
    broken = smollm2.session(600, prefill_step=128)
    broken.feed(two)
    with torch.inference_mode():
        for segment in broken.cache.segments:
            segment.block.slots.stored_keys.fill_(torch.nan)
    engine.create(name="broken", session=broken).result()
    good = engine.generate(ask(one))
    bad = engine.generate(ask((), count=5), session="broken")
    worse = engine.generate(ask(three, Sampling(logit_bias=((10**6, 1.0),))))
    with pytest.raises(NonFiniteLogits):
        list(bad)
    with pytest.raises(InvalidArgument, match="logit_bias"):
        list(worse)
    assert told(good) == alone(smollm2, one)


def test_cancelled_it_ends_after_the_current_token(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1)
    answer = engine.generate(ask(prompt, count=100_000))
    while not isinstance(next(answer), GeneratedToken):
        pass
    answer.cancel()
    with pytest.raises(Cancelled):
        list(answer)
    assert engine.totals().result().running == 0


def test_events_tell_how_far_it_is(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1, 500)
    events = list(engine.generate(ask(prompt, count=3)))
    read = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.done for event in read] == [0, 4, 128, 256, 384, 500]
    assert {event.total for event in read} == {500}
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.prompt, end.usage.generated) == ("length", 500, 3)
    text = "".join(event.text for event in events if isinstance(event, GeneratedToken)) + end.text
    tokens = [event.token for event in events if isinstance(event, GeneratedToken)]
    assert text == smollm2.text.decode([*prompt, *tokens])[len(smollm2.text.decode(prompt)) :]


def test_a_change_that_takes_long_lets_others_write(engine: Engine, smollm2: Model) -> None:
    ids = topic_ids(smollm2)
    engine.create(name="long", policy="full", max_kv_size=2048).result()
    list(engine.generate(GenerationRequest(tuple(ids[:1500]), 0), session="long"))
    answer = engine.generate(ask(tuple(ids[3000:3100]), count=400))
    while not isinstance(next(answer), GeneratedToken):
        pass
    before = len(answer.generated)
    during = engine.change(
        "long",
        "0",
        "compress",
        lambda session: (
            session.compress(4, "kvzip", progress=engine.yield_turn),
            len(answer.generated),
        ),
    ).result()
    assert during[0].cells_after < 500
    assert during[1] > before
    answer.cancel()


def test_deep_in_a_long_prompt_steps_are_shorter_and_what_is_reused_the_same(
    smollm2: Model,
) -> None:
    """So that those who write meanwhile do not wait for longer than at its beginning."""
    ids = topic_ids(smollm2)
    long, other = tuple(ids[:1900]), tuple(ids[:1700]) + tuple(ids[5000:5100])
    with Engine(smollm2, settings={"max_kv_size": 2048}) as engine:
        answer = engine.generate(ask(long))
        done = [event.done for event in answer if isinstance(event, PrefillProgress)]
        assert done == [0, 4, *range(128, 1537, 128), *range(1600, 1900, 64), 1900]
        again = engine.generate(ask(other))
        found = told(again)
        assert again.reuse.tokens == 1664
    with Engine(smollm2, settings={"max_kv_size": 2048}) as engine:
        assert told(engine.generate(ask(other))) == found


def test_what_a_prefix_store_gives_changes_no_bit(smollm2: Model, tmp_path: Path) -> None:
    (prompt,) = prompts(smollm2, 1, 590)
    cold = alone(smollm2, prompt)
    for reused in (0, 512):
        with Engine(smollm2, settings={"max_kv_size": 600}, stores=tmp_path) as engine:
            answer = engine.generate(ask(prompt))
            assert told(answer) == cold
            assert (answer.reuse.tokens, answer.reuse.source) == (reused, "store" if reused else "")


@pytest.mark.parametrize("taken", ["rewind", "fork"])
def test_of_what_was_taken_back_no_more_is_reused_than_was_read(
    engine: Engine, smollm2: Model, taken: str
) -> None:
    """What is written in the place of it has other cells than the same text that is read."""
    (prompt,) = prompts(smollm2, 1, 500)
    engine.create(name="a").result()
    list(engine.generate(GenerationRequest(prompt, 0), session="a"))
    name = "a"
    if taken == "rewind":
        engine.change("a", "0", "rewind", lambda session: session.rewind(244)).result()
    else:
        name = engine.fork("a", at=256).result().name
    written = [token for token, _ in told(engine.generate(ask((), count=200), session=name))]
    if taken == "fork":
        engine.delete("a").result()
    again = prompt[:256] + tuple(written) + prompt[:20]
    answer = engine.generate(ask(again[:440]))
    assert answer.reuse.tokens == 128
    assert told(answer) == alone(smollm2, again[:440])


def test_long_steps_stay_long_and_short_ones_halve_deep_in_a_prompt() -> None:
    assert [prefill_step_at(128, at) for at in (0, 1535, 1536, 9999)] == [128, 128, 64, 64]
    assert [prefill_step_at(512, at) for at in (0, 1536, 99_999)] == [512, 512, 512]
    assert prefill_step_at(1, 5000) == 1


def test_the_former_names_of_requests_and_events_are_deprecated_aliases() -> None:
    renamed = {"Ask": GenerationRequest, "Answer": Generation, "Written": GeneratedToken}
    for old, new in renamed.items():
        with pytest.warns(DeprecationWarning, match=f"{old} is now {new.__name__}"):
            assert getattr(engine_package, old) is new
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        _ = engine_package.Unknown  # type: ignore[attr-defined]
