"""An engine with speculation gives each generation the events that it has without."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from threading import Event
from typing import Any

import pytest
import torch
from speculation_cases import Alternating, Drafts, whole_drafts
from test_small_steps import model_of

from kvkeep.compiled.binding import kernel_library
from kvkeep.engine import Engine, Finished, GeneratedToken, Generation, GenerationRequest
from kvkeep.errors import Cancelled
from kvkeep.model import Model
from kvkeep.session import speculation
from kvkeep.session.draft_source import DraftSource
from kvkeep.session.drafts import Draft, DraftCounts, DraftPlanner, SpeculationOptions
from kvkeep.session.memory import Memory
from kvkeep.session.sampling import Sampling

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

FEW = tuple((token, 60.0) for token in range(20, 24))
REQUESTS = [
    GenerationRequest(tuple(range(3, 60)), 40, Sampling(), logprobs=2),
    GenerationRequest(tuple(range(3, 90)), 30, Sampling(temperature=0.9, seed=5), logprobs=0),
    GenerationRequest((5, 6, 7) * 9, 50, Sampling(logit_bias=FEW, stop=("7", "zz")), logprobs=0),
    GenerationRequest((9, 8) * 30, 60, Sampling(temperature=1.2, seed=2), end_tokens=(40, 41)),
    GenerationRequest((7, 7, 7, 1), 33, Sampling(repetition_penalty=1.3), ignore_eos=True),
]


def requests() -> list[GenerationRequest]:
    """Requests with constraints of their own."""
    constraint = Sampling(temperature=0.5, seed=1, constraint=Alternating(25))
    return [*REQUESTS, GenerationRequest(tuple(range(40, 75)), None, constraint, logprobs=1)]


@dataclass(frozen=True)
class Outcome:
    """A generation's events without times and drafts, and the session that it leaves."""

    events: list[object]
    tokens: list[int]
    logits: torch.Tensor

    @classmethod
    def of(cls, generation: Generation) -> "Outcome":
        events = list[object]()
        for event in generation:
            if isinstance(event, GeneratedToken):
                events.append(replace(event, pieces=list(event.pieces)))
            elif isinstance(event, Finished):
                usage = event.usage
                counts = (usage.prompt, usage.generated, usage.evicted)
                events.append((event.reason, event.text, event.stop, event.end_token, counts))
        session = generation.record.live
        assert session.logits is not None
        return cls(events, list(session.tokens), session.logits)

    def require_same(self, other: "Outcome") -> None:
        assert self.events == other.events
        assert self.tokens == other.tokens
        assert torch.equal(self.logits, other.logits)


@pytest.mark.parametrize("kind", ["dense", "gemma3", "convolution"])
@pytest.mark.parametrize("size", [400, 48])
def test_generations_in_company_have_the_events_of_those_alone(kind: str, size: int) -> None:
    model, settings = model_of(kind), {"max_kv_size": size, "policy": "sliding"}
    plain = SpeculationOptions(enabled=False)
    with Engine(model, settings=settings, speculation=plain) as engine:
        alone = [Outcome.of(engine.generate(r, owner=str(i))) for i, r in enumerate(requests())]
    drafts = Drafts(Random(size), [outcome.tokens for outcome in alone])
    with drafts.used(), Engine(model, settings=settings) as engine:
        submitted = [engine.submit(r, owner=str(i)) for i, r in enumerate(requests())]
        generations = [future.result()[0] for future in submitted]
        for generation, expected in zip(generations, alone, strict=True):
            Outcome.of(generation).require_same(expected)
        totals = engine.totals().result()
    assert 20 < totals.accepted < totals.drafted
    counts = [generation.usage.drafts for generation in generations]
    assert totals.drafted == sum(each.drafted for each in counts)
    assert totals.accepted == sum(each.accepted for each in counts)


def test_requests_choose_whether_to_speculate() -> None:
    request = replace(
        REQUESTS[2], max_tokens=30, ignore_eos=True, sampling=Sampling(logit_bias=FEW)
    )
    for default, choice, expected in (
        (True, None, True),
        (True, False, False),
        (False, True, True),
    ):
        options = SpeculationOptions(enabled=default)
        with Engine(model_of("dense"), speculation=options) as engine:
            generation = engine.generate(replace(request, speculate=choice))
            generation.text()
            assert (generation.usage.drafts != DraftCounts()) is expected


def test_a_cancelled_generation_leaves_the_tokens_that_it_reported(smollm2: Model) -> None:
    prompt = tuple(smollm2.text.encode("one two three four five six seven eight nine ten. " * 6))
    request = GenerationRequest(prompt, 200, ignore_eos=True)
    with Engine(smollm2) as engine:
        generation = engine.generate(request, session=None)
        reported = list[int]()
        with suppress(Cancelled):
            for event in generation:
                if isinstance(event, GeneratedToken):
                    reported.append(event.token)
                    if len(reported) == 30:
                        generation.cancel()
        assert generation.generated == reported
        assert list(generation.record.live.tokens) == [*prompt, *reported]
        assert generation.usage.drafts.accepted > 5
        again = engine.generate(replace(request, prompt=(*prompt, *reported), max_tokens=20))
        text = again.text()
        assert again.reuse.tokens >= len(prompt)
    with Engine(smollm2, speculation=SpeculationOptions(enabled=False)) as engine:
        whole = engine.generate(replace(request, max_tokens=len(reported) + 20))
        whole.text()
    assert [*reported, *again.generated] == whole.generated
    assert text


def draft_from(texts: Sequence[Sequence[int]]) -> Callable[..., Draft]:
    """Return a method of `DraftSource` whose drafts are right: the next tokens of known texts."""

    def draft(source: DraftSource, token: int, count: int) -> Draft:
        start = [*source.tokens, token]
        text = next(text for text in texts if text[: len(start)] == start)
        return Draft(text[len(start) :][: min(2, count)], 3)

    return draft


@dataclass
class Recording:
    """A constraint that allows any token."""

    tokens: list[int] = field(default_factory=list)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def accept(self, token: int) -> None:
        self.tokens.append(token)


def test_a_step_that_fails_for_several_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constraint cannot go back: the generations that have one end with the error.

    Stop strings are looked for again in the text that the session has.
    """
    constraints, evaluate, errors = [Recording(), Recording()], speculation._evaluate, list[Any]()
    samplings = [*(Sampling(constraint=each) for each in constraints), Sampling(stop=("~~~~",))]
    requests = [
        GenerationRequest(tuple(range(first, 60)), 60, sampling, ignore_eos=True)
        for first, sampling in enumerate([*samplings, Sampling()], 3)
    ]
    plain = SpeculationOptions(enabled=False)
    with Engine(model_of("dense"), speculation=plain) as engine:
        alone = [replace(request, sampling=Sampling()) for request in requests]
        texts = [Outcome.of(engine.generate(r, owner=str(i))).tokens for i, r in enumerate(alone)]

    def fail_once(members: Sequence[Any], *arguments: Any) -> Any:
        result = evaluate(members, *arguments)
        if len(members) == len(requests) and not errors:
            errors.append(MemoryError())
            raise errors[0]
        return result

    monkeypatch.setattr(DraftSource, "draft", draft_from(texts))
    monkeypatch.setattr(DraftPlanner, "choose", whole_drafts)
    monkeypatch.setattr(speculation, "_evaluate", fail_once)
    with Engine(model_of("dense")) as engine:
        submitted_all = Event()
        engine.call(submitted_all.wait)
        submitted = [engine.submit(r, owner=str(i)) for i, r in enumerate(requests)]
        submitted_all.set()
        generations = [future.result()[0] for future in submitted]
        for generation in generations[:2]:
            with pytest.raises(MemoryError):
                generation.text()
        for generation in generations[2:]:
            Outcome.of(generation)
    assert errors
    assert [each.generated for each in generations[2:]] == [text[-60:] for text in texts[2:]]
    for generation, text, request in zip(generations, texts, requests, strict=True):
        count, start = len(generation.generated), len(request.prompt)
        assert generation.generated == text[start : start + count]
    for constraint, generation in zip(constraints, generations, strict=False):
        count = len(generation.generated)
        assert constraint.tokens[:count] == generation.generated
        assert len(constraint.tokens) <= count + 3  # those of the step that failed


def test_a_session_that_fails_after_its_tokens_were_accepted_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others of its forward find their stop strings as they do alone, and none too early."""
    prompts = [(5, 6, 7) * 9 + (30 + number,) for number in range(4)]
    sampling = Sampling(repetition_penalty=1.3)
    wanted = [GenerationRequest(prompt, 50, sampling, ignore_eos=True) for prompt in prompts]
    plain = SpeculationOptions(enabled=False)

    def with_stop(request: GenerationRequest, text: str) -> GenerationRequest:
        return replace(request, sampling=replace(request.sampling, stop=(text,)))

    model = model_of("dense")
    with Engine(model, speculation=plain) as engine:
        long = [engine.generate(each, owner=str(i)) for i, each in enumerate(wanted)]
        texts, tokens = [each.text() for each in long], [Outcome.of(each).tokens for each in long]
        # Strings of which a step may contain the beginning alone.
        stops = [each[len(each) // 2 :][:5] or "zz" for each in texts]
        wanted = list(map(with_stop, wanted, stops))
        alone = [Outcome.of(engine.generate(r, owner=f"x{i}")) for i, r in enumerate(wanted)]
    append, failures = Memory.append, list[int]()

    def failing_append(self: Memory, ids: Sequence[int], *arguments: Any) -> None:
        if len(self.tokens) > 40 and len(ids) > 1 and self.tokens[27] == 31:  # all four decode
            failures.append(len(ids))
            raise MemoryError("one session fails")
        append(self, ids, *arguments)

    monkeypatch.setattr(Memory, "append", failing_append)
    monkeypatch.setattr(DraftSource, "draft", draft_from(tokens))
    monkeypatch.setattr(DraftPlanner, "choose", whole_drafts)
    with Engine(model) as engine:
        submitted_all = Event()
        engine.call(submitted_all.wait)
        submitted = [engine.submit(r, owner=str(i)) for i, r in enumerate(wanted)]
        submitted_all.set()
        generations = [future.result()[0] for future in submitted]
        with pytest.raises(MemoryError, match="one session fails"):
            generations[1].text()
        for index in (0, 2, 3):
            assert Outcome.of(generations[index]).events == alone[index].events
    assert failures


@dataclass
class FailsAtThird(Recording):
    """A constraint that allows any token, and raises when it follows the third."""

    def accept(self, token: int) -> None:
        super().accept(token)
        if len(self.tokens) == 3:
            raise RuntimeError("a fault of the constraint")


@pytest.mark.parametrize("speculates", [False, True])
def test_a_constraint_that_fails_to_follow_takes_no_token_of_others(speculates: bool) -> None:
    options = SpeculationOptions(enabled=speculates)
    plain = GenerationRequest(tuple(range(3, 60)), 12, Sampling(), ignore_eos=True)
    failing = replace(plain, prompt=(5, 6, 7), sampling=Sampling(constraint=FailsAtThird()))
    with Engine(model_of("dense"), speculation=options) as engine:
        expected = Outcome.of(engine.generate(plain, owner="0")).tokens
    with Engine(model_of("dense"), speculation=options) as engine:
        submitted_both = Event()
        engine.call(submitted_both.wait)
        submitted = [engine.submit(r, owner=str(i)) for i, r in enumerate((failing, plain))]
        submitted_both.set()
        bad, good = (future.result()[0] for future in submitted)
        with pytest.raises(RuntimeError, match="a fault of the constraint"):
            bad.text()
        assert Outcome.of(good).tokens == expected
        assert good.generated == expected[-12:]
