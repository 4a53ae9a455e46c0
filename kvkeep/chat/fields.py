"""Fields of JSON objects, checked; errors name their place and show the beginning of the value."""

from collections.abc import Mapping
from typing import Any

from kvkeep.chat.messages import ReasoningPart, Role
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.chat_template import REASONING_FIELDS

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MAX_NESTING = 200  # objects and lists inside each other: what walks through them recurses


def expect_mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Return a value that is an object. Raises InvalidArgument for others."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{where} must be an object; found {value!r:.100}")
    return value


def is_nested_too_deeply(value: Any) -> bool:
    """Whether a JSON value has more than `MAX_NESTING` objects and lists inside each other."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [container for container in level if isinstance(container, (dict, list))]
        if not level:
            return False
        level = [
            member
            for container in level
            for member in (container.values() if isinstance(container, dict) else container)
        ]
    return True


def optional_list(value: Any, where: str) -> list[Any]:
    """Return a value that is a list; [] for None. Raises InvalidArgument for others."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidArgument(f"{where} must be a list; found {value!r:.100}")
    return value


def optional_mapping(value: Any) -> Mapping[str, Any]:
    """Return a value that is an object; an empty one for others."""
    return value if isinstance(value, Mapping) else {}


def optional_text(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that is text; "" if it is missing or null. Raises InvalidArgument."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}.{name} must be text; found {value!r:.100}")
    return value


def parse_role(message: Any, where: str) -> Role:
    """Return the role of a message of OpenAI's or Ollama's APIs. Raises InvalidArgument."""
    found = message
    if isinstance(message, Mapping):
        found = message.get("role")
        if isinstance(found, str) and found in _ROLES:
            return _ROLES[found]
    raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}; found {found!r:.100}")


def parse_reasoning(message: Mapping[str, Any]) -> ReasoningPart:
    """Return the reasoning of a message, from the first of the fields that clients use."""
    texts = (message.get(field) for field in REASONING_FIELDS)
    return ReasoningPart(next((text for text in texts if isinstance(text, str) and text), ""))


def require_remote_url(name: str, where: str) -> None:
    """Raise InvalidArgument for a URL of a file on the server's machine, which is never read."""
    if name[:5].lower() == "file:":
        raise InvalidArgument(f"{where} must be an http, https or data URL; found {name!r:.100}")
