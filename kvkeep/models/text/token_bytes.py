"""The bytes of single tokens, and decoding of tokens that are single bytes."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, decoders

_ANCHOR = "x"  # decoded before a token; no decoder step changes it
# Decoder steps that convert a token to bytes, and the one from which steps see the whole text.
_BYTE_LEVEL, _BYTE_FALLBACK, _WHOLE_TEXT = "ByteLevel", "ByteFallback", "Fuse"


class TokenBytes:
    """The bytes that each token contributes to the middle of a text.

    Decoding a token alone treats it as the beginning of a text: a SentencePiece token loses its
    leading space, and a token that holds a part of a character becomes U+FFFD. The bytes returned
    here are unchanged, so that the bytes of all tokens, joined, are the text. SentencePiece puts a
    space before a text (the dummy prefix), which decoding removes: here it stays, as a part of the
    first token.
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
        self._cache: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for an id beyond the vocabulary."""
        if token not in self._cache:
            self._cache[token] = self._compute(token)
        return self._cache[token]

    def _compute(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            # The text of an added token is plain; all others are in GPT-2's byte alphabet.
            return text.encode() if token in self._added else _from_byte_alphabet(text)
        if self._byte_fallback and (byte := _fallback_byte(text)) is not None:
            return byte
        if not self._steps:
            return f" {text}".encode()  # without a decoder, tokens are joined by spaces
        for decoder in self._decoders:
            text = _decode_inside(decoder, text)
        return text.encode()


def _steps(decoder: decoders.Decoder | None) -> Iterable[dict[str, Any]]:
    """Yield the decoder's steps in order, as tokenizer.json defines them."""
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


def _decode_inside(decoder: decoders.Decoder, text: str) -> str:
    """Return a token's text after one decoder step, behind another token."""
    prefix, both = decoder.decode([_ANCHOR]), decoder.decode([_ANCHOR, text])
    return both.removeprefix(prefix) if both.startswith(prefix) else decoder.decode([text])


def _fallback_byte(text: str) -> bytes | None:
    """Return the byte of a token such as <0xE6>; None for other tokens."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        byte = bytes.fromhex(text[3:5])
    except ValueError:
        return None
    return byte if len(byte) == 1 else None


def _from_byte_alphabet(text: str) -> bytes:
    """Decode text in GPT-2's byte alphabet. Text with other characters is returned as UTF-8."""
    if not _ALPHABET.keys() >= set(text):
        return text.encode()
    return bytes(_ALPHABET[character] for character in text)


def _alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet.

    Printable bytes are their own characters; the others are numbered from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


_ALPHABET = _alphabet()


class ByteTokens:
    """The byte-fallback tokens of a tokenizer (<0x00> to <0xFF>), if it has them.

    The library's decoder joins neighbouring byte tokens. One byte that is not part of a character
    turns the whole run into U+FFFD, complete characters before it included. Streamed text would
    then differ from the final text; `replace_invalid` prevents that.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self._tokens = [token for token in tokens if token is not None]
        if len(self._tokens) < 256 or b'"ByteFallback"' not in _definition(tokenizer):
            self._tokens = []
        self._bytes = {token: byte for byte, token in enumerate(self._tokens)}

    def replace_invalid(self, ids: Sequence[int]) -> list[int]:
        """Return the ids with each invalid byte replaced by the bytes of U+FFFD.

        Example: E6 97 A5 E6 become E6 97 A5 EF BF BD, and decode to 日 and U+FFFD.
        """
        if self._bytes.keys().isdisjoint(ids):
            return list(ids)
        replaced: list[int] = []
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            tokens = list(run)
            replaced += self._valid_utf8(tokens) if are_bytes else tokens
        return replaced

    def _valid_utf8(self, run: list[int]) -> list[int]:
        text = bytes(self._bytes[token] for token in run).decode(errors="replace")
        return [self._tokens[byte] for byte in text.encode()]


def _definition(tokenizer: Tokenizer) -> bytes:
    decoder = tokenizer.decoder
    return b"" if decoder is None else decoder.__getstate__()
