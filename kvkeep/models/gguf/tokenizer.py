"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF file."""

import warnings

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.sentencepiece import from_merges, from_scores
from kvkeep.models.gguf.splitters import SPLITTERS
from kvkeep.models.gguf.vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    special_id,
)

_DEFAULT = "default"  # in the place of a name


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that a GGUF file describes: byte-level BPE, SentencePiece's BPE or Gemma 4's.

    Raises UnsupportedModel for another kind of tokenizer or an unknown way to split text into
    words, BadModelFile if the vocabulary is incomplete.
    """
    kind = file.text("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        raise UnsupportedModel(
            f"{file.path} has no tokenizer, so it cannot read text: take a file of the model that "
            "has one, or its safetensors folder"
        )
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"the GGUF tokenizer kind {kind!r} is not supported; supported: 'gpt2' (byte-level "
            "BPE), 'llama' (SentencePiece) and 'gemma4'. Use the model's safetensors folder, which "
            "has a tokenizer.json"
        )
    if kind == "gpt2" and _words(file) not in SPLITTERS:
        raise UnsupportedModel(
            f"the GGUF pre-tokenizer {_words(file)!r} is not supported; supported: "
            f"{', '.join(sorted(SPLITTERS))}. "
            "Use the model's safetensors folder, which has a tokenizer.json"
        )
    if kind == "gpt2" and _words(file) == _DEFAULT:
        warnings.warn(
            f"{file.path} does not say how its text is split into words (tokenizer.ggml.pre): it "
            "is split as llama.cpp does by default, which few models were trained on; take a newer "
            "file of the model",
            RuntimeWarning,
            stacklevel=2,
        )
    vocabulary = Vocabulary.read(file)
    tokenizer = _KINDS[kind](vocabulary)
    _add_special_tokens(tokenizer, vocabulary)
    bos = kind != "gpt2" or SPLITTERS[_words(file)].bos
    # Some files of Gemma 4 say that they want none: llama.cpp does not believe them, either.
    if kind == "gemma4" or file.flag("tokenizer.ggml.add_bos_token", bos):
        _open_with_bos(tokenizer, vocabulary)
    return tokenizer


def _words(file: GgufFile) -> str:
    """The name of how the file's text is split into words."""
    return file.text("tokenizer.ggml.pre", "") or _DEFAULT


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    splitter = SPLITTERS[_words(vocabulary.file)]
    tokenizer = Tokenizer(
        vocabulary.byte_pairs(vocabulary.merges(), ignore_merges=splitter.whole_words)
    )
    if splitter.composed:
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = splitter.pre_tokenizer()
    tokenizer.decoder = ByteLevel()
    return tokenizer


_KINDS = {"gpt2": _byte_level, "llama": from_scores, "gemma4": from_merges}


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    special = set(vocabulary.of_type(CONTROL, UNKNOWN))
    # Their texts are in the vocabulary already, so each keeps its id.
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=token in special,
                normalized=False,
                rstrip=token in special and _takes_spaces(token, vocabulary.file),
            )
            for token in vocabulary.of_type(CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )


def _takes_spaces(token: str, file: GgufFile) -> bool:
    """Whether the spaces and newlines behind a control token belong to it.

    No file says so. Phi-3's tokenizer.json does, of those that came to Llama 2's and of </s>.
    """
    of_phi3 = (file.text("general.architecture", ""), file.text("tokenizer.ggml.model")) == (
        "phi3",
        "llama",
    )
    return of_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")


def _open_with_bos(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    bos = special_id(vocabulary.file, "bos")
    if bos is not None:
        # Under a name, since a template reads some texts, such as those with a colon, otherwise.
        token = {"id": "bos", "ids": [bos], "tokens": [vocabulary.tokens[bos]]}
        tokenizer.post_processor = TemplateProcessing(single="bos $A", special_tokens=[token])
