"""The text of a stream of tokens: characters end at control tokens."""

from pathlib import Path

import pytest

from kvkeep.engine import GeneratedToken, TokenLogprob
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.openai.completion_logprobs import CompletionLogprobs
from kvkeep.session.streaming import TextStream
from tests.chat.templates import write_codec

CALL = "<|call|>"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder: Path = tmp_path_factory.mktemp("codec")
    return write_codec(folder, "", CALL)  # of bytes


def cut_emoji(codec: TextCodec, before: str, behind: str) -> list[int]:
    """Return the tokens of texts with half an emoji between them."""
    parts = codec.encode(before, special=True), codec.encode("😀")[:2]
    return [*parts[0], *parts[1], *codec.encode(behind, special=True)]


def pieces_of(stream: TextStream, codec: TextCodec, ids: list[int]) -> list[str]:
    pieces = [piece for token in ids for piece in stream.push_pieces(token)]
    pieces.append(stream.flush())
    return [codec.control_text(p) if isinstance(p, int) else p for p in pieces if p != ""]


@pytest.mark.parametrize("behind", ["</s>", f"</s>{CALL}"])
def test_half_a_character_comes_before_the_control_token_that_cuts_it(
    codec: TextCodec, behind: str
) -> None:
    ids = cut_emoji(codec, "ab", f"{behind}cd")
    controls = ["</s>", CALL] if CALL in behind else ["</s>"]
    assert pieces_of(TextStream(codec, ()), codec, ids) == [
        *("a", "b", "\ufffd", *controls, "c", "d")
    ]


def test_a_character_does_not_reach_across_a_control_token(codec: TextCodec) -> None:
    first, *rest = codec.encode("é", special=True)
    ids = [*codec.encode("a"), first, *codec.encode("</s>", special=True), *rest]
    assert pieces_of(TextStream(codec, ()), codec, ids) == ["a", "\ufffd", "</s>", "\ufffd"]


def test_half_a_character_of_the_prompt_is_no_part_of_the_answer(codec: TextCodec) -> None:
    context = cut_emoji(codec, "a", "</s>")
    stream = TextStream(codec, (), context)
    assert pieces_of(stream, codec, codec.encode("Hi")) == ["H", "i"]


def test_half_a_character_may_be_the_end_of_a_stop_string(codec: TextCodec) -> None:
    stream = TextStream(codec, ("b\ufffd",))
    assert pieces_of(stream, codec, cut_emoji(codec, "ab", "</s>c")) == ["a"]
    assert stream.matched_stop == "b\ufffd"


def test_offsets_of_tokens_count_half_a_character_before_a_control_token(codec: TextCodec) -> None:
    ids = cut_emoji(codec, "ab", "</s>cd")
    events = [GeneratedToken(token, "", TokenLogprob(token, -1.0)) for token in ids]
    entry = CompletionLogprobs(codec).entry(events)
    assert entry is not None
    assert entry["text_offset"] == [0, 1, 2, 2, 2, 3, 4]
