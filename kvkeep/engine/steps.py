"""The ends of prefill steps, which depend on the text alone.

A prompt of which a part is reused is evaluated in the same steps as a prompt that is evaluated in
full, since a token's last bits may depend on the number of tokens in its step. So a session can be
reused up to the end of a step that it shares with the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvkeep.loaded_model import LoadedModel
from kvkeep.session.session import Session

DEFAULT_PREFILL_STEP = 128  # tokens; small, since running generations wait for each step
_FULL_SIZE_STEPS = 12  # prefill steps after which the step size is halved

# Tokens of a step that ends with a message. Another step costs about as much as ten tokens more,
# since all weights are read once more: shorter messages are not worth it.
MIN_MESSAGE_STEP = 32


@dataclass(frozen=True)
class StepGrid:
    """The ends of the prefill steps of any text, for one model and step size.

    They are the multiples of the step, and between them the ends of messages that are at least
    `MIN_MESSAGE_STEP` tokens after the end before. Whether a step ends after a token depends only
    on that token and those before it: texts that share `n` tokens share all ends up to `n`.

    message_ends: the ids of the tokens that end a message; none for a model without a template.
    rounding: see `Executor.rounding`.
    """

    prefill_step: int
    message_ends: frozenset[int] = frozenset()
    rounding: str = ""

    @classmethod
    def of(cls, session: Session) -> "StepGrid":
        """Return the steps in which an engine evaluates the prompts of a session."""
        return cls.for_model(session.prefill_step, session.core.model)

    @classmethod
    def for_model(cls, prefill_step: int, model: LoadedModel) -> "StepGrid":
        """Return the steps of prompts that may have messages.

        Steps that are larger than the default are for speed: they do not end with messages.
        """
        has_short_steps = prefill_step <= DEFAULT_PREFILL_STEP
        message_ends = model.message_end_ids if has_short_steps else frozenset[int]()
        return cls(prefill_step, message_ends, model.decoder.executor.rounding)

    @property
    def name(self) -> str:
        """The rule of the ends, apart from the text, and the rounding: other cells differ by it."""
        step = self.prefill_step
        if prefill_step_at(step, step * _FULL_SIZE_STEPS) != step:
            step_name = f"{step} halved after {_FULL_SIZE_STEPS}"
        else:
            step_name = f"{step}"
        ends = ",".join(map(str, sorted(self.message_ends)))
        messages = f"messages of {MIN_MESSAGE_STEP} to {ends}" if ends else ""
        return ", ".join(filter(None, (step_name, messages, self.rounding)))

    def next_end(self, tokens: Sequence[int], start: int) -> int:
        """Return the first end after token `start`, which may be beyond the last token."""
        step = prefill_step_at(self.prefill_step, start)
        first = start // step * step
        ends = self._message_ends(tokens, first, min(first + step, len(tokens)))
        return next((end for end in ends if end > start), first + step)

    def last_end(self, tokens: Sequence[int], limit: int) -> int:
        """Return the last end at or before `limit`: without messages, 384 for 500 in steps of 128.

        limit: at most the number of tokens.
        """
        step = prefill_step_at(self.prefill_step, limit)
        first = limit // step * step
        return max(self._message_ends(tokens, first, limit), default=first)

    def _message_ends(self, tokens: Sequence[int], first: int, limit: int) -> Iterator[int]:
        """Yield the ends after messages from a multiple of the step, `first`, up to a limit."""
        last_end = first
        for end, token in enumerate(tokens[first:limit], start=first + 1):
            if token in self.message_ends and end - last_end >= MIN_MESSAGE_STEP:
                last_end = end
                yield end


def prefill_step_at(prefill_step: int, position: int) -> int:
    """Return the number of tokens of the prefill step that begins at token `position`.

    Running generations wait for a prefill step, whose attention takes longer the more tokens
    precede it. So a session's `prefill_step` is halved after twelve steps, unless it is odd or
    larger than the default. The result depends only on the position, so that a prompt is always
    evaluated in the same steps.
    """
    may_halve = prefill_step <= DEFAULT_PREFILL_STEP and prefill_step % 2 == 0
    halve = may_halve and position >= _FULL_SIZE_STEPS * prefill_step
    return prefill_step // 2 if halve else prefill_step
