"""The bytes that each token stands for inside a text."""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders

_ANCHOR = "x"  # a token in front of the one that is decoded, which no decoder step changes
# Steps that work on the bytes of single tokens, or on the whole text and not on one token.
_BYTE_LEVEL, _BYTE_FALLBACK, _WHOLE_TEXT = "ByteLevel", "ByteFallback", "Fuse"


class TokenBytes:
    """What each token of a tokenizer adds to a text that it stands in the middle of.

    Decoding a token alone treats it as the beginning of a text: a SentencePiece token loses the
    space it opens with, and a token that holds a part of a character becomes U+FFFD. The bytes
    given here are neither changed nor lost, so that those of all tokens, joined, are the text.
    SentencePiece tokenizers put a space before a text (the dummy prefix), and decoding takes it
    away again: here it is still there, as a part of the first token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._steps = list(_steps(tokenizer.decoder))
        kinds = [step["type"] for step in self._steps]
        self._byte_level = _BYTE_LEVEL in kinds
        self._byte_fallback = _BYTE_FALLBACK in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._added = {index: token.content for index, token in added.items()}
        self._decoders = [
            _decoder(step)
            for step in self._steps[: kinds.index(_WHOLE_TEXT) if _WHOLE_TEXT in kinds else None]
            if step["type"] not in (_BYTE_LEVEL, _BYTE_FALLBACK)
        ]
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The bytes of a token; b"" for an id beyond the vocabulary."""
        if token not in self._known:
            self._known[token] = self._of(token)
        return self._known[token]

    def _of(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            # The text of an added token is plain, that of all others is in GPT-2's alphabet.
            return text.encode() if token in self._added else _from_alphabet(text)
        if self._byte_fallback and (byte := _fallback_byte(text)) is not None:
            return byte
        if not self._steps:
            return f" {text}".encode()  # without a decoder, tokens are joined by spaces
        for decoder in self._decoders:
            text = _inside(decoder, text)
        return text.encode()


def _steps(decoder: decoders.Decoder | None) -> Iterable[dict[str, Any]]:
    """The decoder's steps as they stand in tokenizer.json, in order."""
    pending = [] if decoder is None else [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            yield step


def _decoder(step: dict[str, Any]) -> decoders.Decoder:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(step).encode())
    return decoder


def _inside(decoder: decoders.Decoder, text: str) -> str:
    """A token's text after one step, where another token comes before it."""
    alone, after = decoder.decode([_ANCHOR]), decoder.decode([_ANCHOR, text])
    return after.removeprefix(alone) if after.startswith(alone) else decoder.decode([text])


def _fallback_byte(text: str) -> bytes | None:
    """The byte that a token such as <0xE6> stands for."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        byte = bytes.fromhex(text[3:5])
    except ValueError:
        return None
    return byte if len(byte) == 1 else None


def _from_alphabet(text: str) -> bytes:
    """The bytes of a token's text in GPT-2's alphabet; what is none of it stands for itself."""
    if not _ALPHABET.keys() >= set(text):
        return text.encode()
    return bytes(_ALPHABET[character] for character in text)


def _alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: printable ones are themselves, others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


_ALPHABET = _alphabet()
