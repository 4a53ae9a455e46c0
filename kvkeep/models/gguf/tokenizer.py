"""Building a `tokenizers.Tokenizer` from the vocabulary in a GGUF file.

There are three kinds: "gpt2", byte-level BPE; "llama", SentencePiece's BPE, with ▁ for a space;
and "gemma4", BPE with ▁ and explicit merges. The last two do not split a text into words, and
encode a character that is not a token as its bytes.
"""

import warnings
from collections.abc import Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from kvkeep.models.gguf.vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    special_token_id,
)

_DEFAULT_PRE_TOKENIZER = "default"  # of files that name none
_SPACE_MARK = "▁"  # SentencePiece's space
_NOT_PIECES = (UNKNOWN, CONTROL, BYTE)  # types of tokens that no text is merged to


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes. Raises UnsupportedModel, BadModelFile."""
    kind = file.string("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        raise UnsupportedModel(
            f"{file.path} has no tokenizer: use a file of the model that has one, or its "
            "safetensors folder"
        )
    if kind not in _BUILDERS:
        raise UnsupportedModel(
            f"the GGUF tokenizer kind {kind!r} is not supported; supported: 'gpt2' (byte-level "
            "BPE), 'llama' (SentencePiece) and 'gemma4'. Use the model's safetensors folder, which "
            "has a tokenizer.json"
        )
    pre_tokenizer_name = _pre_tokenizer_name(file)
    if kind == "gpt2" and pre_tokenizer_name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"the GGUF pre-tokenizer {pre_tokenizer_name!r} is not supported; supported: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. "
            "Use the model's safetensors folder, which has a tokenizer.json"
        )
    if kind == "gpt2" and pre_tokenizer_name == _DEFAULT_PRE_TOKENIZER:
        warnings.warn(
            f"{file.path} does not name its pre-tokenizer (tokenizer.ggml.pre): llama.cpp's "
            "default is used, which few models were trained on; use a newer file of the model",
            RuntimeWarning,
            stacklevel=2,
        )
    vocabulary = Vocabulary.read(file)
    tokenizer = _BUILDERS[kind](vocabulary)
    _add_special_tokens(tokenizer, vocabulary)
    add_bos = kind != "gpt2" or PRE_TOKENIZERS[pre_tokenizer_name].add_bos
    # Some files of Gemma 4 wrongly state that they have no BOS; llama.cpp ignores that as well.
    add_bos = kind == "gemma4" or file.boolean("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = file.boolean("tokenizer.ggml.add_eos_token", default=False)
    _add_around_texts(tokenizer, vocabulary, add_bos, add_eos)
    return tokenizer


def _pre_tokenizer_name(file: GgufFile) -> str:
    return file.string("tokenizer.ggml.pre", "") or _DEFAULT_PRE_TOKENIZER


def _build_byte_level(vocabulary: Vocabulary) -> Tokenizer:
    settings = PRE_TOKENIZERS[_pre_tokenizer_name(vocabulary.file)]
    tokenizer = Tokenizer(
        vocabulary.build_bpe(vocabulary.merges(), ignore_merges=settings.ignore_merges)
    )
    if settings.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = settings.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Build SentencePiece's BPE, as in Llama 2, Mistral, Phi-3 and Gemma 1 to 3."""
    file = vocabulary.file
    add_space_prefix = file.boolean("tokenizer.ggml.add_space_prefix", default=True)
    remove_extra_spaces = file.boolean("tokenizer.ggml.remove_extra_whitespaces", default=False)
    entries = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores(), strict=True)
    # Control tokens are not pieces, so the text of one is not encoded as that token.
    pieces = {token: score for token, token_type, score in entries if token_type not in _NOT_PIECES}
    tokenizer = _build_bpe_with_bytes(vocabulary, merges_by_score(pieces))
    steps: list[normalizers.Normalizer] = []
    if remove_extra_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z|(?<= ) +"), ""))
    if add_space_prefix:
        steps.append(normalizers.Prepend(_SPACE_MARK))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE_MARK)])
    tokenizer.decoder = _build_decoder(strip_space_prefix=add_space_prefix)
    return tokenizer


def _build_gemma4(vocabulary: Vocabulary) -> Tokenizer:
    """Build Gemma 4's BPE: the file has merges, and no token mixes newlines with other text."""
    tokenizer = _build_bpe_with_bytes(vocabulary, vocabulary.merges())
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    tokenizer.pre_tokenizer = Split(Regex(r"\n+"), behavior="isolated")
    tokenizer.decoder = _build_decoder(strip_space_prefix=False)
    return tokenizer


def merges_by_score(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the BPE merges for SentencePiece's pieces and their scores.

    A merge is a pair of pieces that join to a third, and ranks by the third's score, highest first.
    SentencePiece merges the leftmost neighbours that join to the piece with the highest score. BPE
    with these merges does the same, since SentencePiece trains no two pieces with the same score.

    Example: pieces a, b, ab, abb give (a, b), (ab, b).
    """
    lengths = {len(piece) for piece in pieces}  # skips most cuts without a look-up
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -pieces[piece])
        for cut in range(1, len(piece))
        if cut in lengths and piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _build_bpe_with_bytes(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> Tokenizer:
    """Build a BPE that encodes characters outside the vocabulary as tokens of their bytes."""
    unknown = next(iter(vocabulary.tokens_of_type(UNKNOWN)), None)
    byte_tokens = (f"<0x{byte:02X}>" for byte in range(256))
    missing = [token for token in byte_tokens if token not in vocabulary.id_by_token]
    # Without any byte tokens, SentencePiece encodes unknown characters as the unknown token.
    if missing and (unknown is None or len(missing) < 256):
        raise BadModelFile(
            f"{vocabulary.file.path} lacks {len(missing)} of the 256 byte tokens, the first being "
            f"{missing[0]}; fetch it again"
        )
    return Tokenizer(
        vocabulary.build_bpe(merges, unk_token=unknown, fuse_unk=True, byte_fallback=not missing)
    )


def _build_decoder(strip_space_prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip_space_prefix else steps)


_BUILDERS = {"gpt2": _build_byte_level, "llama": _build_sentencepiece, "gemma4": _build_gemma4}


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    special_tokens = set(vocabulary.tokens_of_type(CONTROL, UNKNOWN))
    # Their texts are in the vocabulary already, so the tokens keep their ids.
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=token in special_tokens,
                normalized=False,
                rstrip=token in special_tokens and _strips_following_space(token, vocabulary.file),
            )
            for token in vocabulary.tokens_of_type(CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )


def _strips_following_space(token: str, file: GgufFile) -> bool:
    """Whether a control token consumes the spaces and newlines that follow it.

    GGUF does not state it. In Phi-3's tokenizer.json, the tokens added to Llama 2's and </s> do.
    """
    arch = file.string("general.architecture", "")
    is_phi3 = arch == "phi3" and file.string("tokenizer.ggml.model") == "llama"
    return is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")


def _add_around_texts(
    tokenizer: Tokenizer, vocabulary: Vocabulary, add_bos: bool, add_eos: bool
) -> None:
    """Add BOS before a whole text and EOS, which embedding models are trained with, behind it."""
    wanted = {"bos": add_bos, "eos": add_eos}
    ids = {role: special_token_id(vocabulary.file, role) for role in wanted if wanted[role]}
    # By aliases: TemplateProcessing parses token texts, and fails for some with a colon.
    aliases = [
        {"id": role, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]}
        for role, token_id in ids.items()
        if token_id is not None
    ]
    if aliases:
        names = {alias["id"] for alias in aliases}
        pieces = [name for name in ("bos", "$A", "eos") if name == "$A" or name in names]
        tokenizer.post_processor = TemplateProcessing(single=pieces, special_tokens=aliases)
