"""Decoding where a token may be a single byte, as SentencePiece's <0xE6> is."""

from collections.abc import Sequence
from itertools import groupby

from tokenizers import Tokenizer


class ByteTokens:
    """The tokens of single bytes that a tokenizer falls back to; of many there are none.

    Its decoder takes neighbours of them together: a byte that is no part of a character turns all
    of them into U+FFFD, those of whole characters before it, too. So text that was given as tokens
    came would be another one in the end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self._tokens = [token for token in tokens if token is not None]
        if len(self._tokens) < 256 or b'"ByteFallback"' not in _definition(tokenizer):
            self._tokens = []
        self._bytes = {token: byte for byte, token in enumerate(self._tokens)}

    def mended(self, ids: Sequence[int]) -> list[int]:
        """The ids, with the bytes of U+FFFD in the place of bytes that are no character.

        Example: E6 97 A5 E6 become E6 97 A5 EF BF BD, and decode to 日 and U+FFFD.
        """
        if self._bytes.keys().isdisjoint(ids):
            return list(ids)
        mended: list[int] = []
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            tokens = list(run)
            mended += self._characters(tokens) if are_bytes else tokens
        return mended

    def _characters(self, run: list[int]) -> list[int]:
        text = bytes(self._bytes[token] for token in run).decode(errors="replace")
        return [self._tokens[byte] for byte in text.encode()]


def _definition(tokenizer: Tokenizer) -> bytes:
    decoder = tokenizer.decoder
    return b"" if decoder is None else decoder.__getstate__()
