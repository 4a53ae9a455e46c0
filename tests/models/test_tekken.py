"""Mistral's tokenizer.json files with Llama 3's words, against transformers with its correction."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import AutoTokenizer

from kvkeep.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvkeep.models.text.codec import TextCodec
from tests.models.vocabularies import TEXTS, trained_tokens

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def model() -> BPE:
    """Tokens with unused ones up to more than 100,000."""
    vocab, merges = trained_tokens()
    vocab |= {f"unused {n}": n for n in range(len(vocab), 100_001)}
    return BPE(vocab, merges, ignore_merges=True)


def write_folder(folder: Path, model: BPE, words: str, **config: str) -> Path:
    tokenizer = Tokenizer(model)
    split = Split(Regex(words), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("model_type", "version", "is_corrected"),
    [
        ("mistral", "4.52.0.dev0", True),
        ("mistral3", "4.50.0", True),
        ("mistral3", "", True),
        ("mistral", "5.0.0", False),
        ("llama", "4.52.0", False),
    ],
)
def test_ids_equal_those_of_transformers_with_its_correction(
    tmp_path: Path, model: BPE, model_type: str, version: str, is_corrected: bool
) -> None:
    config = {"model_type": model_type} | ({"transformers_version": version} if version else {})
    folder = write_folder(tmp_path, model, _LLAMA3_WORDS, **config)
    reference = AutoTokenizer.from_pretrained(folder, fix_mistral_regex=True)
    codec = TextCodec.open(folder)
    uncorrected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    differences = 0
    for text in TEXTS:
        ids = codec.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        differences += ids != uncorrected.encode(text, add_special_tokens=False).ids
    assert (differences > 0) is is_corrected


def test_other_words_stay(tmp_path: Path, model: BPE) -> None:
    """A model of this type may have been trained on another tokenizer, or have the right one."""
    words = PRE_TOKENIZERS["qwen2"].patterns[0]
    folder = write_folder(tmp_path, model, words, model_type="mistral")
    unchanged = Tokenizer.from_file(str(folder / "tokenizer.json"))
    codec = TextCodec.open(folder)
    for text in TEXTS:
        assert codec.encode(text) == unchanged.encode(text, add_special_tokens=False).ids


def test_a_small_vocabulary_keeps_its_words(tmp_path: Path) -> None:
    alphabet = {token: n for n, token in enumerate([*sorted(ByteLevel.alphabet()), "12"])}
    folder = write_folder(
        tmp_path, BPE(alphabet, [("1", "2")]), _LLAMA3_WORDS, model_type="mistral"
    )
    assert TextCodec.open(folder).encode("12") == [256]
