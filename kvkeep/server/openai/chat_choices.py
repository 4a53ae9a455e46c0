"""Choices of chat completions: whole messages, and the deltas of their streaming."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.chat.openai_chat import format_output
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    Output,
    OutputBuilder,
    TextDelta,
)
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished, GeneratedToken
from kvkeep.server.answer_tokens import AnswerTokens, Attributed, text_tokens
from kvkeep.server.chat_input import StopAfterFirstCall, is_cut_off
from kvkeep.server.openai import usage
from kvkeep.server.openai.custom_calls import generated_input


@dataclass
class ChatChoice:
    """One of a completion's choices, as its generation goes on.

    early_end: ends it with its first call; None if there may be several. uses_functions: whether a
    call has the deprecated form of `functions`.
    """

    reader: OutputReader
    tools: Mapping[str, Tool]
    early_end: StopAfterFirstCall | None = None
    uses_functions: bool = False
    tokens: list[GeneratedToken] = field(default_factory=list)  # of its text
    _answer: AnswerTokens = field(init=False)
    _builder: OutputBuilder = field(default_factory=OutputBuilder)
    # The arguments of custom tools' calls, by the calls' indices.
    _custom_texts: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._answer = AnswerTokens(self.reader)

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of its reasoning."""
        return self._answer.reasoning_tokens

    @property
    def ended(self) -> bool:
        """Whether the first call has ended it."""
        return self.early_end is not None and self.early_end.ended

    def push(self, event: GeneratedToken | Finished) -> list[Attributed]:
        """Follow the generation. Returns what of the answer is now certain, with its tokens."""
        parts = self._answer.push(event)
        events = [part for part, _ in parts]
        if self.early_end is not None:
            events = self.early_end.up_to_first_call(events)
        parts = parts[: len(events)]
        self.tokens += text_tokens(parts)
        self._builder.push(events)
        return parts

    @property
    def output(self) -> Output:
        return self._builder.output

    def message(self) -> dict[str, Any]:
        """Return the whole message."""
        output = self.output
        message = format_output(output, list(self.tools.values()))
        for entry, call in zip(message.get("tool_calls", ()), output.calls, strict=True):
            if "custom" in entry:
                entry["custom"]["input"] = generated_input(call.arguments, call.complete)
        if self.uses_functions and (calls := message.pop("tool_calls", None)):
            message["function_call"] = calls[0]["function"]
        return message

    def finish_reason(self, finished: Finished) -> str:
        if self.output.calls_to_run and not is_cut_off(finished, self.early_end):
            return "function_call" if self.uses_functions else "tool_calls"
        return usage.FINISH_REASONS[finished.reason]

    def deltas(
        self, parts: Sequence[Attributed]
    ) -> Iterator[tuple[dict[str, Any], list[GeneratedToken]]]:
        """Yield the deltas of a streamed message, with the tokens of its text."""
        for event, tokens in parts:
            if isinstance(event, TextDelta):
                yield {"content": event.text}, tokens
            elif isinstance(event, (CallStarted, CallArguments, CallEnded)):
                for delta in self._call_deltas(event):
                    yield delta, []
            else:
                yield {"reasoning_content": event.text}, []

    def _call_deltas(
        self, event: CallStarted | CallArguments | CallEnded
    ) -> Iterator[dict[str, Any]]:
        index = event.index
        if isinstance(event, CallStarted):
            if self.tools[event.name].kind == "custom":
                self._custom_texts[index] = []
                custom = {"name": event.name, "input": ""}
                yield _call_delta(index, id=event.id, type="custom", custom=custom)
                return
            function = {"name": event.name, "arguments": ""}
            yield self._function_delta(index, function, id=event.id, type="function")
        elif isinstance(event, CallArguments):
            if index in self._custom_texts:
                self._custom_texts[index].append(event.delta)
            else:
                yield self._function_delta(index, {"arguments": event.delta})
        elif index in self._custom_texts:
            text = generated_input("".join(self._custom_texts[index]), event.complete)
            yield _call_delta(index, custom={"input": text})

    def _function_delta(
        self, index: int, function: dict[str, str], **fields: str
    ) -> dict[str, Any]:
        if self.uses_functions:
            return {"function_call": function}
        return _call_delta(index, **fields, function=function)


def _call_delta(index: int, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}
