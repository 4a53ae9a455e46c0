"""The events of a generation, and what they carry."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# "eos": the model ended the text. "stop": a stop string was found. "length": max_tokens were
# generated. "full": the policy holds no more tokens. "cancelled": the caller wants no more.
EndReason = Literal["eos", "stop", "length", "full", "cancelled"]


@dataclass(frozen=True)
class Reuse:
    """The part of a prompt that was in the cache already."""

    tokens: int = 0  # the first of the prompt
    # A session in memory or on disk, the prefix store, or "" for none.
    source: Literal["", "session", "store"] = ""
    # Why the rest was not reused, a `kvkeep.engine.reuse.MissReason`; "" if all of it was.
    reason: str = ""
    differs_at: int | None = None  # index of the first token that differs from the nearest text
    session: str | None = None  # name of the session that the tokens come from


@dataclass(frozen=True)
class Usage:
    """The tokens and the time that a generation took."""

    prompt: int  # tokens
    generated: int
    reuse: Reuse
    queue_seconds: float  # from submission to the first prefill step
    prefill_seconds: float  # wall-clock time
    decode_seconds: float

    @property
    def evaluated(self) -> int:
        """Prompt tokens that were not reused."""
        return self.prompt - self.reuse.tokens

    @property
    def written(self) -> int:
        """Deprecated: use `generated`."""
        warnings.warn("Usage.written is now generated", DeprecationWarning, stacklevel=2)
        return self.generated


@dataclass(frozen=True)
class PrefillProgress:
    """A prefill step is done."""

    done: int  # prompt tokens, including those that were reused
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
    """A token was generated."""

    token: int
    text: str  # "" while a stop string or a character may continue
    logprob: TokenLogprob | None = None  # of the token itself, if requested
    top_logprobs: Sequence[TokenLogprob] = ()  # of the most likely tokens, if requested


@dataclass(frozen=True)
class Finished:
    """The generation is complete."""

    reason: EndReason
    text: str  # the rest, which was held back
    usage: Usage
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True)
class Failed:
    """The generation ended with an error; the session is as after its last generated token."""

    error: BaseException


GenerationEvent = PrefillProgress | GeneratedToken | Finished | Failed
