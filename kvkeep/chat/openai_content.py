"""Content of OpenAI's messages and items, texts and media, and the arguments of their calls."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvkeep.chat.fields import optional_mapping, require_remote_url
from kvkeep.chat.messages import MediaPart, Message, Part, ReasoningPart, TextPart, normalized
from kvkeep.chat.output import parse_arguments
from kvkeep.errors import InvalidArgument

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
_REASONING_TYPES = ("reasoning", "reasoning_text", "thinking")
_MEDIA_KINDS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
}
_NAME_FIELDS = ("filename", "file_id", "image_url", "file_url", "url")


def is_part_type(kind: str) -> bool:
    """Whether parts of this type are read; others become a note of what is left out."""
    return kind in _TEXT_FIELDS or kind in _MEDIA_KINDS or kind in _REASONING_TYPES


def parse_parts(content: Any, where: str) -> list[Part]:
    """Return the parts of a content: text, a list of parts, or null. Raises InvalidArgument."""
    if content is None:
        return []
    if isinstance(content, str):
        return [TextPart(content)]
    if not isinstance(content, list):
        raise InvalidArgument(
            f"{where} must be text, a list of parts or null; found {content!r:.100}"
        )
    return [_parse_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def parse_content(content: Any, where: str) -> tuple[TextPart | MediaPart, ...]:
    """Return the texts and media of a content, as `parse_parts`, in normal form."""
    parts = (
        TextPart(part.text) if isinstance(part, ReasoningPart) else part
        for part in parse_parts(content, where)
    )
    (message,) = normalized([Message("tool", tuple(parts))])
    return tuple(part for part in message.parts if isinstance(part, (TextPart, MediaPart)))


def parse_result(output: Any, where: str) -> tuple[TextPart | MediaPart, ...]:
    """Return the content of a call's result: text, parts, or any JSON value, as its text."""
    if isinstance(output, list) and all(_is_part(part) for part in output):
        return parse_content(output, where)
    if _is_part(output):
        return parse_content([output], where)
    if output is None or isinstance(output, str):
        return parse_content(output, where)
    return (TextPart(json.dumps(output, ensure_ascii=False)),)


def parse_argument_value(value: Any) -> dict[str, Any]:
    """Return the arguments of a call, from their JSON text, an object, or null."""
    if isinstance(value, Mapping):
        return dict(value)
    return parse_arguments(value if isinstance(value, str) else json.dumps(value))


def media_text(parts: Iterable[TextPart | MediaPart]) -> str | None:
    """Return the text of parts that are text only; None if there is other content."""
    texts = [part.text if isinstance(part, TextPart) else None for part in parts]
    return None if None in texts else "".join(text for text in texts if text)


def _is_part(value: Any) -> bool:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return isinstance(kind, str) and (kind in _TEXT_FIELDS or kind in _MEDIA_KINDS)


def _parse_part(part: Any, where: str) -> Part:
    if isinstance(part, str):
        return TextPart(part)
    part_type = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(part_type, str):
        raise InvalidArgument(f"{where} must be a part with a type; found {part!r:.100}")
    if part_type in _TEXT_FIELDS or part_type in _REASONING_TYPES:
        field = _TEXT_FIELDS.get(part_type) or ("thinking" if "thinking" in part else "text")
        text = part.get(field)
        if not isinstance(text, str):
            raise InvalidArgument(f"{where}.{field} must be text; found {text!r:.100}")
        return TextPart(text) if part_type in _TEXT_FIELDS else ReasoningPart(text)
    if part_type in _MEDIA_KINDS:
        name = _media_name(part, part_type)
        require_remote_url(name, f"{where}.{part_type}")
        return MediaPart(_MEDIA_KINDS[part_type], name)
    return TextPart(f"[{part_type:.50} omitted]")


def _media_name(part: Mapping[str, Any], part_type: str) -> str:
    """Return the file's name, id or URL; "" for data."""
    for fields in (part, optional_mapping(part.get(part_type))):
        for field in _NAME_FIELDS:
            value = fields.get(field)
            if isinstance(value, str) and value and not value.startswith("data:"):
                return value
    return ""
