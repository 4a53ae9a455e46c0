"""Arguments by the schema in calls of strict tools that a model makes of its own accord."""

from torch import Tensor, isneginf

from kvkeep.chat.output_format import OutputFormat
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.call_watch import CallWatch
from kvkeep.server.grammar import Grammar
from kvkeep.server.strict_grammar import StrictGrammar
from kvkeep.session.sampling import Constraint


class StrictCalls:
    """A constraint of calls of strict tools, on top of `within`, if given; other text is free.

    A grammar holds from where it is certain that a strict tool is called, up to the end of the
    arguments.
    """

    def __init__(
        self,
        codec: TextCodec,
        output_format: OutputFormat,
        grammar: StrictGrammar,
        within: Constraint | None,
        at_start: bool = True,
        in_reasoning: bool = False,
    ):
        """at_start: whether the answer begins with the first token: no reasoning or text before.

        in_reasoning: whether that token is one of reasoning.
        """
        self._within = within
        self._watch = CallWatch(codec, output_format, grammar, at_start, in_reasoning)
        self._held: Grammar | None = None

    @property
    def complete(self) -> bool:
        return bool(getattr(self._within, "complete", False))

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokens that may come next."""
        masked = logits if self._within is None else self._within.masked(logits)
        if self._held is None:
            return masked
        result = self._held.masked(masked)
        if isneginf(result).all():  # the other constraint ends the call, as a budget may
            self._held = None
            return masked
        return result

    def accept(self, token: int) -> None:
        """Follow a sampled token."""
        if self._within is not None:
            self._within.accept(token)
        begun = self._watch.begun(token)
        if self._held is not None and (not self._held.follow([token]) or self._held.is_whole):
            self._held = None
        self._held = self._held or begun
