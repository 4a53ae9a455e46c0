"""Compaction items of OpenAI's Responses API: a handle to a compacted session, and a text fallback.

An item stands for the whole conversation before it. Its `encrypted_content` is opaque to clients:
the handle of a session that the server holds, and the conversation without old tool results and
thinking, in case that session is gone or the item comes from another server.
"""

import base64
import binascii
import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.chat.context_edits import ContextEdit, apply_edits
from kvkeep.chat.control_items import kept_control_items
from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_responses import format_messages, input_items, new_item_id, parse_chat

ITEM_TYPES = ("compaction", "compaction_summary", "context_compaction")
_HANDLE = re.compile(r"cmp_[0-9a-f]{24}")
_MARK = "kvkeep1."  # begins the content of our items
_MAX_BYTES = 64_000_000  # of an item's conversation
_KEPT_RESULTS = 3
_EDITS = (
    ContextEdit("", "clear_thinking", keep=1),
    ContextEdit("", "clear_tool_uses", keep=_KEPT_RESULTS),
)


@dataclass(frozen=True)
class CompactedHistory:
    """The history behind a compaction item: its items, and the session that holds their cells."""

    handle: str
    items: tuple[dict[str, Any], ...]


HistoryParser = Callable[[bytes], CompactedHistory]  # of an item's JSON; raises ValueError


def new_handle() -> str:
    """Return a handle for a compacted session: its name, and that of its snapshot."""
    return f"cmp_{secrets.token_hex(12)}"


def is_handle(name: str) -> bool:
    return _HANDLE.fullmatch(name) is not None


def kept_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation's items without old tool results and thinking.

    Tools that items add, and configurations, come first.
    """
    chat = parse_chat({"input": list(items)})
    kept, _ = apply_edits(chat, _EDITS, _count_characters)
    return [*kept_control_items(items), *format_messages(kept.messages)]


def compaction_item(history: CompactedHistory) -> dict[str, Any]:
    """Return the item that stands for a history."""
    document = {"handle": history.handle, "items": list(history.items)}
    packed = zlib.compress(json.dumps(document, ensure_ascii=False).encode())
    content = _MARK + base64.urlsafe_b64encode(packed).decode()
    return {"id": new_item_id("compaction"), "type": "compaction", "encrypted_content": content}


def parse_history(document: bytes) -> CompactedHistory:
    """Parse an item's JSON. Raises ValueError, KeyError or TypeError if it is of another form."""
    fields = json.loads(document)
    items = tuple(dict(entry) for entry in fields["items"])
    return CompactedHistory(str(fields["handle"]), items)


def read_compaction(
    item: Mapping[str, Any], parse: HistoryParser = parse_history
) -> CompactedHistory | None:
    """Return what an item stands for; None if it is foreign, damaged or too large."""
    if not _is_own(item):
        return None
    try:
        packed = base64.urlsafe_b64decode(item["encrypted_content"].removeprefix(_MARK))
        reader = zlib.decompressobj()
        document = reader.decompress(packed, _MAX_BYTES)
        return parse(document) if reader.eof else None
    except (binascii.Error, zlib.error, ValueError, KeyError, TypeError, RecursionError):
        return None


def expand_compaction(
    items: Sequence[Any], parse: HistoryParser = parse_history
) -> tuple[list[Any], str | None, list[str]]:
    """Return a request's items with the history in place of its newest compaction item.

    Messages before the item that the history does not contain come behind it. Tools and
    configurations in items before it replace those of the history. Also returns the
    handle, None if there is none, and warnings, in words. Foreign items are left out. One item of
    kvkeep is unpacked at most: if it cannot be read, older ones are left out, too.
    """
    warnings = list[str]()
    for index in range(len(items) - 1, -1, -1):
        if not _is_compaction(items[index]):
            continue
        if not _is_own(items[index]):
            warnings.append("input: a compaction item of another server cannot be read")
            continue
        history = read_compaction(items[index], parse)
        if history is None:
            warnings.append("input: a compaction item is damaged or too large, and is left out")
            break
        controls = kept_control_items(items[:index])
        replaced = {item["type"] for item in controls}
        held = [item for item in history.items if item.get("type") not in replaced]
        known = {_text_of(item) for item in held}
        added = [
            item
            for item in items[:index]
            if not _is_compaction(item) and _is_message(item) and _text_of(item) not in known
        ]
        rest = [item for item in items[index + 1 :] if not _is_compaction(item)]
        return [*controls, *held, *added, *rest], history.handle, warnings
    return [item for item in items if not _is_compaction(item)], None, warnings


def user_messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of users, which clients keep beside a compaction item."""
    return [dict(item) for item in items if _is_message(item) and item.get("role") == "user"]


def _is_compaction(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type") in ITEM_TYPES


def _is_own(item: Mapping[str, Any]) -> bool:
    content = item.get("encrypted_content")
    return isinstance(content, str) and content.startswith(_MARK)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type", "message") == "message"


def _text_of(item: Mapping[str, Any]) -> str:
    """Return the role and text of a message: what it says, however its client writes it."""
    if not _is_message(item):
        return ""
    (message, *_) = parse_chat({"input": input_items([dict(item)])}).messages
    return f"{message.role}\n{message.text}"


def _count_characters(chat: Chat) -> int:
    return len(json.dumps(format_messages(chat.messages), default=str))
