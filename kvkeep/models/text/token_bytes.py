"""The bytes of single tokens, and decoding of tokens that are single bytes."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, decoders

_ANCHOR = "x"  # decoded before a token; no decoder step changes it
# Decoder steps that convert a token to bytes, and the one from which steps see the whole text.
_BYTE_LEVEL, _BYTE_FALLBACK, _WHOLE_TEXT = "ByteLevel", "ByteFallback", "Fuse"
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes that each token of a tokenizer contributes to the middle of a text.

    Decoding a token alone treats it as the beginning of a text: a SentencePiece token loses its
    leading space, and a token that holds a part of a character becomes U+FFFD. The bytes returned
    here are unchanged, so that the bytes of all tokens, joined, are the text. SentencePiece puts a
    space before a text (the dummy prefix), which decoding removes: here it stays, as a part of the
    first token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._steps = list(_decoder_steps(tokenizer.decoder))
        kinds = [step["type"] for step in self._steps]
        self._byte_level = _BYTE_LEVEL in kinds
        self._byte_fallback = _BYTE_FALLBACK in kinds
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._decoders = [
            _decoder(step)
            for step in self._steps[: kinds.index(_WHOLE_TEXT) if _WHOLE_TEXT in kinds else None]
            if step["type"] not in (_BYTE_LEVEL, _BYTE_FALLBACK)
        ]
        self._cache: dict[int, bytes] = {}
        # The tokens of bytes 0 to 255, if the decoder treats them as bytes and none is missing.
        tokens = map(tokenizer.token_to_id, (f"<0x{byte:02X}>" for byte in range(256)))
        byte_tokens = [token for token in tokens if token is not None]
        self._byte_tokens = byte_tokens if self._byte_fallback and len(byte_tokens) == 256 else []
        self._token_bytes = {token: byte for byte, token in enumerate(self._byte_tokens)}

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; b"" for an id beyond the vocabulary."""
        if token not in self._cache:
            self._cache[token] = self._compute(token)
        return self._cache[token]

    def replace_invalid(self, ids: Sequence[int]) -> list[int]:
        """Return the ids with each byte token that is no part of a character made U+FFFD's bytes.

        The library's decoder joins neighbouring byte tokens. One byte that is not part of a
        character turns the whole run into U+FFFD, complete characters before it included. Streamed
        text would then differ from the final text.

        Example: E6 97 A5 E6 become E6 97 A5 EF BF BD, and decode to 日 and U+FFFD.
        """
        if self._token_bytes.keys().isdisjoint(ids):
            return list(ids)
        replaced: list[int] = []
        for are_bytes, run in groupby(ids, self._token_bytes.__contains__):
            if are_bytes:
                text = bytes(self._token_bytes[token] for token in run).decode(errors="replace")
                replaced += [self._byte_tokens[byte] for byte in text.encode()]
            else:
                replaced += run
        return replaced

    def _compute(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            # The text of an added token is plain; all others are in GPT-2's byte alphabet.
            in_alphabet = token not in self._added and _ALPHABET.keys() >= set(text)
            return bytes(map(_ALPHABET.__getitem__, text)) if in_alphabet else text.encode()
        if self._byte_fallback and (match := _FALLBACK_BYTE.fullmatch(text)):
            return bytes.fromhex(match[1])
        if not self._steps:
            return f" {text}".encode()  # without a decoder, tokens are joined by spaces
        for decoder in self._decoders:
            text = _decode_inside(decoder, text)
        return text.encode()


def _decoder_steps(decoder: decoders.Decoder | None) -> Iterable[dict[str, Any]]:
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


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet.

    Printable bytes are their own characters; the others are numbered from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
