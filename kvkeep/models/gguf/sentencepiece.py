"""The tokenizers whose spaces are ▁: SentencePiece's, and Gemma 4's.

They know no words: BPE goes over a whole text. A character that is no token becomes its bytes.
"""

from collections.abc import Mapping

from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.pre_tokenizers import Split

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

_SPACE = "▁"


def from_scores(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2, Mistral, Phi-3 and Gemma 1 to 3 have it.

    Raises BadModelFile if scores or bytes are missing.
    """
    file = vocabulary.file
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    fewer_spaces = file.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    scores = zip(vocabulary.tokens, vocabulary.types, vocabulary.scores(), strict=True)
    # Nobody becomes a control token by writing its text.
    pieces = {token: score for token, kind, score in scores if kind not in _NO_PIECES}
    tokenizer = _falling_back_to_bytes(vocabulary, merges_by_score(pieces))
    tokenizer.normalizer = normalizers.Sequence(
        [
            *([normalizers.Replace(Regex(r"\A +| +\z|(?<= ) +"), "")] if fewer_spaces else []),
            *([normalizers.Prepend(_SPACE)] if prefix else []),
            normalizers.Replace(" ", _SPACE),
        ]
    )
    tokenizer.decoder = _decoder(prefix)
    return tokenizer


def from_merges(vocabulary: Vocabulary) -> Tokenizer:
    """Gemma 4's: the merges are in the file, and no token has both newlines and other text.

    Raises BadModelFile if merges or bytes are missing.
    """
    tokenizer = _falling_back_to_bytes(vocabulary, vocabulary.merges())
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = Split(Regex(r"\n+"), behavior="isolated")
    tokenizer.decoder = _decoder(prefix=False)
    return tokenizer


def merges_by_score(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a third, the one of greatest score first.

    SentencePiece merges the two neighbours that make the piece of greatest score, and of several
    such the leftmost. BPE with this order does the same wherever no two pieces score the same, as
    in what SentencePiece trained.

    Example: pieces a, b, ab, abb give (a, b), (ab, b).
    """
    lengths = {len(piece) for piece in pieces}
    by_score = sorted(pieces, key=lambda piece: -pieces[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in by_score
        for cut in range(1, len(piece))
        if cut in lengths and piece[:cut] in pieces and piece[cut:] in pieces
    ]


_NO_PIECES = (UNKNOWN, CONTROL, BYTE)


def _falling_back_to_bytes(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> Tokenizer:
    unknown = next(iter(vocabulary.of_type(UNKNOWN)), None)
    missing = [name for name in map(_byte_token, range(256)) if name not in vocabulary.ids]
    # SentencePiece can do without any, but then what is no token is the unknown one.
    if missing and (unknown is None or len(missing) < 256):
        raise BadModelFile(
            f"{vocabulary.file.path} lacks {len(missing)} of the 256 tokens for bytes, "
            f"{missing[0]} first; fetch it again"
        )
    return Tokenizer(
        vocabulary.byte_pairs(merges, unk_token=unknown, fuse_unk=True, byte_fallback=not missing)
    )


def _byte_token(byte: int) -> str:
    return f"<0x{byte:02X}>"


def _decoder(prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
