"""Reasoning before an answer: its budget in tokens, and constraints of the answer alone."""

import codecs
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvkeep.chat.channels import FINAL_HEADER
from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.output_reader import OutputReader
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.sampling import Constraint

# "opening": where reasoning may begin. "reasoning": inside it. "answer": behind it.
_Phase = Literal["opening", "reasoning", "answer"]
_NEXT_MESSAGE = "<|start|>assistant"
_TAIL_BYTES = 400  # more than a marker has, and a token behind it
_CONTENT_START = b"<|message|>"


class ReasoningConstraint:
    """A constraint that ends the reasoning after some tokens, and constrains what follows it.

    Example: the budget is 2 and `</think>` ends the reasoning. Two tokens are free, such as "Let"
    and " me", the next one must be `</think>`, and from then on the answer's constraint holds. With
    such a constraint the text cannot end inside the reasoning. Without one a call that the reader
    of the answer finds in the reasoning ends it, too; the budget does not cut its beginning.
    """

    def __init__(
        self,
        codec: TextCodec,
        output_format: OutputFormat,
        starts_in_reasoning: bool,
        budget: int | None,
        answer: Constraint | None,
        end_token_ids: Sequence[int],
        has_header: bool = False,
        tools: Sequence[Tool] = (),
    ):
        """budget: tokens of reasoning; None for any number, 0 for none. answer: its constraint.

        has_header: whether that constrains the header of the answer's channel too, if any. tools:
        those that may be called.
        """
        markers = output_format.reasoning[0]
        self._codec, self._channels = codec, output_format.channels
        self._start, self._end = markers.start, markers.end
        self._budget, self._answer = budget, answer
        openers = (form.opener for form in output_format.calls)
        self._opener_ids = [
            codec.encode(opener, special=True)[0]
            for opener in openers
            if opener in output_format.control_markers
        ]
        # Before the end of the reasoning, the answer neither ends nor begins.
        self._forbidden_ids = [*end_token_ids, *self._opener_ids]
        self._header = "" if has_header else FINAL_HEADER
        self._forced: list[int] = []  # ids that must come next
        self._after_forced: Callable[[], None] = self._begin_answer
        self._phase: _Phase = "opening"
        self._text = b""  # the last of it since the phase began
        self._token_count = 0  # of reasoning
        self._reader: _CallReader | None = None
        if tools and answer is None and not self._channels:
            self._reader = _CallReader(codec, output_format, tools)
        if starts_in_reasoning:
            self._begin_reasoning()
        elif self._channels and answer is not None:
            if budget == 0:
                self._force(self._header, self._begin_answer)
            else:
                self._force(self._start, self._begin_reasoning)

    @property
    def complete(self) -> bool:
        """Whether the answer's constraint allows no further token."""
        return self._phase == "answer" and bool(getattr(self._answer, "complete", False))

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokens that may come next."""
        if self._forced:
            mask = torch.full_like(logits, -torch.inf)
            mask[self._forced[0]] = 0.0
            return mask
        if self._phase == "reasoning":
            return logits if self._answer is None else _without(logits, self._forbidden_ids)
        if self._phase == "opening" and not self._channels:
            return self._masked_opening(logits)
        return logits if self._answer is None else self._answer.masked(logits)

    def accept(self, token: int) -> None:
        """Follow a sampled token."""
        if self._forced:
            self._forced.pop(0)
            if not self._forced:
                self._after_forced()
        elif self._phase == "answer":
            self._accept_in_answer(token)
        else:
            self._text = (self._text + self._codec.token_bytes(token))[-_TAIL_BYTES:]
            if self._phase == "reasoning":
                self._follow_reasoning(token)
            elif self._start.encode() in self._text:
                self._begin_reasoning()
            elif self._channels:
                if _CONTENT_START in self._text:
                    self._begin_answer()
            elif self._answer is not None or self._text.strip():
                self._begin_answer()
                self._accept_in_answer(token)

    def _masked_opening(self, logits: Tensor) -> Tensor:
        """Allow the marker of the reasoning, unless the budget is 0, besides the answer."""
        opening_id = self._codec.encode(self._start, special=True)[0]
        if self._budget == 0:
            logits = _without(logits, [opening_id])
        if self._answer is None:
            return logits
        masked = self._answer.masked(logits).clone()
        masked[opening_id] = logits[opening_id]
        return masked

    def _follow_reasoning(self, token: int) -> None:
        self._token_count += 1
        if self._reader is not None:
            self._reader.push(token)
        is_call = self._answer is None and token in self._opener_ids
        is_call = is_call or (self._reader is not None and self._reader.has_ended)
        if self._end.encode() in self._text or is_call:
            self._end_reasoning()
        elif (
            self._budget is not None
            and self._token_count >= self._budget
            and not (self._reader is not None and self._reader.names_tool)
        ):
            self._force(self._end, self._end_reasoning)

    def _begin_reasoning(self) -> None:
        self._phase, self._text = "reasoning", b"\n"  # a line begins
        if self._budget == 0:
            self._force(self._end, self._end_reasoning)

    def _end_reasoning(self) -> None:
        self._begin_answer()
        if self._channels and self._answer is not None:
            self._force(_NEXT_MESSAGE + self._header, self._begin_answer)

    def _begin_answer(self) -> None:
        self._phase, self._text = "answer", b""

    def _accept_in_answer(self, token: int) -> None:
        if self._answer is not None:
            self._answer.accept(token)

    def _force(self, text: str, after: Callable[[], None]) -> None:
        """Force the tokens of a text, and call `after` behind them."""
        self._forced, self._after_forced = self._codec.encode(text, special=True), after
        if not self._forced:
            after()


class _CallReader:
    """A reader of reasoning that finds the calls in it, as that of the answer does."""

    def __init__(self, codec: TextCodec, output_format: OutputFormat, tools: Sequence[Tool]):
        self._codec = codec
        self._reader = OutputReader(
            output_format, tools, starts_in_reasoning=True, control_text=codec.control_text
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> None:
        """Append a token."""
        is_control = self._codec.is_control(token)
        piece = token if is_control else self._decoder.decode(self._codec.token_bytes(token))
        self._reader.push([piece])

    @property
    def has_ended(self) -> bool:
        """Whether a call, or the marker, has ended the reasoning."""
        return self._reader.left_reasoning

    @property
    def names_tool(self) -> bool:
        """Whether a call may have begun: the name of a tool stands where one may."""
        return self._reader.names_tool


def reasoning_constraint(
    codec: TextCodec,
    output_format: OutputFormat,
    starts_in_reasoning: bool,
    budget: int | None,
    answer: Constraint | None,
    end_token_ids: Sequence[int],
    has_header: bool = False,
    tools: Sequence[Tool] = (),
) -> Constraint | None:
    """Return a constraint for an answer that may begin with reasoning; None if there is none.

    Arguments are those of `ReasoningConstraint`. A model whose vocabulary does not have the marker
    of the reasoning, and whose prompt does not have it either, does not reason.
    """
    if not output_format.reasoning or (budget is None and answer is None):
        return answer
    is_known = len(codec.encode(output_format.reasoning[0].start, special=True)) == 1
    if not (starts_in_reasoning or is_known or output_format.channels):
        return answer
    return ReasoningConstraint(
        *(codec, output_format, starts_in_reasoning, budget, answer, end_token_ids),
        has_header,
        tools,
    )


def _without(logits: Tensor, ids: list[int]) -> Tensor:
    """Return logits with -inf for some ids; those beyond the logits are left out."""
    result = logits.clone()
    for token in ids:
        result[token : token + 1] = -torch.inf
    return result
