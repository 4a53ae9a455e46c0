"""A prompt that continues an answer, but has its end otherwise, resumes the session before it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_actions import LOCAL_MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model, state_specs
from torch import Tensor

from kvkeep import Sampling
from kvkeep.engine import (
    Engine,
    Finished,
    GeneratedToken,
    Generation,
    GenerationRequest,
    PrefillProgress,
)
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.model import Model
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.streaming import TextStream
from kvkeep.types import AlignmentMode
from tests.examples import examples

SETTINGS: dict[str, Any] = {"policy": "full", "max_kv_size": 600}
PROMPT = tuple((i * i * 7 + 3 * i) % 250 + 1 for i in range(200))
NEXT = tuple((i * 11) % 250 + 1 for i in range(40))  # what follows the answer in the next prompt
MODELS: dict[str, Model] = {
    "full": small_model(),
    "local": LOCAL_MODEL,
    "states": small_model(spec=state_specs()["delta_net"]),
}


def generate(engine: Engine, prompt: tuple[int, ...], **request: Any) -> Generation:
    """Return the complete generation; an answer has 8 tokens by default."""
    request = {"max_tokens": 8, **request}
    generation = engine.generate(GenerationRequest(prompt, **request))
    generation.text()
    return generation


class Script:
    """A constraint that allows one text alone."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.done = tokens, 0

    def masked(self, logits: Tensor) -> Tensor:
        result = torch.full_like(logits, -torch.inf)
        result[self.tokens[self.done]] = 0.0
        return result

    def accept(self, token: int) -> None:
        self.done += 1


def answer_of(model: Model) -> list[int]:
    """Return the answer to PROMPT."""
    with Engine(model, settings=SETTINGS) as engine:
        return generate(engine, PROMPT).generated


def continued(
    model: Model, end: dict[str, Any], text: tuple[int, ...], **options: Any
) -> Generation:
    """Return the generation for a prompt after an answer to PROMPT that ended in some way."""
    with Engine(model, settings={**SETTINGS, **options}) as engine:
        generate(engine, PROMPT, **end)
        return generate(engine, text)


@pytest.mark.parametrize("kind", ["full", "local"])
def test_an_end_token_that_the_next_prompt_lacks_is_removed(kind: str) -> None:
    """The next answer is, to the bit, the one after an answer without that token."""
    model = MODELS[kind]
    answer = answer_of(model)
    num_kept = next(n for n in range(2, 8) if answer[n] not in answer[:n])
    text = (*PROMPT, *answer[:num_kept], *NEXT)
    resumed = continued(model, {"end_tokens": (answer[num_kept],)}, text)
    assert resumed.reuse.tokens == 200 + num_kept
    assert resumed.reuse.resumed
    expected = continued(model, {"max_tokens": num_kept}, text)
    assert expected.reuse.tokens == 200 + num_kept
    assert resumed.generated == expected.generated
    assert resumed.record.live.logits is not None
    assert expected.record.live.logits is not None
    assert resumed.record.live.logits.equal(expected.record.live.logits)


def test_a_prompt_that_ends_with_the_answer_evaluates_its_last_token_again() -> None:
    model = MODELS["full"]
    answer = answer_of(model)
    resumed = continued(model, {}, (*PROMPT, *answer))
    assert resumed.reuse.tokens == 207


@pytest.mark.parametrize(
    ("kind", "options", "reused"),
    [("states", {}, 128), ("full", {"policy": "sliding", "max_kv_size": 100}, 0)],
    ids=["states", "evicted"],
)
def test_what_cannot_be_rewound_is_reused_up_to_a_step(
    kind: str, options: dict[str, Any], reused: int
) -> None:
    model = MODELS[kind]
    with Engine(model, settings={**SETTINGS, **options}) as engine:
        answer = generate(engine, PROMPT).generated
    num_kept = next(n for n in range(2, 8) if answer[n] not in answer[:n])
    text = (*PROMPT, *answer[:num_kept], *NEXT)
    result = continued(model, {"end_tokens": (answer[num_kept],)}, text, **options)
    assert (result.reuse.tokens, result.reuse.resumed) == (reused, False)
    with Engine(model, settings={**SETTINGS, **options}) as engine:
        assert generate(engine, text).generated == result.generated


STATES = MODELS["states"]
ENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "end token": ("!", ()),  # token 0 of the small models
    "white space": ("\n\n !", ()),
    "white space alone": ("\n\n", ()),
    "stop string": ("\nUser:", ("\nUser:",)),
    "stop string in a token": (".", (".",)),
}


def scripted(text: str, **sampling: Any) -> dict[str, Any]:
    """Return fields of a request whose answer is a text."""
    script = Script(STATES.text.encode(text))
    return {
        "max_tokens": len(script.tokens),
        "sampling": Sampling(constraint=script, **sampling),
    }


@pytest.mark.parametrize("end", ENDS)
def test_a_model_with_states_goes_on_before_the_end_of_its_answer(end: str) -> None:
    """The states before the tokens that the client does not send back were kept."""
    dropped, stop = ENDS[end]
    answer = "a\nb  c"
    text = (*PROMPT, *STATES.text.encode(answer), *NEXT)
    with Engine(STATES, settings=SETTINGS) as engine:
        generate(engine, PROMPT, **scripted(answer + dropped, stop=stop))
        resumed = generate(engine, text)
    assert (resumed.reuse.tokens, resumed.reuse.resumed) == (206, True)
    with Engine(STATES, settings=SETTINGS) as engine:
        generate(engine, PROMPT, **scripted(answer))
        assert generate(engine, text).generated == resumed.generated


@pytest.mark.parametrize("white_space", ["\n", "\n "])
def test_white_space_that_a_client_keeps_is_evaluated_again(white_space: str) -> None:
    """A run of white space has one checkpoint, before it."""
    with Engine(STATES, settings=SETTINGS) as engine:
        generate(engine, PROMPT, **scripted("ab\n \t"))
        resumed = generate(engine, (*PROMPT, *STATES.text.encode("ab" + white_space), *NEXT))
    assert (resumed.reuse.tokens, resumed.reuse.resumed) == (202, True)


def test_an_answer_leaves_no_checkpoints_for_later_ones() -> None:
    """Those at its end go when the session goes on."""
    text, answer = PROMPT, "a\nb\nc"
    with Engine(STATES, settings=SETTINGS) as engine:
        for _ in range(5):
            session = generate(engine, text, **scripted(answer + "\n!")).record.live
            length = len(text) + len(answer)
            assert session.checkpoints[-2:] == [length, length + 1]
            assert len([n for n in session.checkpoints if n % 128]) <= 2 + 5  # one a prompt
            text = (*text, *STATES.text.encode(answer), *NEXT)


@pytest.mark.parametrize("length", [200, 201, 203])
def test_another_answer_to_the_same_prompt_is_evaluated_in_whole_steps(length: int) -> None:
    """No more of an answer is replaced than its end."""
    model = MODELS["full"]
    text = (*PROMPT, *answer_of(model))[:length] + NEXT
    result = continued(model, {}, text)
    assert (result.reuse.tokens, result.reuse.resumed) == (128, False)


def test_the_same_prompt_after_an_empty_answer_is_evaluated_in_whole_steps() -> None:
    model = MODELS["full"]
    end = {"end_tokens": tuple(answer_of(model)[:1])}
    result = continued(model, end, PROMPT)
    assert (result.reuse.tokens, result.reuse.resumed) == (128, False)


def test_a_named_session_keeps_its_end_token_on_disk_and_after_the_next_prompt(
    tmp_path: Path,
) -> None:
    model, answer = MODELS["full"], answer_of(MODELS["full"])
    num_kept = next(n for n in range(2, 8) if answer[n] not in answer[:n])
    text = (*PROMPT, *answer[:num_kept], *NEXT)
    with Engine(model, settings=SETTINGS, folder=tmp_path) as engine:
        engine.create(name="a").result()
        request = GenerationRequest(PROMPT, 8, end_tokens=(answer[num_kept],))
        engine.generate(request, "a").text()
    with Engine(model, settings=SETTINGS, folder=tmp_path) as engine:
        read_tokens: Callable[..., Any] = lambda record: list(record.live.tokens)  # noqa: E731
        before = engine.inspect("a", "0", read_tokens).result()
        assert len(before) == 201 + num_kept
        assert engine.explain(text).result().reuse.resumed
        assert generate(engine, text).reuse.tokens == 200 + num_kept
        assert engine.inspect("a", "0", read_tokens).result() == before
        assert engine.prepare(text, "a").result() == 200 + num_kept
        assert engine.inspect("a", "0", read_tokens).result() == before[:-1]


def test_a_session_that_is_prepared_anew_forgets_the_end_of_its_former_answer() -> None:
    model, answer = MODELS["full"], answer_of(MODELS["full"])
    num_kept = next(n for n in range(2, 8) if answer[n] not in answer[:n])
    other = PROMPT[::-1]
    with Engine(model, settings=SETTINGS) as engine:
        engine.create(name="a").result()
        request = GenerationRequest(PROMPT, 8, end_tokens=(answer[num_kept],))
        engine.generate(request, "a").text()
        text = (*other, *generate(engine, other, max_tokens=1).generated)
        assert engine.prepare((*text, *NEXT), "a").result() == 201
        assert engine.prepare((*other[:199], *NEXT), "a").result() == 128


def test_a_stop_string_that_the_next_prompt_lacks_is_removed(smollm2: Model) -> None:
    codec, options = smollm2.text, {"max_tokens": 24}
    prompt = tuple(codec.encode("Once upon a time, in a small village by the sea, there lived"))
    with Engine(smollm2, settings=SETTINGS) as engine:
        answer = generate(engine, prompt, **options).generated
    stop = codec.decode_continuation(answer[9:12])
    with Engine(smollm2, settings=SETTINGS) as engine:
        request = GenerationRequest(prompt, 24, Sampling(stop=(stop,)))
        *_, finished = events = list(engine.generate(request))
        assert isinstance(finished, Finished)
        assert finished.stop == stop
        text = "".join(e.text for e in events if isinstance(e, (GeneratedToken, Finished)))
        num_kept = len(codec.encode(text))
        next_prompt = (*prompt, *answer[:num_kept], *codec.encode("\nAnd then the storm came."))
        assert generate(engine, next_prompt).reuse.tokens == len(prompt) + num_kept


@given(data=st.data())
@settings(max_examples=examples(50), deadline=None)
def test_withheld_tokens_are_those_whose_text_was_not_returned(
    data: st.DataObject, smollm2: Model
) -> None:
    codec = smollm2.text
    ids = data.draw(
        st.lists(st.sampled_from(codec.encode("ab abc\n\n é 中 cab, ba b")), max_size=20)
    )
    stop = data.draw(st.lists(st.sampled_from(["b", " a", "ca", "\n", "c\n"]), max_size=2))
    stream, returned, pushed = TextStream(codec, tuple(stop)), "", 0
    for token in ids:
        returned += stream.push(token)
        pushed += 1
        if stream.stopped:
            break
    returned += stream.flush()
    assert stream.stopped or not stream.withheld_tokens
    if stream.stopped:
        num_kept = pushed - stream.withheld_tokens
        kept = codec.decode(ids[:num_kept]).rstrip("\ufffd")
        assert returned.startswith(kept)
        assert not returned.startswith(codec.decode(ids[: num_kept + 1]))


@pytest.mark.parametrize("text", ["abcd", "xabcd e", "abbc"])
def test_tokens_do_not_decide_which_stop_string_ends_a_text(text: str, smollm2: Model) -> None:
    """The one that is complete first, and of those with one end the longest."""
    codec = smollm2.text
    characters = [token for character in text for token in codec.encode(character)]
    for ids in (codec.encode(text), characters):
        stream = TextStream(codec, ("abcd", "c", "bc"))
        assert "".join(map(stream.push, ids)) == text[: text.index("bc")]
        assert stream.matched_stop == "bc"


@pytest.mark.parametrize("rest", [(*NEXT, 256), NEXT * 12])
@pytest.mark.parametrize("name", [None, "a"])
def test_a_refused_prompt_keeps_the_end_of_the_answer(
    name: str | None, rest: tuple[int, ...]
) -> None:
    """A token that the model does not have, or more tokens than there is room for."""
    model, answer = MODELS["full"], answer_of(MODELS["full"])
    num_kept = next(n for n in range(2, 8) if answer[n] not in answer[:n])
    with Engine(model, settings=SETTINGS) as engine:
        request = GenerationRequest(
            PROMPT, 8, end_tokens=(answer[num_kept],), whole_text=name is not None
        )
        first = engine.generate(request, name)
        first.text()
        before = first.record.live.tokens, first.record.revision
        text = (*PROMPT, *answer[:num_kept], *rest)
        with pytest.raises((InvalidArgument, ContextFull)):
            engine.generate(replace(request, prompt=text), name)
        assert (first.record.live.tokens, first.record.revision) == before
        room = 600 - 200 - num_kept
        fitting = replace(request, prompt=(*text[: 200 + num_kept], *[7] * room), max_tokens=0)
        assert engine.generate(fitting, name).reuse.tokens == 200 + num_kept


@pytest.mark.parametrize("name", [None, "a"])
@pytest.mark.parametrize("mode", ["exact", "in_place"])
def test_a_prompt_gets_the_scores_of_all_its_tokens(name: str | None, mode: AlignmentMode) -> None:
    """Also where a session holds some of them, or its answer is continued."""
    alignment = AlignmentOptions(mode, min_saved=1)
    request = GenerationRequest(PROMPT, 8, whole_text=name is not None, alignment=alignment)
    with Engine(MODELS["full"], settings=SETTINGS) as engine:
        first = engine.generate(request, name)
        first.text()
        continued_text = (*PROMPT, *first.generated, *NEXT)
        for prompt in (PROMPT[:150], continued_text, PROMPT[:80] + PROMPT[90:]):
            scored = engine.generate(replace(request, prompt=prompt, prompt_logprobs=0), name)
            events = [event for event in scored if isinstance(event, PrefillProgress)]
            scores = [event.scores for event in events if event.scores is not None]
            assert sum(map(len, scores)) == len(prompt)
            assert scored.reuse.tokens == 0
            if name is not None:
                assert list(scored.record.live.tokens) == [*prompt, *scored.generated]
