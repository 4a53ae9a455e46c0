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
    """The part of a prompt that was in the cache already.

    tokens: how many first tokens of the prompt.
    source: "session" (one in memory or on disk), "store" (the prefix store), or "" for none.
    reason: why the rest was not reused, a `kvkeep.engine.reuse.MissReason`; "" if all of it was.
    differs_at: the first token of the prompt that the nearest text does not have; None for none.
    session: the session that the tokens come from.
    """

    tokens: int = 0
    source: Literal["", "session", "store"] = ""
    reason: str = ""
    differs_at: int | None = None
    session: str | None = None


@dataclass(frozen=True)
class Usage:
    """The tokens and the time that a generation took.

    prompt, generated: tokens.
    queue_seconds: from submission to the first prefill step.
    prefill_seconds, decode_seconds: wall-clock time of the two phases after that.
    """

    prompt: int
    generated: int
    reuse: Reuse
    queue_seconds: float
    prefill_seconds: float
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
    """A prefill step is done. done, total: prompt tokens, including those that were reused."""

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
    """A token was generated.

    text: what is certain now: whole characters, "" while a stop string or a character may continue.
    logprob: of the token itself; top_logprobs: of the most likely tokens. Both if requested.
    """

    token: int
    text: str
    logprob: TokenLogprob | None = None
    top_logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Finished:
    """The generation is complete.

    text: what was held back until now. stop: the stop string that ended it.
    """

    reason: EndReason
    text: str
    usage: Usage
    stop: str | None = None


@dataclass(frozen=True)
class Failed:
    """The generation ended with an error; the session is as after its last generated token."""

    error: BaseException


GenerationEvent = PrefillProgress | GeneratedToken | Finished | Failed
