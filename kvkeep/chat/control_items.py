"""Items of OpenAI's Responses API that are no messages: they add tools, configure, or compact.

Also the types of items and of parts that kvkeep does not support, for notices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvkeep.chat.fields import optional_mapping
from kvkeep.chat.openai_content import is_part_type
from kvkeep.chat.openai_items import is_item_type

ADDED_TOOLS, CONFIGURATION = "additional_tools", "configuration_update"
TRIGGER = "compaction_trigger"
_KEPT_TYPES = (ADDED_TOOLS, CONFIGURATION)


def item_type(item: Any) -> str:
    """Return the type that an item states; "" if it states none."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return kind if isinstance(kind, str) else ""


def kept_control_items(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the items that stay in force when the conversation around them is compacted."""
    return [dict(item) for item in items if item_type(item) in _KEPT_TYPES]


def added_tools(items: Iterable[Any]) -> list[Any]:
    """Return the entries of the tools that items add, in order."""
    return [
        entry
        for item in items
        if item_type(item) == ADDED_TOOLS and isinstance(item.get("tools"), list)
        for entry in item["tools"]
    ]


def unknown_types(items: Any, where: str = "input") -> list[str]:
    """Return places and types of the items and parts that are of no supported type."""
    return [] if isinstance(items, str) else list(_unknown_types(items or (), where))


def unknown_part_types(content: Any, where: str) -> Iterator[str]:
    """Yield place and type of each part of a content that is of no supported type."""
    for part in content if isinstance(content, list) else ():
        kind = optional_mapping(part).get("type", "text")
        if isinstance(kind, str) and not is_part_type(kind):
            yield f"{where}.{kind:.50}"


def _unknown_types(items: Sequence[Any], where: str) -> Iterator[str]:
    for item in items:
        kind = item_type(item)
        if kind and not is_item_type(kind):
            yield f"{where}.{kind:.50}"
        yield from unknown_part_types(optional_mapping(item).get("content"), f"{where}.content")
