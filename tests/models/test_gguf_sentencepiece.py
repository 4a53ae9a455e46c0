"""SentencePiece tokenizers from GGUF, against SentencePiece and transformers."""

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
from tests.examples import examples
from tests.models.vocabularies import (
    BYTE,
    CONTROL,
    CORPUS,
    NORMAL,
    TEXTS,
    UNKNOWN,
    USER_DEFINED,
    codec,
    tokenizer_from_gguf,
)

sentencepiece = pytest.importorskip("sentencepiece")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass
class TrainedVocabulary:
    """A vocabulary that SentencePiece trained."""

    reference: Any

    def from_gguf(self, path: Path, architecture: str = "llama", **fields: object) -> Tokenizer:
        """Return the same tokenizer, read from a GGUF file."""
        reference, ids = self.reference, range(self.reference.get_piece_size())
        types = [self._type(index) for index in ids]
        texts = [reference.id_to_piece(index) for index in ids]
        # llama.cpp's converter writes them as they read.
        texts = [
            text.replace("▁", " ") if kind == USER_DEFINED else text
            for text, kind in zip(texts, types, strict=True)
        ]
        scores = [reference.get_score(index) for index in ids]
        fields = {"scores": scores, "bos_token_id": 1, **fields}
        return tokenizer_from_gguf(path, "llama", texts, types, fields, architecture)

    def _type(self, index: int) -> int:
        reference = self.reference
        if reference.is_unknown(index):
            return UNKNOWN
        if reference.is_control(index):
            return CONTROL
        if reference.is_byte(index):
            return BYTE
        return USER_DEFINED if reference.id_to_piece(index) in SYMBOLS else NORMAL


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


def train(**how: Any) -> TrainedVocabulary:
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
    return TrainedVocabulary(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()))


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
def test_ids_and_texts_equal_sentencepiece(
    tmp_path: Path, how: dict[str, Any], fields: dict[str, bool]
) -> None:
    trained = train(**how)
    tokenizer, reference = trained.from_gguf(tmp_path / "m.gguf", **fields), trained.reference
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text)
        if how["byte_fallback"]:
            assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)
    if how is LIKE_GEMMA:
        assert "  a\n\n<tool>" in tokenizer.decode(tokenizer.encode("  a\n\n<tool>").ids)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("llama2")
    return codec(folder, train(**LIKE_LLAMA2).from_gguf(folder / "m.gguf"))


def test_ids_equal_transformers_llama(llama2: TextCodec) -> None:
    """Except for leading spaces: SentencePiece adds another one, transformers 5 does not."""
    tokenizer = llama2.tokenizer
    reference = LlamaTokenizer(vocab=tokenizer.get_vocab(), merges=_merges(tokenizer))
    for text in (text for text in TEXTS if not text.startswith(" ")):
        ids = reference.encode(text, add_special_tokens=False)
        assert llama2.encode(text) == ids
        assert llama2.decode(ids) == reference.decode(ids)


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def test_bos_is_prepended_and_cannot_be_written_as_text(llama2: TextCodec) -> None:
    assert llama2.opening_ids == [1]
    ids = llama2.encode("<s>a</s> <unk> <0x0A>")
    assert not {0, 1, 2} & set(ids)
    assert llama2.decode(ids) == "<s>a</s> <unk> <0x0A>"
    # Each text behind a control token opens with a space, as llama.cpp has it.
    hi = llama2.encode("hi")
    assert llama2.encode("<s>hi</s>hi", special=True) == [1, *hi, 2, *hi]


def test_phi3_control_tokens_consume_following_spaces(tmp_path: Path) -> None:
    trained = train(**LIKE_LLAMA2, control_symbols=["<|user|>"])
    tokenizer = trained.from_gguf(tmp_path / "m.gguf", "phi3")
    hi = tokenizer.encode("hi", add_special_tokens=False).ids
    user = tokenizer.token_to_id("<|user|>")
    assert tokenizer.encode("<|user|>\nhi<s> hi").ids == [
        1,
        user,
        *hi,
        1,
        *tokenizer.encode(" hi").ids[1:],
    ]


@settings(max_examples=examples(200))
@given(ids=st.lists(st.integers(0, 1499) | st.integers(3, 258), max_size=30), skip=st.booleans())
def test_streamed_pieces_join_to_the_text(llama2: TextCodec, ids: list[int], skip: bool) -> None:
    whole = llama2.decode(ids, skip_special=skip)
    stream = llama2.piece_stream(skip)
    given_so_far = ""
    for index in ids:
        given_so_far += stream.push(index)
        assert whole.startswith(given_so_far)
    assert given_so_far + stream.flush() == whole


@settings(max_examples=examples(200))
@given(text=st.text(max_size=30))
def test_text_round_trips_whole_and_streamed(llama2: TextCodec, text: str) -> None:
    ids = llama2.encode(text)
    # A ▁ is how a space is written.
    assert llama2.decode(ids) == text.replace("▁", " ")
    pieces = list(map(llama2.piece_stream().push, ids))
    assert "".join(pieces) == llama2.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_complete_character_survives_a_broken_one_after_it(llama2: TextCodec) -> None:
    first = llama2.tokenizer.token_to_id("<0x00>")
    ids = [first + byte for byte in b"\xe6\x97\xa5\xe6"]
    assert llama2.decode(ids) == "日\ufffd"
    stream = llama2.piece_stream()
    assert [stream.push(index) for index in ids] == ["", "", "日", ""]
    assert stream.flush() == "\ufffd"


@settings(max_examples=examples(200))
@given(
    pieces=st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=12),
    texts=st.lists(st.text("ab", max_size=20), min_size=5, max_size=5),
)
def test_merges_by_score_equal_sentencepiece(pieces: list[str], texts: list[str]) -> None:
    """For any order of scores, most of which SentencePiece's trainer would never produce."""
    scores = {piece: -float(rank) for rank, piece in enumerate(["a", "b", *pieces])}
    vocab = {piece: index for index, piece in enumerate(scores)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges_by_score(scores)))
    for text in texts:
        assert tokenizer.encode(text).tokens == greedy(text, scores)


def greedy(text: str, scores: dict[str, float]) -> list[str]:
    """Merge by SentencePiece's rule: the neighbours with the highest score, leftmost first."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_gemma_4_tokenizer_equals_transformers(tmp_path: Path) -> None:
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
    reference = GemmaTokenizer(vocab=trained.get_vocab(), merges=merges)
    texts = [text for text, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    types = [
        UNKNOWN if t == "<unk>" else CONTROL if t in specials else BYTE if t in BYTES else NORMAL
        for t in texts
    ]
    tokenizer = tokenizer_from_gguf(
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
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text).ids == [2, *ids]
        assert tokenizer.decode(ids) == reference.decode(ids) == text


@pytest.mark.parametrize("bos", ["<s>", "a b", "x:y", "$B"])
def test_bos_may_be_any_text(tmp_path: Path, bos: str) -> None:
    tokens, types = [*BYTES, "a", bos], [*[BYTE] * 256, NORMAL, CONTROL]
    fields = {"scores": [0.0] * 258, "bos_token_id": 257, "add_space_prefix": False}
    assert tokenizer_from_gguf(tmp_path / "m.gguf", "llama", tokens, types, fields).encode(
        "a"
    ).ids == [257, 256]


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
def test_incomplete_vocabulary_is_refused(
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
        tokenizer_from_gguf(tmp_path / "m.gguf", "llama", tokens, types, fields)


def test_types_are_inferred_if_the_file_has_none(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁ab"]
    fields = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields["scores"] = [0.0] * 260 + [-3.0, -4.0, -2.0, -1.0]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5]
    whole = tokenizer_from_gguf(tmp_path / "whole.gguf", "llama", tokens, types, fields)
    with pytest.warns(RuntimeWarning, match=r"tokenizer\.ggml\.token_type"):
        tokenizer = tokenizer_from_gguf(tmp_path / "m.gguf", "llama", tokens, [], fields)
    for text in ("ab ab", "a</s>b<unk>", "日 <0x41>"):
        assert tokenizer.encode(text).ids == whole.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) == whole.decode(whole.encode(text).ids)
