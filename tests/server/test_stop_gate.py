"""Stop strings behind the reasoning, wherever the borders of tokens are."""

import re
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat.formats.registry import format_by_name
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.stop_gate import ReasoningMarkers
from kvkeep.session.streaming import TextStream

STOPS = ("\n", "ab", "b a")
CHARACTERS = st.text(alphabet="ab\n <é", max_size=12)
SPACE = st.sampled_from(["", "\n", " \n\n"])
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HEADERS = [
    FINAL,
    "<|channel|>commentary<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
]


class PieceStream:
    """Tokens that are their text."""

    def push(self, token: str) -> str:
        return "" if re.fullmatch(r"<\|\w+\|>", token) else token

    def flush(self) -> str:
        return ""


class PieceCodec:
    """Tokens that are their text; those of channels are control tokens."""

    def piece_stream(self, skip_special: bool = False) -> PieceStream:
        return PieceStream()

    def is_control(self, token: str) -> bool:
        return bool(self.control_text(token))

    def control_text(self, token: str) -> str:
        return token if re.fullmatch(r"<\|\w+\|>", token) else ""


def read(tokens: list[Any], name: str, stops: tuple[str, ...], codec: Any) -> tuple[str, bool]:
    """Return the text of an answer's tokens, and whether a stop string ended it."""
    markers = ReasoningMarkers.of(format_by_name(name, ()), False)
    stream, text = TextStream(cast(TextCodec, codec), stops, (), markers), ""
    for token in tokens:
        text += stream.push(token)
        if stream.stopped:
            break
    return text + stream.flush(), stream.stopped


def cut(answer: str) -> tuple[str, bool]:
    """Return an answer to the stop string that is complete first, and whether there is one."""
    found = [(answer.find(s) + len(s), -len(s)) for s in STOPS if s in answer]
    if not found:
        return answer, False
    end, negative_length = min(found)
    return answer[: end + negative_length], True


def split(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [text[a:b] for a, b in pairwise(borders)]
    return [piece for piece in pieces if piece]


def control_split(text: str) -> list[str]:
    return [token for token in re.split(r"(<\|\w+\|>)", text) if token]


@given(
    reasoning=CHARACTERS,
    space=SPACE,
    answer=CHARACTERS.map(str.lstrip),
    places=st.lists(st.integers(0, 60), max_size=6),
)
def test_every_split_of_an_answer_ends_at_the_same_place(
    smollm2: Model, reasoning: str, space: str, answer: str, places: list[int]
) -> None:
    before = f"<think>{reasoning}</think>{space}"
    text, is_cut = cut(answer)
    whole = before + answer
    assert read(split(whole, places), "hermes", STOPS, PieceCodec()) == (before + text, is_cut)
    ids = smollm2.text.encode(whole)  # with tokens such as "></"
    assert read(ids, "hermes", STOPS, smollm2.text) == (before + text, is_cut)


@given(
    reasoning=CHARACTERS,
    header=st.sampled_from(HEADERS),
    space=SPACE,
    answer=CHARACTERS.map(str.lstrip),
    places=st.lists(st.integers(0, 200), max_size=6),
)
@pytest.mark.parametrize("is_control", [False, True])
def test_the_header_of_another_channel_ends_the_reasoning(
    is_control: bool, reasoning: str, header: str, space: str, answer: str, places: list[int]
) -> None:
    before = f"<|channel|>analysis<|message|>{reasoning}{NEXT}{header}{space}"
    text, is_cut = cut(answer)
    whole = before + answer
    tokens = control_split(whole) if is_control else split(whole, places)
    assert read(tokens, "harmony", STOPS, PieceCodec()) == (before + text, is_cut)


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_begins_an_answer_is_no_part_of_it(header: str) -> None:
    tokens = control_split(f"{header}Two nights")
    assert read(tokens, "harmony", ("n",), PieceCodec()) == (f"{header}Two ", True)


def test_an_answer_without_a_header_and_an_endless_header_are_cut() -> None:
    assert read(["Two ", "nights"], "harmony", ("n",), PieceCodec()) == ("Two ", True)
    tokens = ["<|channel|>", "final" * 200, " a", " n"]
    text, is_cut = read(tokens, "harmony", ("n",), PieceCodec())
    assert is_cut
    assert text.endswith(" a ")
