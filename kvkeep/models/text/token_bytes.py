"""The bytes of single tokens, and decoding of tokens that are single bytes."""

import json
import re
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

from tokenizers import Tokenizer, decoders

MAX_TOKEN_ID = 2**32 - 1  # that the tokenizers library takes
_PRECEDING_TOKEN = "x"  # decoded before a token; no decoder step changes it
# Decoder steps that convert a token to bytes, and the one from which steps see the whole text.
_BYTE_LEVEL, _BYTE_FALLBACK, _WHOLE_TEXT = "ByteLevel", "ByteFallback", "Fuse"
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes that each token of a tokenizer contributes to the middle of a text.

    The bytes of all tokens, joined, are the text. Decoding a token alone would treat it as the
    beginning of a text: a SentencePiece token would lose its leading space, and a part of a
    character would become U+FFFD. The space that SentencePiece puts before a text (the dummy
    prefix) stays here, as a part of the first token; decoding removes it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._steps = [] if decoder is None else _flat_steps(json.loads(decoder.__getstate__()))
        step_types = [step["type"] for step in self._steps]
        self._is_byte_level = _BYTE_LEVEL in step_types
        self._has_byte_fallback = _BYTE_FALLBACK in step_types
        self._added_ids = frozenset(tokenizer.get_added_tokens_decoder())
        self._token_decoders = [
            _step_decoder(step)
            for step in takewhile(lambda step: step["type"] != _WHOLE_TEXT, self._steps)
            if step["type"] not in (_BYTE_LEVEL, _BYTE_FALLBACK)
        ]
        self._cache: dict[int, bytes] = {}
        # The ids of bytes 0 to 255, if the decoder treats them as bytes and none is missing.
        token_ids = map(tokenizer.token_to_id, (f"<0x{byte:02X}>" for byte in range(256)))
        byte_ids = [token_id for token_id in token_ids if token_id is not None]
        self._byte_ids = byte_ids if self._has_byte_fallback and len(byte_ids) == 256 else []
        self._byte_by_id = {token_id: byte for byte, token_id in enumerate(self._byte_ids)}

    def get(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an id beyond the vocabulary."""
        if token_id not in self._cache:
            self._cache[token_id] = self._compute_bytes(token_id)
        return self._cache[token_id]

    def replace_invalid_byte_tokens(self, ids: Sequence[int]) -> list[int]:
        """Replace byte tokens that are no part of a character by the bytes of U+FFFD.

        One such byte would make the library's decoder turn the whole run of byte tokens into
        U+FFFD, complete characters included, so that streamed and final text would differ.

        Example: E6 97 A5 E6 become E6 97 A5 EF BF BD, and decode to 日 and U+FFFD.
        """
        if self._byte_by_id.keys().isdisjoint(ids):
            return list(ids)
        result: list[int] = []
        for is_byte_run, run in groupby(ids, self._byte_by_id.__contains__):
            if is_byte_run:
                text = bytes(map(self._byte_by_id.__getitem__, run)).decode(errors="replace")
                result += [self._byte_ids[byte] for byte in text.encode()]
            else:
                result += run
        return result

    def _compute_bytes(self, token_id: int) -> bytes:
        text = self._tokenizer.id_to_token(token_id) if token_id <= MAX_TOKEN_ID else None
        if text is None:
            return b""
        if self._is_byte_level:
            # The text of an added token is plain; all others are in GPT-2's byte alphabet.
            in_alphabet = token_id not in self._added_ids and _BYTE_ALPHABET.keys() >= set(text)
            return bytes(map(_BYTE_ALPHABET.__getitem__, text)) if in_alphabet else text.encode()
        if self._has_byte_fallback and (match := _FALLBACK_BYTE.fullmatch(text)):
            return bytes.fromhex(match[1])
        if not self._steps:
            return f" {text}".encode()  # without a decoder, tokens are joined by spaces
        for decoder in self._token_decoders:
            text = _decode_after_token(decoder, text)
        return text.encode()


def _flat_steps(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a decoder step of tokenizer.json, or the steps inside a sequence of them."""
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flat_steps(part)]


def _step_decoder(step: dict[str, Any]) -> decoders.Decoder:
    """Return the library's decoder for one step of tokenizer.json."""
    decoder = decoders.Fuse()  # of any type: the state replaces it
    decoder.__setstate__(json.dumps(step).encode())
    return decoder


def _decode_after_token(decoder: decoders.Decoder, text: str) -> str:
    """Apply one decoder step to the text of a token that follows another token."""
    prefix, joined = decoder.decode([_PRECEDING_TOKEN]), decoder.decode([_PRECEDING_TOKEN, text])
    return joined.removeprefix(prefix) if joined.startswith(prefix) else decoder.decode([text])


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet. Bytes that are not printable have characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(unprintable)}


_BYTE_ALPHABET = _byte_alphabet()
