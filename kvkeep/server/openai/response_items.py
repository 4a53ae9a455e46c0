"""Items of a response: their generation and the events of their streaming; the response object."""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.chat.openai_responses import (
    format_generated_call,
    new_item_id,
    output_message,
    reasoning_item,
)
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    GeneratedCall,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from kvkeep.engine import Finished
from kvkeep.server.openai.custom_calls import CustomInput
from kvkeep.server.openai.response_request import ResponsesRequest

ItemEvent = tuple[str, dict[str, Any]]  # type and fields
_ARGUMENT_EVENTS = {
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
_ARGUMENT_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}


class ResponseItems:
    """The items of a response as they are generated, one open at a time.

    Text of white space alone, before or between other items, is left out.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        tools: Sequence[Tool],
        compaction: dict[str, Any] | None = None,
        own_call_types: Collection[str] = (),
    ):
        """tools: those that the model may call. compaction: an item that precedes the answer.

        own_call_types: of tools whose calls have items of their own (`openai_tools.client_types`).
        """
        self.items = [] if compaction is None else [compaction]  # the last one may be open
        self.num_given = len(self.items)  # that are not generated
        self._tools, self._client_types = tools, own_call_types
        self._summarizes = request.summarizes_reasoning
        self._open_type = ""  # of the open item; "" if there is none
        # Of the open message or reasoning, or the arguments of the open call; joined at its end.
        self._texts: list[str] = []
        self._space = ""  # text that is left out unless more text follows
        self._space_logprobs: list[Any] = []  # of its tokens
        self._call = GeneratedCall("", "", "")  # the open one
        self._input = CustomInput()  # of the open custom call
        self._logprobs: list[dict[str, Any]] = []  # of the open message

    def begin(self) -> Iterator[ItemEvent]:
        """Yield the events of the items that are not generated."""
        for index, item in enumerate(self.items[: self.num_given]):
            yield "response.output_item.added", {"output_index": index, "item": item}
            yield "response.output_item.done", {"output_index": index, "item": item}

    def push(self, event: OutputEvent, logprobs: Sequence[Any] = ()) -> Iterator[ItemEvent]:
        """Yield the events of a part of the answer. logprobs: of its tokens."""
        match event:
            case TextDelta():
                yield from self._push_text(event.text, logprobs)
            case ReasoningDelta():
                yield from self._push_reasoning(event.text)
            case CallStarted():
                yield from self._start_call(event)
            case CallArguments():
                self._texts.append(event.delta)
                yield from self._argument_delta(event.delta)
            case CallEnded():
                yield from self._end_call(event.complete)

    @property
    def ends_with_partial_call(self) -> bool:
        """Whether the last item is a call that was cut off."""
        return bool(self.items) and self.items[-1].get("status") == "incomplete"

    def finish(self, status: str) -> Iterator[ItemEvent]:
        """Yield the last events. An item that `status` "incomplete" cut off is so itself."""
        if len(self.items) == self.num_given:
            text, logprobs = self._space, self._space_logprobs
            yield from self._open("message", output_message(""))
            if text:
                yield from self._text_delta(text, logprobs)
        if self._open_type in _ARGUMENT_FIELDS:
            yield from self._end_call(complete=False)
        yield from self._close(status)

    # Text and reasoning

    def _push_text(self, text: str, logprobs: Sequence[Any]) -> Iterator[ItemEvent]:
        if self._open_type != "message":
            text, logprobs = self._space + text, [*self._space_logprobs, *logprobs]
            if not text.strip():
                self._space, self._space_logprobs = text, logprobs
                return
            yield from self._close()
            yield from self._open("message", output_message(""))
        yield from self._text_delta(text, logprobs)

    def _text_delta(self, text: str, logprobs: Sequence[Any]) -> Iterator[ItemEvent]:
        self._texts.append(text)
        self._logprobs += logprobs
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=[*logprobs])

    def _push_reasoning(self, text: str) -> Iterator[ItemEvent]:
        if self._open_type != "reasoning":
            yield from self._close()
            yield from self._open("reasoning", self._reasoning_item(""))
        self._texts.append(text)
        name, index = self._reasoning_names()
        yield self._event(f"{name}.delta", **index, delta=text)

    def _reasoning_names(self) -> tuple[str, dict[str, int]]:
        """Return the name of the events of reasoning's text, and the field with its index."""
        if self._summarizes:
            return "reasoning_summary_text", {"summary_index": 0}
        return "reasoning_text", {"content_index": 0}

    def _reasoning_item(self, text: str) -> dict[str, Any]:
        item = reasoning_item(text)
        if not self._summarizes:
            return item
        return {**item, "summary": [{"type": "summary_text", "text": text}], "content": []}

    # Calls

    def _start_call(self, event: CallStarted) -> Iterator[ItemEvent]:
        yield from self._close()
        self._call = GeneratedCall(event.id, event.name, "")
        self._texts, self._input = [], CustomInput()
        item = self._format_call()
        self._open_type = item["type"]
        if self._open_type in _ARGUMENT_FIELDS:
            item[_ARGUMENT_FIELDS[self._open_type]] = ""
            yield self._add(item)

    def _format_call(self) -> dict[str, Any]:
        return format_generated_call(self._call, self._tools, self._client_types)

    def _argument_delta(self, delta: str) -> Iterator[ItemEvent]:
        if self._open_type == "custom_tool_call":
            delta = self._input.push(delta)
        if delta and self._open_type in _ARGUMENT_EVENTS:
            yield self._event(f"{_ARGUMENT_EVENTS[self._open_type]}.delta", delta=delta)

    def _end_call(self, complete: bool) -> Iterator[ItemEvent]:
        arguments = "".join(self._texts)
        self._call = GeneratedCall(self._call.id, self._call.name, arguments, complete)
        item, item_type = self._format_call(), self._open_type
        if item_type not in _ARGUMENT_FIELDS:
            yield self._add(item)
        else:
            item["id"] = self.items[-1]["id"]
            self.items[-1] = item
            field, event = _ARGUMENT_FIELDS[item_type], _ARGUMENT_EVENTS[item_type]
            if item_type == "custom_tool_call" and not complete:
                item["input"] = self._input.text
            if item_type == "custom_tool_call" and (delta := self._input.extend(item["input"])):
                yield self._event(f"{event}.delta", delta=delta)
            yield self._event(f"{event}.done", name=item["name"], **{field: item[field]})
        self._open_type = ""
        yield self._item_event("done")

    # The open item

    def _open(self, item_type: str, item: dict[str, Any]) -> Iterator[ItemEvent]:
        self._open_type, self._texts, self._logprobs = item_type, [], []
        empty_lists: dict[str, Any] = {
            field: [] for field in ("content", "summary") if field in item
        }
        yield self._add({**item, **empty_lists})
        if item.get("summary"):
            (part,) = item["summary"]
            yield self._event("reasoning_summary_part.added", summary_index=0, part=part)
        else:
            (part,) = item["content"]
            yield self._event("content_part.added", content_index=0, part=part)

    def _add(self, item: dict[str, Any]) -> ItemEvent:
        """Append an item as it begins."""
        item = {"id": new_item_id(item["type"]), **item, "status": "in_progress"}
        self.items.append(item)
        return self._item_event("added")

    def _close(self, status: str = "completed") -> Iterator[ItemEvent]:
        """End the open message or reasoning."""
        self._space, self._space_logprobs = "", []
        text = "".join(self._texts)
        if self._open_type == "message":
            item = output_message(text)
            (part,) = item["content"]
            part["logprobs"] = self._logprobs
            fields = {"text": text, "logprobs": self._logprobs}
            yield self._event("output_text.done", content_index=0, **fields)
            yield self._event("content_part.done", content_index=0, part=part)
        elif self._open_type == "reasoning":
            item = self._reasoning_item(text)
            name, index = self._reasoning_names()
            yield self._event(f"{name}.done", **index, text=text)
            part = (item["summary"] or item["content"])[0]
            part_event = "reasoning_summary_part" if self._summarizes else "content_part"
            yield self._event(f"{part_event}.done", **index, part=part)
        else:
            return
        self._open_type = ""
        self.items[-1] = {"id": self.items[-1]["id"], **item, "status": status}
        yield self._item_event("done")

    def _item_event(self, name: str) -> ItemEvent:
        fields = {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}
        return f"response.output_item.{name}", fields

    def _event(self, name: str, /, **fields: Any) -> ItemEvent:
        """Return an event of the last item."""
        location = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return f"response.{name}", {**location, **fields}


def final_fields(
    status: str, finished: Finished, prepared_tokens: int, reasoning_tokens: int
) -> dict[str, Any]:
    """Return status and usage.

    prepared_tokens: first ones of the prompt that the session held, not in `finished.usage`.
    """
    usage = finished.usage
    prompt_tokens, cached_tokens = (prepared_tokens + n for n in (usage.prompt, usage.reuse.tokens))
    reached_limit = status == "incomplete" and finished.reason in ("length", "full")
    return {
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if reached_limit else None,
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": prompt_tokens + usage.generated,
        },
    }


def new_response(
    response_id: str, body: ResponsesRequest, model: str, slides: bool
) -> dict[str, Any]:
    """Return the response object of a request that has just begun."""
    fields = {"instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p"}
    fields |= {"max_tool_calls", "top_logprobs", "prompt_cache_key", "prompt_cache_retention"}
    options = body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {
            "effort": options.effort if options else None,
            "summary": options.summary if options else None,
        },
        "store": body.stores,
        "text": {"format": body.text_format()},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "truncation": body.truncation or ("auto" if slides else "disabled"),
        "usage": None,
        **body.model_dump(include=fields),
    }
