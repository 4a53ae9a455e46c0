"""The tokenizer built from a GGUF vocabulary."""

import inspect
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.gguf.vocabulary import special_token
from kvkeep.models.text.codec import TextCodec

TEXTS = [
    "",
    " ",
    "Hello world",
    "don't I'LL we've   spaces\t\ttabs\n\n\n  indented  \r\n  end   ",
    "def f(x):\n\treturn {k: v**2 for k, v in x.items()}  # 12345 3.14159\n",
    "1234567890 1,000,000 2026-01-31 0x1F 1e-5",
    "é café naïve Ünïcödé ñ ß œ",
    "e\u0301 combining, nbsp\u00a0, wide\u3000space, zero\u200bwidth",
    "日本語のテキスト 中文字符 한국어 العربية עברית हिन्दी ไทย",
    "🎉 👨‍👩‍👧‍👦 🇫🇷 👍🏽 ∑∫√ ←↑→ 𝔘𝔫𝔦",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b<repo_name>c <|im_start|><|im_start|>",
    "<|im_start |> <|im_end <im_end|>",
    inspect.getsource(json),
]


def test_default_model_tokenizes_as_in_transformers(
    smollm2_folder: Path, smollm2_gguf: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    codec = TextCodec.open(smollm2_folder)
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        assert codec.encode(text, special=True) == ids
        as_text = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert codec.encode(text) == as_text
        assert codec.decode(ids) == reference.decode(ids, skip_special_tokens=False)
        without_special = reference.decode(ids, skip_special_tokens=True)
        assert codec.decode(ids, skip_special=True) == without_special
    assert codec.vocab_size == len(reference)


def test_smollm_splits_digits_of_every_script(smollm2_folder: Path) -> None:
    """transformers drops this rule when it loads GGUF, so that only ASCII digits agree."""
    tokenizer = TextCodec.open(smollm2_folder).tokenizer
    text = "a 12٣٤५½x²"
    spans = [text[start:end] for start, end in tokenizer.encode(text).offsets]
    digits = [character for character in text if unicodedata.category(character)[0] == "N"]
    assert [span for span in dict.fromkeys(spans) if span in digits] == digits
    assert not any(len(span) > 1 and set(span) & set(digits) for span in spans)


def write(path: Path, kind: str, pre: str | None, **fields: object) -> GgufFile:
    """Write all bytes, merges for " 123" from its end, "he", and "hell", which has no merge."""
    tokens = [*sorted(ByteLevel.alphabet()), "he", "hell", "12", "123", "<|start|>", "<tool>"]
    tokens[-1] = fields.get("last", "<tool>")
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    if types := fields.get("types", [1] * 260 + [3, 4]):
        writer.add_token_types(types)
    writer.add_token_merges(fields.get("merges", ["h e", "1 2", "12 3"]))
    writer.add_bos_token_id(fields.get("bos", 260))
    if "eos" in fields:
        writer.add_eos_token_id(fields["eos"])
    if "add_bos" in fields:
        writer.add_add_bos_token(bool(fields["add_bos"]))
    if "add_eos" in fields:
        writer.add_add_eos_token(bool(fields["add_eos"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize(
    ("pre", "number", "word", "composed"),
    [
        ("gpt-2", ["123", "4"], ["he", "l", "l"], False),
        ("smollm", ["1", "2", "3", "4"], ["he", "l", "l"], False),
        ("qwen2", ["1", "2", "3", "4"], ["he", "l", "l"], True),
        ("llama-bpe", ["123", "4"], ["hell"], False),
    ],
)
def test_family_splits_text_into_expected_words(
    tmp_path: Path, pre: str, number: list[str], word: list[str], composed: bool
) -> None:
    tokenizer = build_tokenizer(write(tmp_path / "m.gguf", "gpt2", pre))
    assert pieces(tokenizer, "1234") == number
    assert pieces(tokenizer, "hell") == word
    # Qwen composes accents before it splits: two bytes, not three.
    assert (len(pieces(tokenizer, "e\u0301")) == 2) is composed
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected = unicodedata.normalize("NFC", text) if composed else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write(tmp_path / "m.gguf", "gpt2", "gpt-2"))
    ids = tokenizer.encode("a<|start|><tool>", add_special_tokens=False).ids
    assert ids[1:] == [260, 261]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"


@pytest.mark.parametrize(
    ("pre", "fields", "opening", "closing"),
    [
        ("gpt-2", {}, [], []),
        ("gpt-2", {"add_bos": True}, [260], []),
        ("llama-bpe", {}, [260], []),
        ("llama-bpe", {"add_bos": False}, [], []),
        ("qwen2", {"eos": 260}, [], []),
        ("qwen2", {"eos": 260, "add_eos": False}, [], []),
        ("qwen2", {"eos": 260, "add_eos": True}, [], [260]),  # as of Qwen3-Embedding
        ("llama-bpe", {"eos": 256, "add_eos": True}, [260], [256]),
        ("qwen2", {"add_eos": True}, [], []),
    ],
)
def test_bos_and_eos_are_added_only_if_configured(
    tmp_path: Path, pre: str, fields: dict[str, Any], opening: list[int], closing: list[int]
) -> None:
    tokenizer = build_tokenizer(write(tmp_path / "m.gguf", "gpt2", pre, **fields))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.open(tmp_path)
    assert (codec.opening_ids, codec.closing_ids) == (opening, closing)
    assert len(codec.encode("x")) == 1


@pytest.mark.parametrize(
    ("kind", "pre", "named"),
    [
        ("t5", "default", "'t5'"),
        ("bert", None, "'bert'"),
        ("gpt2", "superbpe", "'superbpe'"),
    ],
)
def test_unsupported_tokenizers_are_refused_by_name(
    tmp_path: Path, kind: str, pre: str | None, named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        build_tokenizer(write(tmp_path / "m.gguf", kind, pre))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"merges": ["he"]}, "malformed merge"),
        ({"types": [1, 1]}, "token types"),
        ({"merges": ["zzz h"]}, "merges"),
    ],
)
def test_contradictory_vocabulary_is_refused(
    tmp_path: Path, fields: dict[str, object], complaint: str
) -> None:
    with pytest.raises(BadModelFile, match=complaint):
        build_tokenizer(write(tmp_path / "m.gguf", "gpt2", "gpt-2", **fields))


def read(file: GgufFile) -> Tokenizer:
    special_token(file, "eos")
    return build_tokenizer(file)


# What llama.cpp (0.3.36) makes of the same files, where it loads them: it ends on two tokens of the
# same text, of which earlier versions found the last.
@pytest.mark.parametrize(
    ("pre", "fields", "warning", "text", "tokens"),
    [
        (
            None,
            {},
            "does not name its pre-tokenizer",
            "a?!1234 he",
            ["a", "?", "!", "123", "4", "Ġ", "he"],
        ),
        ("default", {}, "does not name its pre-tokenizer", "he==12 ", ["he", "=", "=", "12", "Ġ"]),
        ("gpt-2", {"types": None}, "control tokens", "<|start|>he", ["<|start|>", "he"]),
        ("gpt-2", {"bos": 900, "add_bos": True}, "900 as its bos token", "he", ["he"]),
        ("gpt-2", {"eos": 900}, "900 as its eos token", "he", ["he"]),
        ("gpt-2", {"last": "he"}, r"1 tokens with the same text.*\[256\]", "he", ["he"]),
    ],
)
def test_ambiguous_vocabulary_is_loaded_with_a_warning(
    tmp_path: Path,
    pre: str | None,
    fields: dict[str, object],
    warning: str,
    text: str,
    tokens: list[str],
) -> None:
    file = write(tmp_path / "m.gguf", "gpt2", pre, **fields)
    with pytest.warns(RuntimeWarning, match=warning):
        tokenizer = read(file)
    encoded = tokenizer.encode(text)
    assert encoded.tokens == tokens
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 262  # every id has a token


def test_token_with_a_role_keeps_a_duplicate_text(tmp_path: Path) -> None:
    tokens = {"last": "<|start|>", "types": [1] * 260 + [3, 3]}
    for bos in (260, 261):
        file = write(tmp_path / "m.gguf", "gpt2", "gpt-2", bos=bos, add_bos=True, **tokens)
        with pytest.warns(RuntimeWarning, match=rf"\[{521 - bos}\]"):
            tokenizer = build_tokenizer(file)
        assert tokenizer.encode("he").ids == [bos, 256]
        assert tokenizer.encode("<|start|>", add_special_tokens=False).ids == [bos]
