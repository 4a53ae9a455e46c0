"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF file."""

from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from tokenizers.processors import TemplateProcessing

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf_file import GgufFile, shown

_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file describes.

    Raises UnsupportedModel for another kind of tokenizer or an unknown way to split text into
    words, BadModelFile if the vocabulary is incomplete.
    """
    kind = file.text("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        raise UnsupportedModel(
            f"{file.path} has no tokenizer, so it cannot read text: take a file of the model that "
            "has one, or its safetensors folder"
        )
    if kind != "gpt2":
        raise UnsupportedModel(
            f"the GGUF tokenizer kind {kind!r} is not supported, only 'gpt2' (byte-level BPE); "
            "use the model's safetensors folder, which has a tokenizer.json"
        )
    words = file.text("tokenizer.ggml.pre", "(none)")
    if words not in _WORD_SPLITTERS:
        raise UnsupportedModel(
            f"the GGUF pre-tokenizer {words!r} is not supported; supported: "
            f"{', '.join(sorted(_WORD_SPLITTERS))}. "
            "Use the model's safetensors folder, which has a tokenizer.json"
        )
    tokens = file.texts("tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_byte_pairs(file, tokens, whole_words=words in _LLAMA3))
    if words in _QWEN2:
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _WORD_SPLITTERS[words]
    tokenizer.decoder = ByteLevelDecoder()
    _add_special_tokens(tokenizer, file, tokens)
    if file.metadata.get("tokenizer.ggml.add_bos_token", words in _LLAMA3):
        _open_with_bos(tokenizer, file, tokens)
    return tokenizer


def special_token(file: GgufFile, role: str) -> str | None:
    """The text of the token that the file names for a role: "bos", "eos", "unknown", "padding"."""
    index = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    if index is None:
        return None
    tokens = file.texts("tokenizer.ggml.tokens")
    if type(index) is not int or not 0 <= index < len(tokens):
        raise BadModelFile(
            f"{file.path} names {shown(index)} as its {role} token, outside its {len(tokens)} "
            "tokens; fetch the file again"
        )
    return tokens[index]


def _byte_pairs(file: GgufFile, tokens: list[str], whole_words: bool) -> BPE:
    """whole_words: a word that is a token is taken as it is, even where no merges lead to it."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = list(_merges(file))
    # The library raises bare Exception for all that can be wrong with them.
    try:
        return BPE(vocab=vocab, merges=merges, ignore_merges=whole_words)
    except Exception as error:
        raise BadModelFile(
            f"{file.path} has merges that do not fit its tokens ({error}); fetch it again"
        ) from error


def _merges(file: GgufFile) -> Iterator[tuple[str, str]]:
    for merge in file.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise BadModelFile(f"{file.path} has a malformed merge {merge!r}; fetch it again")
        yield left, right


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    types = file.numbers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise BadModelFile(
            f"{file.path} has {len(tokens)} tokens and {len(types)} token types; fetch it again"
        )
    # Their texts are in the vocabulary already, so each keeps its id.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _open_with_bos(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    bos = special_token(file, "bos")
    if bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )


def _split_by(pattern: str) -> Any:
    return Sequence(
        [
            Split(Regex(pattern), behavior="isolated", invert=False),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# ByteLevel's own pattern is GPT-2's. The other two are the published patterns of Llama 3 and
# Qwen 2; they differ in how many digits make a word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_WORD_SPLITTERS: dict[str, Any] = {
    "gpt-2": ByteLevel(add_prefix_space=False),
    "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    **{name: _split_by(_WORDS.format(digits="{1,3}")) for name in _LLAMA3},
    **{name: _split_by(_WORDS.format(digits="")) for name in _QWEN2},
}
