"""A request for a generation, and the events and counts that its caller gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvkeep import validation
from kvkeep.engine.pins import PinRequest
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.usage import Reuse, Usage
from kvkeep.errors import InvalidArgument
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.sampling import Sampling
from kvkeep.session.scoring import TokenScores
from kvkeep.session.session import GREEDY, Session

_MAX_PRIORITY = 1_000_000  # either side of 0


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to prefill and tokens to generate after it; either may be empty."""

    prompt: tuple[int, ...] = ()  # token ids
    max_tokens: int | None = None  # None for as many as the model gives
    sampling: Sampling = GREEDY
    ignore_eos: bool = False  # continue after an end token
    logprobs: int | None = None  # likely tokens to report; 0: the generated one alone; None: none
    priority: int = 0  # greater is sooner; a prompt that waits gains on those that came later
    # As `logprobs`, for the prompt's tokens, in `PrefillProgress`. Nothing is reused then.
    prompt_logprobs: int | None = None
    end_tokens: tuple[int, ...] = ()  # beside the model's
    # How a prompt without a session reuses cells; None for the engine's default.
    alignment: AlignmentOptions | None = None
    # Whether to try tokens that its text has had before; None for the engine's default. The same
    # text to the bit.
    speculate: bool | None = None
    # In a named session, which is created if it is missing: the prompt is its whole text, of which
    # it keeps what it holds or another session holds. Otherwise the prompt follows its text.
    whole_text: bool = False
    pins: tuple[PinRequest, ...] = ()  # of the session's first tokens, when it has ended
    title: str = ""  # for its session, if that has none and nobody has named it
    written_tokens: int = 0  # of the prompt, that were sampled for earlier requests; for `Usage`
    # Called in the engine's thread when the generation has ended in any way, with the session, the
    # number of prefilled prompt tokens, and the number of generated tokens.
    on_end: Callable[[Session, int, int], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("prompt", "end_tokens", "pins"):
            object.__setattr__(self, name, validation.items(name, getattr(self, name)))
        validation.optional_integer("max_tokens", self.max_tokens, 0)
        validation.instance("sampling", self.sampling, Sampling)
        validation.optional_integer("logprobs", self.logprobs, 0)
        validation.optional_integer("prompt_logprobs", self.prompt_logprobs, 0)
        validation.integer("priority", self.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
        for token in self.end_tokens:
            validation.integer("an end token", token)
        for pin in self.pins:
            validation.instance("a pin", pin, PinRequest)
        if self.alignment is not None:
            validation.instance("alignment", self.alignment, AlignmentOptions)
        if self.speculate is not None:
            validation.flag("speculate", self.speculate)
        if not self.prompt and self.max_tokens == 0:
            raise InvalidArgument("the request has neither a prompt nor tokens to generate")

    @property
    def cache_key(self) -> str:
        """The client's name for the conversation, of its pins; "" for none."""
        return next((pin.key for pin in self.pins if pin.key), "")


@dataclass(frozen=True)
class SessionRequest:
    """A request that depends on its session, such as a chat's next turn.

    make: returns the request; called with the session's record at admission. It may change the
    session. most_tokens: returns how many tokens prompt and answer add at most; called also while
    the session is on disk only, when fewer are allowed. `make` is called only if there is room for
    them.
    """

    make: Callable[[SessionRecord], GenerationRequest]
    most_tokens: Callable[[SessionRecord], int]


RequestLike = GenerationRequest | SessionRequest

# "eos": the model ended the text. "stop": a stop string was found. "length": max_tokens were
# generated. "full": the policy holds no more tokens. "cancelled": the caller wants no more.
EndReason = Literal["eos", "stop", "length", "full", "cancelled"]


@dataclass(frozen=True)
class PrefillProgress:
    """A prefill step is done."""

    done: int  # prompt tokens, including those that were reused
    total: int
    reuse: Reuse
    seconds: float  # since the request was submitted
    scores: TokenScores | None = None  # of the step's tokens, if requested


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
    # The text, with the ids of control tokens (which have no text) in their places.
    pieces: Sequence[str | int] = ()


@dataclass(frozen=True)
class Finished:
    """The generation is complete, and its session is idle again."""

    reason: EndReason
    text: str  # the rest, which was held back
    usage: Usage
    stop: str | None = None  # the stop string that ended it
    end_token: GeneratedToken | None = None  # that ended it; it has no text
    total_tokens: int = 0  # of the session afterwards
    revision: int = 0  # of the session afterwards


@dataclass(frozen=True)
class Failed:
    """The generation ended with an error; the session is as after its last generated token."""

    error: BaseException


GenerationEvent = PrefillProgress | GeneratedToken | Finished | Failed
Listener = Callable[[GenerationEvent], None]
