"""Stored responses: the notes of their sessions, their items, and conversations that go on.

They are bounded in number and bytes: cells of the least recently used ones are dropped, from which
on they are text that is evaluated anew when it is continued, and the oldest of these are deleted.
"""

from asyncio import to_thread, wrap_future
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvkeep.chat.openai_chat import parse_messages
from kvkeep.chat.openai_responses import format_messages, input_items, new_item_id
from kvkeep.engine import Limits, SessionOperations, SessionRecord
from kvkeep.engine.record import is_response_name
from kvkeep.errors import KvkeepError, NoRoom, NoSuchSession
from kvkeep.server.errors import ApiError
from kvkeep.server.service import RequestContext

_RESPONSE_NOTE, _ITEMS_NOTE = "response", "input_items"  # keys of a session's notes
_TEXT_ONLY_NOTE = "text_only"  # true where the cells were dropped
_MAX_DROPPED = 16  # after one response, since each takes time
_MESSAGES_NOTE = "messages"  # the conversation as chat messages, by earlier versions
# Objects with the data of a file, which is not stored, and the fields of the data.
_FILE_TYPES = frozenset(
    ("computer_screenshot", "image_generation_call", "input_audio", "input_file", "input_image")
)
_DATA_FIELDS = frozenset(("data", "file_data", "result"))


async def store_response(
    response: Mapping[str, Any], items: Sequence[Mapping[str, Any]], context: RequestContext
) -> None:
    """Store a response and the items that it answers in the notes of its session."""
    stored = await to_thread(lambda: [_stored_item(item) for item in items])
    notes = {_RESPONSE_NOTE: dict(response), _ITEMS_NOTE: stored}
    set_notes = partial(context.engine.set_notes, response["id"], context.owner, notes)
    try:
        await wrap_future(set_notes())
    except NoRoom:  # its session is on disk again: it waits as a new request would
        await context.service.admission_queue.admit(context.owner, set_notes)
    service, limits = context.service, context.engine.limits
    drop = partial(_drop_oldest, owner=context.owner, limits=limits, started=service.created)
    await wrap_future(context.engine.run(drop))


def _drop_oldest(operations: SessionOperations, owner: str, limits: Limits, started: float) -> None:
    """Drop the owner's least recently used responses, or their cells, beyond the limits.

    The newest one stays, and so do those that are pinned or resident. started: when the server
    was; responses of before that are not complete will never be.
    """
    kept = {pin.record for pin in operations.pins(owner)}
    count, num_bytes, surplus = 0, Counter[bool](), list[tuple[SessionRecord, bool]]()
    for record in operations.sessions(owner):  # the last used first
        is_ended = _RESPONSE_NOTE in record.notes or record.created < started
        if not is_response_name(record.name) or not is_ended:
            continue
        is_text = _TEXT_ONLY_NOTE in record.notes
        count, num_bytes[is_text] = count + 1, num_bytes[is_text] + record.kept_bytes
        is_too_old = count > limits.responses_per_owner
        is_too_much = num_bytes[is_text] > limits.memory
        if count > 1 and (is_too_old or is_too_much) and record not in kept and not record.resident:
            surplus.append((record, is_text or is_too_old))
    for record, is_deleted in surplus[-_MAX_DROPPED:]:
        with suppress(KvkeepError, OSError):  # such as of a disk that is read-only by now
            if is_deleted:
                operations.delete(record.name, owner)
            else:
                operations.drop_cells(record.name, owner, {_TEXT_ONLY_NOTE: True})


async def stored_response(response_id: str, context: RequestContext) -> dict[str, Any]:
    """Return a stored response. Raises ApiError (404) if there is none."""
    return dict((await _stored_notes(response_id, context))[_RESPONSE_NOTE])


async def conversation(
    value: Any, previous_id: str | None, context: RequestContext
) -> list[dict[str, Any]]:
    """Return the items that a response answers, references resolved.

    value: the request's input. previous_id: of the response that it continues. Raises ApiError
    (404) if there is none of this id, InvalidArgument for an input that is no list of items.
    """
    items = input_items(value)
    if previous_id is not None:
        items = [*await _items_through(previous_id, context), *items]
    if not any(map(_is_reference, items)):
        return items
    records = await wrap_future(context.engine.sessions(context.owner))
    stored = {item["id"]: item for record in records for item in _stored_items(record.notes)}
    return [stored.get(item["id"], item) if _is_reference(item) else item for item in items]


async def input_page(
    response_id: str, after: str | None, limit: int, descending: bool, context: RequestContext
) -> dict[str, Any]:
    """Return a page of the items that a response answered. after: id of the item before it."""
    notes = await _stored_notes(response_id, context)
    items = list(notes.get(_ITEMS_NOTE, ()))
    if descending:
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, f"after: response {response_id!r} has no item {after!r:.100}")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


async def _stored_notes(response_id: str, context: RequestContext) -> dict[str, Any]:
    """Return the notes with a finished response. Raises ApiError (404) if there is none."""
    try:
        if not is_response_name(response_id):  # it may be the name of another session
            raise NoSuchSession
        record = await wrap_future(context.engine.use(response_id, context.owner))
        if _RESPONSE_NOTE in record.notes:
            return record.notes
        if (context.owner, response_id) not in context.service.pending_responses:
            raise NoSuchSession
    except NoSuchSession:
        message = f"there is no response {response_id!r:.120}"
        raise ApiError(404, message, "not_found_error") from None
    raise ApiError(404, f"response {response_id!r} is still in progress", "not_found_error")


async def _items_through(response_id: str, context: RequestContext) -> list[dict[str, Any]]:
    """Return the conversation up to and with a stored response."""
    notes = await _stored_notes(response_id, context)
    if _ITEMS_NOTE not in notes and _MESSAGES_NOTE in notes:
        return format_messages(parse_messages(notes[_MESSAGES_NOTE]))
    return _stored_items(notes)


def _stored_items(notes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a response in a session's notes: those that it answers, and its own."""
    if _ITEMS_NOTE not in notes:
        return []
    return [*notes[_ITEMS_NOTE], *notes[_RESPONSE_NOTE]["output"]]


def _is_reference(item: Mapping[str, Any]) -> bool:
    item_type = item.get("type") or ("message" if "role" in item else "item_reference")
    return item_type == "item_reference" and isinstance(item.get("id"), str)


def _stored_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item with an id, and without the data of images and files."""
    item_type, item_id = item.get("type") or "message", item.get("id")
    item_id = item_id if isinstance(item_id, str) and item_id else new_item_id(item_type)
    return {**_without_data(item), "type": item_type, "id": item_id}


def _without_data(value: Any, in_file: bool = False) -> Any:
    """Return a JSON value without the base64 data of files. in_file: whether it is part of one."""
    if isinstance(value, list):
        return [_without_data(entry, in_file) for entry in value]
    if not isinstance(value, Mapping):
        return "" if in_file and isinstance(value, str) and value.startswith("data:") else value
    in_file = in_file or str(value.get("type")) in _FILE_TYPES
    return {
        key: "" if in_file and key in _DATA_FIELDS else _without_data(entry, in_file)
        for key, entry in value.items()
    }
