"""Tokenizers whose spaces are ▁, from GGUF: against SentencePiece, and against transformers."""

import io
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GemmaTokenizer, LlamaTokenizer

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.tokenizer import merges_by_score
from kvkeep.models.text.codec import TextCodec
from tests.models.vocabularies import (
    BYTE,
    CONTROL,
    CORPUS,
    NORMAL,
    TEXTS,
    UNKNOWN,
    USER_DEFINED,
    built,
    codec,
)

sentencepiece = pytest.importorskip("sentencepiece")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass
class Trained:
    """A vocabulary that SentencePiece trained."""

    theirs: Any

    def ours(self, path: Path, architecture: str = "llama", **fields: object) -> Tokenizer:
        """The same, through GGUF."""
        theirs, ids = self.theirs, range(self.theirs.get_piece_size())
        types = [self._type(index) for index in ids]
        texts = [theirs.id_to_piece(index) for index in ids]
        # llama.cpp's converter writes them as they read.
        texts = [
            text.replace("▁", " ") if kind == USER_DEFINED else text
            for text, kind in zip(texts, types, strict=True)
        ]
        scores = [theirs.get_score(index) for index in ids]
        fields = {"scores": scores, "bos_token_id": 1, **fields}
        return built(path, "llama", texts, types, fields, architecture)

    def _type(self, index: int) -> int:
        theirs = self.theirs
        if theirs.is_unknown(index):
            return UNKNOWN
        if theirs.is_control(index):
            return CONTROL
        if theirs.is_byte(index):
            return BYTE
        return USER_DEFINED if theirs.id_to_piece(index) in SYMBOLS else NORMAL


SYMBOLS = ["▁▁", "▁▁▁", "\n", "\n\n", "<tool>"]
LIKE_LLAMA2 = {"byte_fallback": True, "split_digits": True}
LIKE_GEMMA = {
    **LIKE_LLAMA2,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "user_defined_symbols": SYMBOLS,
}
FEWER_SPACES = {"byte_fallback": True, "remove_extra_whitespaces": True}
ACROSS_WORDS = {
    "byte_fallback": True,
    "split_by_whitespace": False,
    "split_by_unicode_script": False,
    "split_by_number": False,
}


def train(**how: Any) -> Trained:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        **{
            "sentence_iterator": iter(CORPUS.splitlines()),
            "model_writer": model,
            "model_type": "bpe",
            "vocab_size": 1500,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "character_coverage": 0.995,
            "minloglevel": 2,
            **how,
        }
    )
    return Trained(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()))


@pytest.mark.parametrize(
    ("how", "fields"),
    [
        (LIKE_LLAMA2, {}),
        (LIKE_GEMMA, {"add_space_prefix": False}),
        (FEWER_SPACES, {"remove_extra_whitespaces": True}),
        (ACROSS_WORDS, {"add_space_prefix": True}),
        ({"byte_fallback": False}, {}),
    ],
)
def test_ids_and_texts_are_those_of_sentencepiece(
    tmp_path: Path, how: dict[str, Any], fields: dict[str, bool]
) -> None:
    trained = train(**how)
    ours, theirs = trained.ours(tmp_path / "m.gguf", **fields), trained.theirs
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text)
        if how["byte_fallback"]:
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    if how is LIKE_GEMMA:
        assert "  a\n\n<tool>" in ours.decode(ours.encode("  a\n\n<tool>").ids)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("llama2")
    return codec(folder, train(**LIKE_LLAMA2).ours(folder / "m.gguf"))


def test_ids_are_those_of_transformers_own_llama(llama2: TextCodec) -> None:
    """But where a text opens with a space: SentencePiece adds another, transformers 5 does not."""
    ours = llama2.tokenizer
    theirs = LlamaTokenizer(vocab=ours.get_vocab(), merges=_merges(ours))
    for text in (text for text in TEXTS if not text.startswith(" ")):
        ids = theirs.encode(text, add_special_tokens=False)
        assert llama2.encode(text) == ids
        assert llama2.decode(ids) == theirs.decode(ids)


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def test_bos_opens_a_text_and_none_can_be_written(llama2: TextCodec) -> None:
    assert llama2.opening_ids == [1]
    ids = llama2.encode("<s>a</s> <unk> <0x0A>")
    assert not {0, 1, 2} & set(ids)
    assert llama2.decode(ids) == "<s>a</s> <unk> <0x0A>"
    # Each text behind a control token opens with a space, as llama.cpp has it.
    hi = llama2.encode("hi")
    assert llama2.encode("<s>hi</s>hi", special=True) == [1, *hi, 2, *hi]


def test_spaces_behind_a_control_token_of_phi3_are_its_own(tmp_path: Path) -> None:
    trained = train(**LIKE_LLAMA2, control_symbols=["<|user|>"])
    ours = trained.ours(tmp_path / "m.gguf", "phi3")
    hi = ours.encode("hi", add_special_tokens=False).ids
    user = ours.token_to_id("<|user|>")
    assert ours.encode("<|user|>\nhi<s> hi").ids == [1, user, *hi, 1, *ours.encode(" hi").ids[1:]]


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 1499) | st.integers(3, 258), max_size=30), skip=st.booleans())
def test_a_stream_gives_the_whole_text(llama2: TextCodec, ids: list[int], skip: bool) -> None:
    whole = llama2.decode(ids, skip_special=skip)
    stream = llama2.piece_stream(skip)
    given_so_far = ""
    for index in ids:
        given_so_far += stream.push(index)
        assert whole.startswith(given_so_far)
    assert given_so_far + stream.flush() == whole


@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_text_comes_back_whole_and_character_by_character(llama2: TextCodec, text: str) -> None:
    ids = llama2.encode(text)
    # A ▁ is how a space is written.
    assert llama2.decode(ids) == text.replace("▁", " ")
    pieces = list(map(llama2.piece_stream().push, ids))
    assert "".join(pieces) == llama2.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_what_is_a_whole_character_stays_where_a_broken_one_follows(llama2: TextCodec) -> None:
    first = llama2.tokenizer.token_to_id("<0x00>")
    ids = [first + byte for byte in b"\xe6\x97\xa5\xe6"]
    assert llama2.decode(ids) == "日\ufffd"
    stream = llama2.piece_stream()
    assert [stream.push(index) for index in ids] == ["", "", "日", ""]
    assert stream.flush() == "\ufffd"


@settings(max_examples=200)
@given(
    pieces=st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=12),
    texts=st.lists(st.text("ab", max_size=20), min_size=5, max_size=5),
)
def test_merges_in_this_order_are_sentencepieces(pieces: list[str], texts: list[str]) -> None:
    """In whatever order pieces score: SentencePiece's trainer would never give most of these."""
    scores = {piece: -float(rank) for rank, piece in enumerate(["a", "b", *pieces])}
    vocab = {piece: index for index, piece in enumerate(scores)}
    ours = Tokenizer(BPE(vocab=vocab, merges=merges_by_score(scores)))
    for text in texts:
        assert ours.encode(text).tokens == greedy(text, scores)


def greedy(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, as it is told: the neighbours that score greatest, leftmost first."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_gemma_4_is_as_transformers_has_it(tmp_path: Path) -> None:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = BpeTrainer(
        vocab_size=1500,
        special_tokens=[*specials, *BYTES],
        show_progress=False,
        max_token_length=16,
    )
    trained = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    lines = [line.replace(" ", "▁") for line in CORPUS.splitlines()]
    trained.train_from_iterator([*lines, *["\n" * 8] * 500], trainer)
    merges = _merges(trained)
    theirs = GemmaTokenizer(vocab=trained.get_vocab(), merges=merges)
    texts = [text for text, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    types = [
        UNKNOWN if t == "<unk>" else CONTROL if t in specials else BYTE if t in BYTES else NORMAL
        for t in texts
    ]
    ours = built(
        tmp_path / "m.gguf",
        "gemma4",
        texts,
        types,
        {
            "merges": [" ".join(merge) for merge in merges],
            "bos_token_id": 2,
            "add_bos_token": False,
        },
    )
    assert "\n\n" in texts
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == [2, *ids]
        assert ours.decode(ids) == theirs.decode(ids) == text


@pytest.mark.parametrize("bos", ["<s>", "a b", "x:y", "$B"])
def test_bos_may_be_any_text(tmp_path: Path, bos: str) -> None:
    tokens, types = [*BYTES, "a", bos], [*[BYTE] * 256, NORMAL, CONTROL]
    fields = {"scores": [0.0] * 258, "bos_token_id": 257, "add_space_prefix": False}
    assert built(tmp_path / "m.gguf", "llama", tokens, types, fields).encode("a").ids == [257, 256]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"scores": None}, "scores"),
        ({"scores": [0.0]}, "1 scores"),
        ({"scores": [float("nan")] * 259}, "list of numbers"),
        ({"scores": "none"}, "list of numbers"),
        ({"tokens": ["<unk>", "a", "<0xFF> ", *BYTES[:-1], "b"]}, "lacks 1 of the 256"),
        ({"tokens": ["?", *map(str, range(258))], "types": [NORMAL] * 259}, "lacks 256 of the 256"),
    ],
)
def test_a_vocabulary_that_is_incomplete_is_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    whole = {
        "tokens": ["<unk>", "a", "b", *BYTES],
        "types": [UNKNOWN, NORMAL, NORMAL, *[BYTE] * 256],
        "scores": [0.0] * 259,
        **changes,
    }
    tokens, types = whole.pop("tokens"), whole.pop("types")
    fields = {name: value for name, value in whole.items() if value is not None}
    with pytest.raises(BadModelFile, match=complaint):
        built(tmp_path / "m.gguf", "llama", tokens, types, fields)


def test_without_types_bytes_and_tokens_with_a_role_are_still_found(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁ab"]
    fields = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields["scores"] = [0.0] * 260 + [-3.0, -4.0, -2.0, -1.0]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5]
    whole = built(tmp_path / "whole.gguf", "llama", tokens, types, fields)
    with pytest.warns(RuntimeWarning, match=r"tokenizer\.ggml\.token_type"):
        ours = built(tmp_path / "m.gguf", "llama", tokens, [], fields)
    for text in ("ab ab", "a</s>b<unk>", "日 <0x41>"):
        assert ours.encode(text).ids == whole.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == whole.decode(whole.encode(text).ids)
