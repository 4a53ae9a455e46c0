"""Parts of responses about a generation: finish reason, usage, timings, log probabilities."""

import codecs
from collections.abc import Sequence
from typing import Any

from kvkeep.engine import GeneratedToken, PrefillProgress, TokenLogprob, Usage
from kvkeep.models.text.codec import TextCodec
from kvkeep.version import __version__

FINGERPRINT = f"kvkeep-{__version__}"  # a seed gives the same text under the same fingerprint
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "full": "length"}


def openai_usage(usages: list[Usage]) -> dict[str, Any]:
    """Return `usage` for all generations of one prompt, which is counted once."""
    prompt, written = usages[0].prompt, sum(usage.generated for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": usages[0].reuse.tokens},
    }


def llamacpp_timings(usage: Usage) -> dict[str, Any]:
    """Return llama.cpp's `timings`: milliseconds, and tokens per second."""
    prefill_ms, decode_ms = 1000 * usage.prefill_seconds, 1000 * usage.decode_seconds
    evaluated, written = usage.evaluated, usage.generated
    return {
        "cache_n": usage.reuse.tokens,
        "prompt_n": evaluated,
        "prompt_ms": prefill_ms,
        "prompt_per_token_ms": prefill_ms / evaluated if evaluated else 0.0,
        "prompt_per_second": 1000 * evaluated / prefill_ms if prefill_ms else 0.0,
        "predicted_n": written,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / written if written else 0.0,
        "predicted_per_second": 1000 * written / decode_ms if decode_ms else 0.0,
    }


def llamacpp_progress(progress: PrefillProgress) -> dict[str, Any]:
    """Return llama.cpp's `prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.reuse.tokens,
        "processed": progress.done,
        "time_ms": round(1000 * progress.seconds),
    }


def chat_logprobs(codec: TextCodec, sampled: GeneratedToken) -> dict[str, Any] | None:
    """Return a token's entry in the form of chats, or None if log probabilities were not asked."""
    if sampled.logprob is None:
        return None
    top = [_chat_entry(codec, logprob) for logprob in sampled.top_logprobs]
    return {**_chat_entry(codec, sampled.logprob), "top_logprobs": top}


def _chat_entry(codec: TextCodec, logprob: TokenLogprob) -> dict[str, Any]:
    raw = codec.token_bytes(logprob.token)
    return {
        "id": logprob.token,
        "token": _escaped(raw),
        "logprob": logprob.logprob,
        "bytes": list(raw),
    }


class CompletionLogprobs:
    """The log probabilities of one choice's tokens, in the form of completions.

    Offsets count characters of the choice's text, in a stream too. All tokens of a character that
    takes several tokens have the offset at which that character begins.
    """

    def __init__(self, codec: TextCodec, start: int = 0):
        """start: characters of the choice's text before its first token, such as an echo's."""
        self._codec, self._offset = codec, start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def entry(self, sampled: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        """Return the entry of the next tokens, or None if log probabilities were not asked."""
        known = [(event, event.logprob) for event in sampled if event.logprob is not None]
        if not known:
            return None
        return {
            "tokens": [self._token_name(logprob) for _, logprob in known],
            "token_logprobs": [logprob.logprob for _, logprob in known],
            "top_logprobs": [self._top_by_name(event.top_logprobs) for event, _ in known],
            "text_offset": [self._next_offset(event.token) for event, _ in known],
        }

    def _top_by_name(self, top: Sequence[TokenLogprob]) -> dict[str, float]:
        """Map texts to log probabilities; of two tokens with one text the second has its id."""
        logprobs: dict[str, float] = {}
        for logprob in top:
            name = self._token_name(logprob)
            name = f"token_id:{logprob.token}" if name in logprobs else name
            logprobs[name] = logprob.logprob
        return logprobs

    def _token_name(self, logprob: TokenLogprob) -> str:
        raw = self._codec.token_bytes(logprob.token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"bytes:{_escaped(raw)}"

    def _next_offset(self, token: int) -> int:
        offset = self._offset
        if not self._codec.is_control(token):  # control tokens are not part of the text
            self._offset += len(self._decoder.decode(self._codec.token_bytes(token)))
        return offset


def _escaped(raw: bytes) -> str:
    r"""Decode bytes, writing those of a partial character as \xf0, as OpenAI does."""
    return raw.decode(errors="backslashreplace")
