"""Byte-level BPE from GGUF: how each family splits words, against transformers and by example."""

import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer,
    CohereTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from kvkeep.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.models.vocabularies import CONTROL, NORMAL, TEXTS, tokenizer_from_gguf, trained_tokens

STOP = "<|stop|>"


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    return trained_tokens()


@pytest.fixture
def read(tmp_path: Path, trained: tuple[dict[str, int], list[tuple[str, str]]]) -> Callable:
    vocab, merges = trained
    tokens = sorted(vocab, key=vocab.__getitem__)

    def read(pre: str) -> Tokenizer:
        return tokenizer_from_gguf(
            tmp_path / "m.gguf",
            "gpt2",
            [*tokens, STOP],
            [*[NORMAL] * len(tokens), CONTROL],
            {
                "pre": pre,
                "merges": [" ".join(merge) for merge in merges],
                "bos_token_id": len(tokens),
            },
        )

    return read


@pytest.mark.parametrize(
    ("pre", "tokenizer_class"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("phi-2", GPT2Tokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
        ("olmo", GPTNeoXTokenizer),
    ],
)
def test_ids_equal_transformers_class(trained, read, pre: str, tokenizer_class: type) -> None:
    vocab, merges = trained
    reference = tokenizer_class(vocab=vocab, merges=merges)
    tokenizer = read(pre)
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.decode(ids) == reference.decode(ids)


# The names for which src/llama-vocab.cpp of llama.cpp sets ignore_merges.
WHOLE_WORDS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("glm4", "glm5", "tekken", "youtu", "minicpm5"),
)


def test_llama3_ids_equal_transformers_converter(trained, read) -> None:
    vocab, merges = trained
    for pre in ("llama-bpe", "lfm2", "falcon3", "pixtral", "dbrx", "glm4", "chatglm-bpe"):
        converter = TikTokenConverter()
        model = BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS)
        converter.tokenizer = lambda model=model: Tokenizer(model)
        reference, tokenizer = converter.converted(), read(pre)
        for text in TEXTS:
            ids = reference.encode(text).ids
            assert tokenizer.encode(text, add_special_tokens=False).ids == ids


def test_a_word_that_is_a_token_is_encoded_as_it_where_llama_cpp_does(tmp_path: Path) -> None:
    # The merges that come first lead past the token "Ġabc".
    tokens = [*sorted(ByteLevel.alphabet()), "Ġa", "bc", "abc", "Ġabc"]
    merges, types = ["Ġ a", "b c", "a bc", "Ġ abc"], [NORMAL] * len(tokens)
    for pre in {*PRE_TOKENIZERS, *WHOLE_WORDS} - {"default"}:
        fields = {"pre": pre, "merges": merges, "add_bos_token": False}
        tokenizer = tokenizer_from_gguf(tmp_path / "m.gguf", "gpt2", tokens, types, fields)
        expected = ["Ġabc"] if pre in WHOLE_WORDS else ["Ġa", "bc"]
        assert (pre, tokenizer.encode(" abc").tokens) == (pre, expected)


@pytest.mark.parametrize("pre", ["gpt-4o", "llama4", "tekken", "qwen35", "megrez"])
def test_words_equal_transformers_for_the_same_file(tmp_path: Path, read, pre: str) -> None:
    read(pre)
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf").backend_tokenizer
    for text in TEXTS:
        words = reference.pre_tokenizer.pre_tokenize_str(text)
        assert PRE_TOKENIZERS[pre].build().pre_tokenize_str(text) == words


TEXT = "It'S XMLHttp a1234 हिन्दी日本カナ !x?\n\n  $a/b"
"""With capitals inside a word, a mark, kana, signs before a letter, and two newlines."""


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It|'|S| XMLHttp| a|1234| ह|ि|न|्|द|ी|日本カナ| !|x|?|\n\n | $|a|/|b"),
        ("smollm", "It|'|S| XMLHttp| a|1|2|3|4| ह|ि|न|्|द|ी|日本カナ| !|x|?|\n\n | $|a|/|b"),
        ("llama-bpe", "It|'S| XMLHttp| a|123|4| ह|िन|्द|ी日本カナ| !|x|?\n\n| | $|a|/b"),
        ("qwen2", "It|'S| XMLHttp| a|1|2|3|4| ह|िन|्द|ी日本カナ| !|x|?\n\n| | $|a|/b"),
        ("qwen35", "It|'S| XMLHttp| a|1|2|3|4| हिन्दी日本カナ| !|x|?\n\n| | $|a|/b"),
        ("laguna", "It|'S| XMLHttp| a|1|2|3|4| ह|िन|्द|ी日本カナ| !|x|?|\n\n| | $|a|/b"),
        ("gpt-4o", "It'S| XMLHttp| a|123|4| हिन्दी日本カナ| !|x|?\n\n| | $|a|/b"),
        ("tiny_aya", "It'S| XMLHttp| a|1|234| हिन्दी日本カナ| !|x|?\n\n| | $|a|/b"),
        ("kimi-k2", "It'S| XMLHttp| a|123|4| हिन्दी|日本|カナ| !|x|?\n\n| | $|a|/b"),
        ("youtu", "It'S| XMLHttp| a|1|2|3|4| हिन्दी|日本カナ| !|x|?\n\n| | $|a|/b"),
        ("deepseek-v3", "It|'S| XMLHttp| a|123|4| हिन्दी|日本カナ| !|x|?\n\n| | $|a|/b"),
        (
            "deepseek-coder",
            "It|'|S| XMLHttp| a|1|2|3|4| |ह|ि|न|्|द|ी|日本カナ| !|x|?|\n|\n|  $|a|/|b",
        ),
        ("exaone-moe", "It|'S| XMLHttp a|1|2|3|4| हिन्दी日本カナ| !|x|?\n|\n| | $|a|/b"),
    ],
)
def test_family_splits_text_into_expected_words(pre: str, words: str) -> None:
    assert split(pre, TEXT) == words.split("|")


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", [" " * 6, " x", "\n\n\n", "y", "!\n"]),
        ("jais-2", [" " * 4, " " * 2, " x", "\n\n\n", "y", "!\n"]),
        ("bailingmoe", [" " * 6, " x", "\n\n\n", "y", "!\n"]),
        ("seed-coder", [" " * 6, " x", "\n\n\n", "y", "!", "\n"]),
    ],
)
def test_runs_of_spaces_and_newlines_are_split_as_expected(pre: str, words: list[str]) -> None:
    assert split(pre, " " * 7 + "x\n\n\ny!\n") == words


def split(pre: str, text: str) -> list[str]:
    pieces = PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_text_round_trips(read, pre: str) -> None:
    tokenizer = read(pre)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        assert tokenizer.decode(ids) == expected
    assert tokenizer.encode(f"a{STOP}", add_special_tokens=False).tokens == ["a", STOP]
    assert (tokenizer.encode("a").tokens[0] == STOP) is PRE_TOKENIZERS[pre].add_bos
