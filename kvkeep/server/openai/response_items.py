"""Requests and items of OpenAI's responses: messages, tool calls and their results."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from kvkeep.engine import Finished
from kvkeep.errors import InvalidArgument
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.schemas import MAX_TOKENS, RequestBody, SamplingParams
from kvkeep.server.tools import ParsedCall, Tools, validate_tools

ID_PATTERN = r"^resp_[0-9a-f]{24}$"
_STATUSES = {"eos": "completed", "stop": "completed", "length": "incomplete", "full": "incomplete"}


class TextOptions(RequestBody):
    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingParams):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(pattern=ID_PATTERN)] = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKENS)] = None
    store: bool | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    return_progress: bool = False
    timings_per_token: bool = False

    def validate_tools(self) -> Tools:
        """Validate the tools. In chats, a function's fields are one level deeper than here."""
        entries = []
        for tool in self.tools or ():
            fields = ("name", "description", "parameters")
            function = {key: tool[key] for key in fields if tool.get(key) is not None}
            entries.append({"type": tool.get("type"), "function": function})
        return validate_tools(entries, self.tool_choice)

    def text_format(self) -> dict[str, Any]:
        return (self.text.format if self.text else None) or {"type": "text"}

    def output_schema(self) -> Mapping[str, Any] | None:
        """Return the JSON schema that the output must follow; None for any text."""
        text_format = self.text_format()
        format_type, schema = text_format.get("type"), text_format.get("schema")
        if format_type == "json_schema" and not isinstance(schema, dict):
            raise InvalidArgument("text.format.schema must be a JSON schema")
        if format_type not in ("text", "json_object", "json_schema"):
            raise InvalidArgument(f"text.format.type {format_type!r} is not supported")
        return {"text": None, "json_object": ANY_OBJECT, "json_schema": schema}[format_type]

    def system_messages(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.instructions}] if self.instructions else []

    def input_messages(self) -> list[dict[str, Any]]:
        """Return the input as chat messages. Raises InvalidArgument for unknown items."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidArgument("input must be text, or a list of items")
        return [_input_message(index, item) for index, item in enumerate(self.input)]


def _input_message(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    item_type = item.get("type", "message")
    if item_type == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if item_type == "function_call":
        function = {"name": str(item.get("name")), "arguments": str(item.get("arguments", "{}"))}
        call = {"type": "function", "id": item.get("call_id"), "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item_type == "function_call_output":
        return {"role": "tool", "content": str(item.get("output", ""))}
    raise InvalidArgument(
        f"input[{index}] must be a message, a function_call or a function_call_output; "
        f"found {item_type or item!r}"
    )


def output_items(item_id: str, text: str, calls: Sequence[ParsedCall]) -> list[dict[str, Any]]:
    """Return the generated text and calls as items. item_id: of the message with the text."""
    items = [message_item(item_id, text)] if text or not calls else []
    for call in calls:
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call.id}
        fields = {"status": "completed", "name": call.name, "arguments": call.arguments}
        items.append({**item, **fields})
    return items


def message_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [text_part(text)] if status == "completed" else []
    fields = {"id": item_id, "type": "message", "role": "assistant", "status": status}
    return {**fields, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def final_fields(finished: Finished, cached_tokens: int) -> dict[str, Any]:
    """Return status and usage. cached_tokens: first ones of the prompt, not in `finished.usage`."""
    status, prompt_tokens = _STATUSES[finished.reason], cached_tokens + finished.usage.prompt
    incomplete_details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    usage = {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": finished.usage.generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + finished.usage.generated,
    }
    return {"status": status, "incomplete_details": incomplete_details, "usage": usage}


def new_response(response_id: str, body: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the response object of a request that has just begun."""
    fields = {"instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p"}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "store": body.store is not False,
        "text": {"format": body.text_format()},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "truncation": body.truncation or "auto",
        "usage": None,
        **body.model_dump(include=fields),
    }
