"""Generations of the default model: the same to the bit, whatever else is served."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import small_model
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
from kvkeep.engine.steps import prefill_step_at
from kvkeep.errors import Cancelled, InvalidArgument, NonFiniteLogits
from kvkeep.model import Model
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session

COUNT = 24
DRAWN = Sampling(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture
def engine(smollm2: Model) -> Iterator[Engine]:
    with Engine(smollm2, settings={"max_kv_size": 600}) as started:
        yield started


def prompts(model: Model, count: int, length: int = 300) -> list[tuple[int, ...]]:
    ids = topic_ids(model)
    return [tuple(ids[at * 97 : at * 97 + length + 31 * at]) for at in range(count)]


def new_request(
    prompt: tuple[int, ...], sampling: Sampling = DRAWN, count: int = COUNT
) -> GenerationRequest:
    return GenerationRequest(prompt, count, sampling, ignore_eos=True, logprobs=0)


def token_logprobs(generation: Generation) -> list[tuple[int, float]]:
    """Each token with its logprob, which differs if any bit of the logits does."""
    found = [event for event in generation if isinstance(event, GeneratedToken)]
    return [(each.token, each.logprob.logprob) for each in found if each.logprob]


def alone(
    model: Model, prompt: tuple[int, ...], sampling: Sampling = DRAWN
) -> list[tuple[int, float]]:
    """The result in an engine that serves nothing else."""
    with Engine(model, settings={"max_kv_size": 600}) as other:
        return token_logprobs(other.generate(new_request(prompt, sampling)))


def test_a_generation_equals_a_session_used_directly(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1, 200)
    session = smollm2.session(600, prefill_step=128)
    session.feed(prompt)
    expected = [session.next_token(DRAWN) for _ in range(COUNT)]
    assert [token for token, _ in token_logprobs(engine.generate(new_request(prompt)))] == expected


def test_concurrent_generations_do_not_change_each_other(engine: Engine, smollm2: Model) -> None:
    """Some begin while others decode, some exceed the budget, and one is cancelled."""
    all_prompts = prompts(smollm2, 6, 100)
    generations = [engine.generate(new_request(prompt)) for prompt in all_prompts[:3]]
    gone = engine.generate(new_request(all_prompts[5], count=500))
    generations += [engine.generate(new_request(prompt)) for prompt in all_prompts[3:]]
    gone.cancel()
    assert [token_logprobs(each) for each in generations] == [
        alone(smollm2, p) for p in all_prompts
    ]


def test_prefix_reuse_changes_no_bit(engine: Engine, smollm2: Model) -> None:
    """A prompt that was prefilled before, its beginning, and one that continues differently."""
    ids = topic_ids(smollm2)
    first = tuple(ids[:420])
    token_logprobs(engine.generate(new_request(first)))
    other = first[:160] + tuple(ids[2000:2080])
    for prompt, reused in ((first, 384), (first[:280], 256), (other, 128)):
        generation = engine.generate(new_request(prompt))
        assert token_logprobs(generation) == alone(smollm2, prompt)
        assert generation.reuse.tokens == reused


def test_a_prompt_that_extends_a_prefilled_one_gives_the_same_bits(
    engine: Engine, smollm2: Model
) -> None:
    (prompt,) = prompts(smollm2, 1, 300)
    list(engine.generate(GenerationRequest(prompt[:50], 0)))
    assert token_logprobs(engine.generate(new_request(prompt))) == alone(smollm2, prompt)


def test_the_next_turn_continues_the_same_session(engine: Engine, smollm2: Model) -> None:
    ids = topic_ids(smollm2)
    prompt, more = tuple(ids[:200]), tuple(ids[700:760])
    session = smollm2.session(600, prefill_step=128)
    session.feed(prompt)
    written = tuple(session.next_token(DRAWN) for _ in range(COUNT))
    session.feed(more)
    session.reset_sampler()
    first = engine.generate(new_request(prompt))
    assert tuple(token for token, _ in token_logprobs(first)) == written
    second = engine.generate(new_request(prompt + written + more))
    assert second.reuse.tokens == len(prompt) + COUNT
    assert [token for token, _ in token_logprobs(second)] == [
        session.next_token(DRAWN) for _ in range(COUNT)
    ]


def test_an_evicted_session_continues_to_the_bit(smollm2: Model, tmp_path: Path) -> None:
    """There is room for less than two sessions: each is evicted for the other."""
    cell = smollm2.session(300).cache.layout.cell_bytes
    limits = Limits(memory=int(1.8 * 300 * cell))
    settings = {"max_kv_size": 300, "prefill_step": 128}
    texts = prompts(smollm2, 2, 240)
    expected = []
    for prompt in texts:
        session = smollm2.session(**settings)
        session.feed(prompt)
        expected.append([session.next_token(DRAWN) for _ in range(3 * COUNT)])
    with Engine(smollm2, settings=settings, limits=limits, folder=tmp_path) as engine:
        found: list[list[int]] = [[], []]
        for name, prompt in zip("ab", texts, strict=True):
            engine.create(name=name).result()
            token_logprobs(engine.generate(GenerationRequest(prompt, 0), session=name))
        for _ in range(3):
            for name, other, tokens in zip("ab", "ba", found, strict=True):
                tokens += [
                    t for t, _ in token_logprobs(engine.generate(new_request(()), session=name))
                ]
                kept = {each.name: each for each in engine.sessions().result()}
                assert kept[name].session is not None
                assert kept[other].session is None
        assert found == expected


def test_several_generations_share_one_prefill(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1, 300)
    ways = [Sampling(temperature=1.0, seed=seed) for seed in range(4)]
    generations = engine.submit_many(new_request(prompt), ways).result()
    written = [token_logprobs(generation) for generation in generations]
    assert written[0] == alone(smollm2, prompt, ways[0])
    assert len({tuple(each) for each in written}) == 4
    for again in range(2):
        more = engine.submit_many(new_request(prompt), ways[again:]).result()
        assert [token_logprobs(generation) for generation in more][1:] == written[again + 1 :]
        assert more[0].reuse.tokens == 256
        assert sum(generation.usage.prefill_seconds for generation in more[1:]) == 0


def test_a_failing_generation_fails_alone(engine: Engine, smollm2: Model) -> None:
    """One fails by NaN in its cells, one by its constraint."""

    class Failing:
        def masked(self, logits: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("nothing is allowed")

        def accept(self, token: int) -> None:
            raise NotImplementedError

    one, two, three = prompts(smollm2, 3, 100)
    broken = smollm2.session(600, prefill_step=128)
    broken.feed(two)
    with torch.inference_mode():
        for segment in broken.cache.segments:
            segment.block.slots.stored_keys.fill_(torch.nan)
    engine.create(name="broken", session=broken).result()
    good = engine.generate(new_request(one))
    bad = engine.generate(new_request((), count=5), session="broken")
    worse = engine.generate(new_request(three, Sampling(constraint=Failing())))
    with pytest.raises(NonFiniteLogits):
        list(bad)
    with pytest.raises(RuntimeError, match="nothing is allowed"):
        list(worse)
    with pytest.raises(InvalidArgument, match="logit_bias"):
        engine.generate(new_request(three, Sampling(logit_bias=((10**6, 1.0),))))
    assert token_logprobs(good) == alone(smollm2, one)


def test_a_cancelled_generation_ends_after_a_token(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1)
    generation = engine.generate(new_request(prompt, count=100_000))
    while not isinstance(next(generation), GeneratedToken):
        pass
    generation.cancel()
    with pytest.raises(Cancelled):
        list(generation)
    assert engine.totals().result().running == 0


def test_events_report_progress_tokens_and_the_end(engine: Engine, smollm2: Model) -> None:
    (prompt,) = prompts(smollm2, 1, 500)
    events = list(engine.generate(new_request(prompt, count=3)))
    read = [event for event in events if isinstance(event, PrefillProgress)]
    assert [event.done for event in read] == [0, 4, 128, 256, 384, 500]
    assert {event.total for event in read} == {500}
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.prompt, end.usage.generated) == ("length", 500, 3)
    text = "".join(event.text for event in events if isinstance(event, GeneratedToken)) + end.text
    tokens = [event.token for event in events if isinstance(event, GeneratedToken)]
    assert text == smollm2.text.decode([*prompt, *tokens])[len(smollm2.text.decode(prompt)) :]


def test_generations_continue_during_a_long_change(engine: Engine, smollm2: Model) -> None:
    ids = topic_ids(smollm2)
    engine.create(name="long", policy="full", max_kv_size=1024).result()
    list(engine.generate(GenerationRequest(tuple(ids[:700]), 0), session="long"))
    generation = engine.generate(new_request(tuple(ids[3000:3100]), count=400))
    while not isinstance(next(generation), GeneratedToken):
        pass
    before = len(generation.generated)
    during = engine.change(
        "long",
        "0",
        "compress",
        lambda session: (
            session.compress(4, "kvzip", progress=engine.yield_turn),
            len(generation.generated),
        ),
    ).result()
    assert during[0].cells_after < 250
    assert during[1] > before
    generation.cancel()


@pytest.mark.parametrize("which", ["small", pytest.param("default", marks=pytest.mark.slow)])
def test_deep_in_a_prompt_steps_are_halved_and_reuse_is_exact(
    request: pytest.FixtureRequest, which: str
) -> None:
    """Generations that decode meanwhile wait no longer than at the beginning of the prompt."""
    if which == "small":
        model, ids = small_model(), [at * at % 250 + 1 for at in range(5100)]
    else:
        model = request.getfixturevalue("smollm2")
        ids = topic_ids(model)
    long, other = tuple(ids[:1900]), tuple(ids[:1700]) + tuple(ids[5000:5100])
    with Engine(model, settings={"max_kv_size": 2048}) as engine:
        generation = engine.generate(new_request(long))
        done = [event.done for event in generation if isinstance(event, PrefillProgress)]
        assert done == [0, 4, *range(128, 1537, 128), *range(1600, 1900, 64), 1900]
        again = engine.generate(new_request(other))
        found = token_logprobs(again)
        assert again.reuse.tokens == 1664
    with Engine(model, settings={"max_kv_size": 2048}) as engine:
        assert token_logprobs(engine.generate(new_request(other))) == found


def test_a_prefix_store_hit_changes_no_bit(smollm2: Model, tmp_path: Path) -> None:
    (prompt,) = prompts(smollm2, 1, 330)
    cold = alone(smollm2, prompt)
    for reused in (0, 256):
        with Engine(smollm2, settings={"max_kv_size": 600}, stores=tmp_path) as engine:
            generation = engine.generate(new_request(prompt))
            assert token_logprobs(generation) == cold
            assert (generation.reuse.tokens, generation.reuse.source) == (
                reused,
                "store" if reused else "",
            )


@pytest.mark.parametrize("operation", ["rewind", "fork"])
def test_after_a_rewind_or_fork_only_prefilled_tokens_are_reused(
    engine: Engine, smollm2: Model, operation: str
) -> None:
    """Sampled tokens have other cells than the same tokens in a prompt."""
    (prompt,) = prompts(smollm2, 1, 380)
    engine.create(name="a").result()
    list(engine.generate(GenerationRequest(prompt, 0), session="a"))
    name = "a"
    if operation == "rewind":
        engine.change("a", "0", "rewind", lambda session: session.rewind(124)).result()
    else:
        name = engine.fork("a", at=256).result().name
    written = [
        token
        for token, _ in token_logprobs(engine.generate(new_request((), count=60), session=name))
    ]
    if operation == "fork":
        engine.delete("a").result()
    again = prompt[:256] + tuple(written) + prompt[:20]
    generation = engine.generate(new_request(again[:300]))
    assert generation.reuse.tokens == 128
    assert token_logprobs(generation) == alone(smollm2, again[:300])


def test_only_even_default_or_smaller_steps_are_halved_deep_in_a_prompt() -> None:
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


def test_the_former_name_of_generated_tokens_is_a_deprecated_alias(
    engine: Engine, smollm2: Model
) -> None:
    prompt = tuple(smollm2.text.encode("One and one is"))
    generation = engine.generate(GenerationRequest(prompt, max_tokens=3))
    generation.text()  # waits for the end
    usage = generation.usage
    with pytest.warns(DeprecationWarning, match="not Usage.written"):
        assert usage.written == usage.generated == 3


def test_a_change_that_fails_midway_is_a_change(engine: Engine, smollm2: Model) -> None:
    """The session gets a new revision, and no prompt reuses the cells that were moved."""
    ids = topic_ids(smollm2)[:200]
    engine.create(name="midway").result()
    list(engine.generate(GenerationRequest(tuple(ids), 0), session="midway"))
    revision = engine.find("midway").result().revision

    def fail(session: Session, edits: bool) -> None:
        if edits:
            session.replace(4, 5, [7], recompute="none")
        raise InvalidArgument("stopped midway")

    for edits in (False, True):
        with pytest.raises(InvalidArgument, match="stopped midway"):
            engine.change("midway", "0", "edit", lambda s, e=edits: fail(s, e)).result()
        assert engine.find("midway").result().revision == revision + edits
    generation = engine.generate(new_request((*ids[:4], 7, *ids[5:180])))
    list(generation)
    assert generation.reuse.tokens == 0
