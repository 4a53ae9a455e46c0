"""The events of a stored response, as a stream that is retrieved has them: each text at once."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from kvkeep.server.openai.response_items import ItemEvent
from kvkeep.server.openai.response_stream import EventEncoder

_FINAL_FIELDS = ("completed_at", "x_kvkeep")  # which a response gets when it ends
# Of calls: the name of the events of their arguments, and the field of the item.
_ARGUMENTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
# Of the fields with parts: the names of the events of a part and of its text, and of its index.
_PARTS = {
    "content": ("content_part", "content_index"),
    "summary": ("reasoning_summary_part", "summary_index"),
}
_TEXTS = {
    "output_text": "output_text",
    "reasoning_text": "reasoning_text",
    "summary_text": "reasoning_summary_text",
}


async def replayed_events(
    response: Mapping[str, Any], starting_after: int | None
) -> AsyncIterator[bytes]:
    """Yield the events of a stored response behind one of them. starting_after: its number."""
    encoder, skipped = EventEncoder(), -1 if starting_after is None else starting_after
    for number, (event_type, fields) in enumerate(_events(response)):
        data = encoder.encode(event_type, **fields)
        if number > skipped:
            yield data


def _events(response: Mapping[str, Any]) -> Iterator[ItemEvent]:
    begun = {name: value for name, value in response.items() if name not in _FINAL_FIELDS}
    begun |= {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    for name in ("created", "in_progress"):
        yield f"response.{name}", {"response": begun}
    for index, item in enumerate(response["output"]):
        yield from _item_events(index, item)
    yield f"response.{response['status']}", {"response": response}


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[ItemEvent]:
    arguments, field = _ARGUMENTS.get(item["type"], ("", ""))
    empty: dict[str, Any] = {name: [] for name in _PARTS if name in item}
    empty |= {field: ""} if field else {}
    begun = {"status": "in_progress"} if "status" in item else {}
    yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, **begun}}
    place = {"item_id": item["id"], "output_index": index}
    if field:
        text = item[field]
        yield f"response.{arguments}.delta", {**place, "delta": text}
        yield f"response.{arguments}.done", {**place, "name": item["name"], field: text}
    for name in empty.keys() & _PARTS.keys():
        for number, part in enumerate(item[name]):
            yield from _part_events(name, {**place, _PARTS[name][1]: number}, part)
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part_events(field: str, place: dict[str, Any], part: Mapping[str, Any]) -> Iterator[ItemEvent]:
    part_event, text_event = _PARTS[field][0], _TEXTS.get(part["type"])
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    emptied: dict[str, Any] = {"logprobs": []} if logprobs else {}
    yield f"response.{part_event}.added", {**place, "part": {**part, "text": "", **emptied}}
    if text_event:
        text = part["text"]
        yield f"response.{text_event}.delta", {**place, "delta": text, **logprobs}
        yield f"response.{text_event}.done", {**place, "text": text, **logprobs}
    yield f"response.{part_event}.done", {**place, "part": part}
