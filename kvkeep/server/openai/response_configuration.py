"""Items of type `configuration_update`, which change settings of the responses after them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvkeep.chat.control_items import CONFIGURATION, item_type
from kvkeep.chat.fields import optional_mapping
from kvkeep.errors import InvalidArgument
from kvkeep.server.limits import MAX_CHARACTERS
from kvkeep.server.openai.response_request import (
    ReasoningOptions,
    ResponsesRequest,
    TextOptions,
)

BodyT = TypeVar("BodyT", bound=ResponsesRequest)
_SETTINGS = {"reasoning": ("effort",), "text": ("format",)}


def configured(body: BodyT, items: Sequence[Any]) -> BodyT:
    """Return a request with the settings of the newest configurations among the items.

    Raises InvalidArgument for a setting of the wrong type.
    """
    fields = dict[str, Any]()
    for item in items:
        if item_type(item) != CONFIGURATION:
            continue
        text, reasoning = (optional_mapping(item.get(name)) for name in ("text", "reasoning"))
        if text.get("format") is not None:
            if not isinstance(text["format"], Mapping):
                raise InvalidArgument(f"{CONFIGURATION}.text.format must be an object")
            options = body.text or TextOptions()
            fields["text"] = options.model_copy(update={"format": dict(text["format"])})
        if "effort" in reasoning:
            effort = reasoning["effort"]
            if not (effort is None or (isinstance(effort, str) and len(effort) <= MAX_CHARACTERS)):
                raise InvalidArgument(f"{CONFIGURATION}.reasoning.effort must be a short text")
            config = body.reasoning or ReasoningOptions()
            fields["reasoning"] = config.model_copy(update={"effort": effort})
            fields["reasoning_effort"] = effort
    return body.model_copy(update=fields) if fields else body


def unknown_settings(item: Mapping[str, Any]) -> list[str]:
    """Return the settings of a configuration that it cannot change."""
    names = list[str]()
    for field, value in item.items():
        if field in _SETTINGS:
            known = _SETTINGS[field]
            names += [f"{field}.{key}" for key in optional_mapping(value) if key not in known]
        elif field not in ("type", "id"):
            names.append(field)
    return [f"input.{CONFIGURATION}.{name:.50}" for name in names]
