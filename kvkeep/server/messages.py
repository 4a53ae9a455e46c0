"""Messages as clients write them, made into those that a chat template takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.errors import InvalidArgument

_ROLES = {"developer": "system"}  # a name that templates do not know yet


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same with contents as text. Raises InvalidArgument for what is none, such as images."""
    if not messages:
        raise InvalidArgument("messages: there must be one at least")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    made = {**message, "role": _ROLES.get(role, role) if isinstance(role, str) else role}
    content = message.get("content")
    if isinstance(content, list):
        made["content"] = "".join(_text(index, part) for part in content)
    elif content is None and not message.get("tool_calls"):
        raise InvalidArgument(f"messages[{index}] has no content")
    elif content is None:
        made["content"] = ""
    return made


def _text(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise InvalidArgument(
            f"messages[{index}]: parts of a content are text here; found {kind or part!r}"
        )
    return text
