"""Probabilities of tokens, as OpenAI's clients read them."""

import codecs
from collections.abc import Sequence
from typing import Any

from kvkeep.engine import GeneratedToken, TokenLogprob
from kvkeep.models.text.codec import TextCodec


def chat_entry(codec: TextCodec, event: GeneratedToken) -> dict[str, Any] | None:
    """Of one token, in the form of chats; None where none was asked for."""
    if event.logprob is None:
        return None
    top = [_entry(codec, each) for each in event.top_logprobs]
    return {**_entry(codec, event.logprob), "top_logprobs": top}


class CompletionLogprobs:
    """The log probabilities of one choice's tokens, in the form of completions.

    Offsets are characters of the choice's text, of a stream too. A token that completes a
    character of several tokens stands, as they do, where that character begins.
    """

    def __init__(self, codec: TextCodec, start: int = 0):
        """start: characters of the choice's text before its first token, such as an echo's."""
        self._codec, self._offset = codec, start
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def entry(self, events: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        """Of the next tokens; None where no probabilities were asked for."""
        known = [(event, event.logprob) for event in events if event.logprob is not None]
        if not known:
            return None
        return {
            "tokens": [self._name(likely) for _, likely in known],
            "token_logprobs": [likely.logprob for _, likely in known],
            "top_logprobs": [self._top(event.top_logprobs) for event, _ in known],
            "text_offset": [self._next_offset(event.token) for event, _ in known],
        }

    def _top(self, top: Sequence[TokenLogprob]) -> dict[str, float]:
        """By text, which two tokens may share: the less likely one goes by its id."""
        named: dict[str, float] = {}
        for each in top:
            name = self._name(each)
            name = f"token_id:{each.token}" if name in named else name
            named[name] = each.logprob
        return named

    def _name(self, likely: TokenLogprob) -> str:
        raw = self._codec.token_bytes(likely.token)
        return _text(raw) if _is_text(raw) else f"bytes:{_text(raw)}"

    def _next_offset(self, token: int) -> int:
        offset = self._offset
        if not self._codec.is_control(token):  # these are not in the text
            self._offset += len(self._characters.decode(self._codec.token_bytes(token)))
        return offset


def _entry(codec: TextCodec, likely: TokenLogprob) -> dict[str, Any]:
    raw = codec.token_bytes(likely.token)
    return {
        "id": likely.token,
        "token": _text(raw),
        "logprob": likely.logprob,
        "bytes": list(raw),
    }


def _text(raw: bytes) -> str:
    r"""The bytes as text, those of a partial character as \xf0, as OpenAI writes them."""
    return raw.decode(errors="backslashreplace")


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
