"""What an engine tells of an answer while it makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# "length": as many tokens as were asked for. "full": the policy holds no more. "cancelled": nobody
# wants the rest.
Reason = Literal["eos", "stop", "length", "full", "cancelled"]


@dataclass(frozen=True)
class Reuse:
    """What of a prompt was there already.

    tokens: so many, from `source`: "session" (one that was or is live), "store" (the prefix store),
    or "" where none was. reason: why the rest was not: see `kvkeep.engine.reuse`; "" where all of
    it was. differs_at: the first token of the prompt that the nearest text does not have; None
    where there is none. session: which session it came from.
    """

    tokens: int = 0
    source: Literal["", "session", "store"] = ""
    reason: str = ""
    differs_at: int | None = None
    session: str | None = None


@dataclass(frozen=True)
class Usage:
    """What an answer took.

    prompt, generated: tokens. evaluated: prompt tokens that were not reused. queue_seconds: from
    submission to the first prefill step; prefill_seconds and decode_seconds follow it.
    """

    prompt: int
    generated: int
    reuse: Reuse
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def evaluated(self) -> int:
        return self.prompt - self.reuse.tokens


@dataclass(frozen=True)
class PrefillProgress:
    """A step of the prompt is in. done, total: of the prompt, what was reused included."""

    done: int
    total: int
    reuse: Reuse
    seconds: float


@dataclass(frozen=True)
class TokenLogprob:
    """A token and the natural log of its probability, before penalties and temperature."""

    token: int
    logprob: float


@dataclass(frozen=True)
class GeneratedToken:
    """A token was written.

    text: what is certain now: whole characters, "" while a stop string or a character may go on.
    logprob: of the token itself, and top_logprobs: of the likeliest ones, where requested.
    """

    token: int
    text: str
    logprob: TokenLogprob | None = None
    top_logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Finished:
    """The answer is whole. text: what was held back until now. stop: the string that ended it."""

    reason: Reason
    text: str
    usage: Usage
    stop: str | None = None


@dataclass(frozen=True)
class Failed:
    """There will be no more of the answer; the session is as after the last token written."""

    error: BaseException


GenerationEvent = PrefillProgress | GeneratedToken | Finished | Failed
