"""The parts of a prompt that were reused, and the tokens and the time that a generation took."""

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from kvkeep.session.drafts import DraftCounts
from kvkeep.types import AlignmentMode

# Why no more of a prompt was reused.
MissReason = Literal[
    "",
    "cold",  # no session's text begins like it
    "differs",  # the nearest text continues differently
    "below_step",  # the common tokens end within a prefill step
    "no_checkpoint",  # of local windows or states at the end of the last common prefill step
    "forgotten",  # tokens were evicted; here and below, cells do not depend on their tokens alone
    "compressed",
    "quantised",
    "edited",
    "sampled",  # the tokens were sampled, not prefilled
    "settings",  # the session's policy, keep, prefill step or bits differ
]


@dataclass(frozen=True)
class Reuse:
    """The part of a prompt that was in the cache already."""

    tokens: int = 0  # the first of the prompt
    # A session in memory or on disk, the prefix store, or "" for none.
    source: Literal["", "session", "store"] = ""
    # Why the rest was not reused; "" if all of it was.
    reason: MissReason = ""
    differs_at: int | None = None  # index of the first token that differs from the nearest text
    session: str | None = None  # name of the session that the tokens come from
    resumed: bool = False  # the prompt continues the session's answer; sampled tokens are reused
    # "in_place": some were computed after another text; see `kvkeep.engine.in_place`.
    mode: AlignmentMode = "exact"
    seams: int = 0  # places where a run of such tokens begins
    moved: int = 0  # of the tokens
    reread: int = 0  # equal tokens after seams that are evaluated again
    not_in_place: str = ""  # why the prompt was not aligned in place, if that was asked for

    def as_json(self, prompt_tokens: int) -> dict[str, Any]:
        """Return how much of a prompt is reused, and what of it in place, or why nothing."""
        fields: dict[str, Any] = {"prompt_tokens": prompt_tokens, "reused": self.tokens}
        if self.mode == "in_place":
            kept = self.tokens - self.moved
            counts = {"kept": kept, "moved": self.moved, "reread": self.reread}
            return {**fields, "reuse": self.mode, **counts}
        return {**fields, "not_in_place": self.not_in_place} if self.not_in_place else fields


@dataclass(frozen=True)
class Usage:
    """The tokens and the time that a generation took."""

    prompt: int  # tokens
    generated: int
    reuse: Reuse
    queue_seconds: float  # from submission to the first prefill step
    prefill_seconds: float  # wall-clock time
    decode_seconds: float
    held: int = 0  # cells of the session before, those that were reused included
    # At the end: tokens before the generated ones that the policy has evicted.
    evicted: int = 0
    prompt_written: int = 0  # tokens of the prompt that were sampled for earlier requests
    drafts: DraftCounts = field(
        default_factory=DraftCounts
    )  # of the generated tokens: those tried and right

    @property
    def evaluated(self) -> int:
        """Prompt tokens that were not reused."""
        return self.prompt - self.reuse.tokens

    def summary(self) -> str:
        """Return the numbers of tokens and the times in words, for a log."""
        rate = self.generated / self.decode_seconds if self.decode_seconds else 0.0
        return (
            f"prompt {self.prompt:,} tokens, {self.reuse.tokens:,} of them cached; waited "
            f"{self.queue_seconds:.2f} s, prefill {self.prefill_seconds:.2f} s; {self.generated:,} "
            f"generated in {self.decode_seconds:.2f} s, {rate:.1f} tokens/s"
        )

    @property
    def written(self) -> int:
        """Deprecated: use `generated`."""
        warnings.warn("use Usage.generated, not Usage.written", DeprecationWarning, stacklevel=2)
        return self.generated


@dataclass(frozen=True)
class LastAnswer:
    """A session's newest generation that has tokens, while they are all in the session."""

    usage: Usage
    ended: str  # why: an `EndReason`, or "failed"
    length: int  # tokens of the session at its end
