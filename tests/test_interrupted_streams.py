"""A stream that an error ends has given all text of the tokens that are in the session."""

import signal
from collections.abc import Iterator

import pytest
import torch
from interrupts import at_each_line
from small_models import small_model

from kvkeep import Sampling, Session
from kvkeep.errors import ContextFull, NonFiniteLogits

MODEL = small_model()
PROMPT = "Once upon a time, "


def doubtful(session: Session, tokens: int) -> Sampling:
    """Stops at what comes after so many tokens: their text may begin it, and is held back."""
    fork, ids = session.fork(), list[int]()
    for _ in range(tokens):
        ids.append(fork.next_token())
    return Sampling(stop=(MODEL.text.decode(ids) + "\0 never",))


def pieces(stream: Iterator[str], error: type[BaseException]) -> str:
    found = list[str]()
    with pytest.raises(error):
        found.extend(stream)
    return "".join(found)


def text_of(session: Session, first: int) -> str:
    return MODEL.text.decode(session.tokens[first:], skip_special=True)


def test_withheld_text_is_emitted_before_context_full() -> None:
    session = MODEL.session(len(PROMPT) + 6, policy="full")
    session.feed(PROMPT)
    stream = session.stream(sampling=doubtful(session, 6), ignore_eos=True)
    assert pieces(stream, ContextFull) == text_of(session, len(PROMPT)) != ""
    assert session.finish_reason == "full"
    assert len(session.tokens) == len(PROMPT) + 6


def test_withheld_text_is_emitted_before_a_model_error() -> None:
    session = MODEL.session(64)
    session.feed(PROMPT)
    stream, found = session.stream(sampling=doubtful(session, 4), ignore_eos=True), ""
    weight = MODEL.decoder.tensors["model.layers.1.mlp.down_proj.weight"]
    sound = weight.clone()

    def act(line: int) -> None:
        if len(session.tokens) == len(PROMPT) + 4:
            weight[0, 0] = torch.nan

    try:
        with at_each_line(act):
            found = pieces(stream, NonFiniteLogits)
    finally:
        weight.copy_(sound)
    assert found == text_of(session, len(PROMPT)) != ""
    assert session.finish_reason == "error"


@pytest.mark.parametrize("held_back", [True, False])
@pytest.mark.parametrize("speculate", [True, False])
def test_text_of_every_token_is_emitted_before_an_interrupt(
    held_back: bool, speculate: bool
) -> None:
    """At every other line of a token, except between counting its text and yielding it."""
    for line in range(held_back, 120, 2):
        interrupt_at(line, held_back, speculate)


def interrupt_at(line: int, held_back: bool, speculate: bool) -> None:
    session = MODEL.session(64)
    session.feed(PROMPT)
    how = doubtful(session, 8) if held_back else Sampling()
    stream = session.stream(sampling=how, ignore_eos=True, speculate=speculate)
    since = [0]

    def act(_: int) -> None:
        if len(session.tokens) >= len(PROMPT) + 3:
            since[0] += 1
            if since[0] == line + 1:
                signal.raise_signal(signal.SIGINT)

    with at_each_line(act, spared=("_complete_stream",)):
        found = pieces(stream, KeyboardInterrupt)
    assert found == text_of(session, len(PROMPT)) != ""
    assert session.finish_reason == "interrupt"


def test_an_interrupt_is_raised_even_if_the_stream_is_not_resumed() -> None:
    session = MODEL.session(64)
    session.feed(PROMPT)
    stream = session.stream(sampling=doubtful(session, 8), ignore_eos=True)

    def act(_: int) -> None:
        if len(session.tokens) == len(PROMPT) + 3:
            signal.raise_signal(signal.SIGINT)

    with at_each_line(act):
        assert next(stream) == text_of(session, len(PROMPT))
    with pytest.raises(KeyboardInterrupt):
        stream.close()
