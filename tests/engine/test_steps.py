"""Prefill steps end with messages, too, and reuse up to there changes no bit."""

import copy
import itertools
from functools import cache
from typing import Any

import pytest
from edit_actions import LOCAL_MODEL
from engine.workload import Request, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model, state_specs

from kvkeep.engine import Engine
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.engine.steps import MIN_MESSAGE_STEP, StepGrid, prefill_step_at
from kvkeep.model import Model
from tests.examples import examples

END = 251  # ends a message; `words` has no such token
SETTINGS: dict[str, Any] = {"policy": "full", "max_kv_size": 4000}
GRID = StepGrid(128, frozenset([END]))

Lengths = list[int]  # of messages, with their end tokens
lengths = st.lists(st.integers(1, 150) | st.integers(30, 70), min_size=1, max_size=12)


def words(count: int, seed: int) -> tuple[int, ...]:
    return tuple((i * i * seed + 3 * i) % 250 + 1 for i in range(count))


def chat(counts: Lengths, seed: int = 7) -> tuple[int, ...]:
    """Return a text of messages."""
    messages = ((*words(count - 1, seed + n), END) for n, count in enumerate(counts))
    return tuple(token for message in messages for token in message)


def ends_of(grid: StepGrid, text: tuple[int, ...]) -> list[int]:
    """Return the ends of all whole steps of a text."""
    ends = [0]
    while (end := grid.next_end(text, ends[-1])) <= len(text):
        ends.append(end)
    return ends


@cache
def tiny_model(kind: str) -> Model:
    model = copy.copy(LOCAL_MODEL if kind == "local" else small_model(spec=state_specs()[kind]))
    model.message_end_ids = GRID.message_ends
    return model


def generate(model: Model, prompts: list[tuple[int, ...]], **places: Any) -> Result:
    """Return the result of the last prompt, after the others in the same engine."""
    with Engine(model, settings=SETTINGS, **places) as engine:
        (result,) = [Request(prompt, 3).do(engine) for prompt in prompts][-1]
    return result


@given(counts=lengths, others=lengths, common=st.integers(0, 800), step=st.sampled_from([128, 48]))
def test_texts_share_the_ends_of_their_common_tokens(
    counts: Lengths, others: Lengths, common: int, step: int
) -> None:
    grid = StepGrid(step, GRID.message_ends)
    text = chat([*counts, *counts, 700])
    other = text[:common] + chat(others, 11)
    ends, other_ends = ends_of(grid, text), ends_of(grid, other)
    common = min(common, len(text))
    assert [end for end in ends if end <= common] == [end for end in other_ends if end <= common]
    assert all(first < second <= first + step for first, second in itertools.pairwise(ends))
    for limit in range(0, len(text), 29):
        assert grid.last_end(text, limit) == max(end for end in ends if end <= limit)
    for end in ends[1:]:
        assert not end % prefill_step_at(step, end - 1) or text[end - 1] == END
    multiples = {end for end in range(0, len(text) + 1, step) if end <= 12 * step}
    assert multiples <= set(ends)


@given(counts=st.lists(st.integers(MIN_MESSAGE_STEP, 300), min_size=1, max_size=12))
def test_of_a_text_of_messages_hardly_more_than_a_short_step_is_lost(counts: Lengths) -> None:
    text = chat(counts)
    assert len(text) - GRID.last_end(text, len(text)) < MIN_MESSAGE_STEP


def test_without_ends_of_messages_the_ends_are_multiples() -> None:
    text = chat([100] * 30)
    assert ends_of(StepGrid(128), text) == [*range(0, 1536, 128), *range(1536, 3001, 64)]


@pytest.mark.parametrize("kind", ["local", "delta_net", "mamba2"])
@given(counts=lengths, others=lengths, kept=st.integers(1, 12))
@settings(max_examples=examples(6), deadline=None)
def test_reuse_up_to_a_message_equals_evaluating_all(
    kind: str, counts: Lengths, others: Lengths, kept: int
) -> None:
    """Models with local layers or states find a checkpoint there, which is not thinned out soon."""
    model = tiny_model(kind)
    first, second = chat(counts), chat(counts[:kept]) + chat(others, 11)
    result = generate(model, [first, second])
    assert result.same(generate(model, [second]))
    assert GRID.last_end(second, result.reuse.tokens) == result.reuse.tokens
    common = min(len(second) - 1, len(chat(counts[:kept])))
    if kept >= len(counts):
        assert result.reuse.tokens == GRID.last_end(second, common)


@pytest.mark.parametrize("counts", [[40, 90, 130, 35, 60], [200, 36, 150, 33, 33, 33]])
def test_reuse_up_to_a_message_by_the_default_model_equals_evaluating_all(
    smollm2: Model, counts: Lengths
) -> None:
    end = smollm2.text.encode("<|im_end|>", special=True)[0]
    assert end in smollm2.message_end_ids

    def prompt(counts: Lengths, seed: int = 7) -> tuple[int, ...]:
        return tuple(end if token == END else token + 1000 for token in chat(counts, seed))

    first = prompt(counts)
    second = first + prompt([50, 20], 11)
    result = generate(smollm2, [first, second])
    assert result.reuse.tokens == GRID.last_end(chat(counts), len(first))
    assert result.reuse.tokens % 64
    assert result.same(generate(smollm2, [second]))


@pytest.mark.parametrize("kind", ["local", "delta_net"])
@given(counts=lengths, turns=st.integers(1, 5))
@settings(max_examples=examples(5), deadline=None)
def test_what_is_reserved_covers_the_checkpoints_after_messages(
    kind: str, counts: Lengths, turns: int
) -> None:
    session = tiny_model(kind).session(4000, policy="full", prefill_step=128)
    text = chat([*counts, *counts, 40, 40, 40])
    for turn in range(turns):
        message = text[turn * len(text) // turns : (turn + 1) * len(text) // turns]
        reserved, feeding = max_session_bytes(session, len(message)), session.feeding(message)
        whole = [*session.tokens, *message]
        while feeding.done < feeding.total:
            start = len(session.tokens)
            feeding.step(feeding.done + GRID.next_end(whole, start) - start)
        assert session.nbytes <= reserved
