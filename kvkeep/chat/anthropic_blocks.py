"""Content blocks of Anthropic's API, and the parts of a message that they become.

Every block that a hosted client can send back has a meaning here: those of server tools are calls
and results as those of other tools, content that no text model takes is a placeholder, and what
only the hosted API can read is left out.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import quoteattr

from kvkeep.chat.anthropic_tool_changes import (
    CHANGE_TYPES,
    ToolChange,
    changes_text,
    is_summary,
    parse_changes,
)
from kvkeep.chat.fields import optional_mapping, optional_text, require_remote_url
from kvkeep.chat.messages import (
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
    content_text,
    normalized,
)
from kvkeep.chat.openai_content import parse_argument_value
from kvkeep.chat.tool_schemas import tool_line
from kvkeep.errors import InvalidArgument

# Fields that only the hosted API can read.
_OPAQUE_FIELDS = frozenset(
    ("cache_control", "citations", "data", "encrypted_content", "encrypted_index", "signature")
)
# Blocks of an answer that say nothing to a model.
_SILENT_TYPES = ("redacted_thinking", "fallback", "mcp_tool_listing")
_CONTENT_TYPES = (
    *("text", "image", "document", "search_result", "tool_reference", "container_upload"),
    *("compaction", "thinking"),
)
_KNOWN_TYPES = frozenset((*_CONTENT_TYPES, *_SILENT_TYPES, *CHANGE_TYPES))
_RESULT_TYPES = ("tool_result", "mcp_tool_result")  # with content as of messages
_ToolsByName = Mapping[str, Tool]


def unknown_types(content: Any) -> Iterator[str]:
    """Yield the types of blocks, those of results included, that have no meaning here."""
    for block in content if isinstance(content, list) else ():
        block_type = optional_mapping(block).get("type")
        if not isinstance(block_type, str):
            continue
        if block_type.endswith("tool_result"):
            if block_type in _RESULT_TYPES:
                yield from unknown_types(block.get("content"))
        elif not block_type.endswith("tool_use") and block_type not in _KNOWN_TYPES:
            yield block_type


def parse_blocks(
    content: Any, where: str, tools: _ToolsByName, is_answer: bool = False, start: int = 0
) -> list[Part]:
    """Return the parts of a message's content: a text, or a list of blocks.

    where: names the content in errors. tools: those that a `tool_reference` can refer to.
    is_answer: whether a model wrote it; blocks of unknown types are then left out. start: the index
    of the first block, for errors. Raises InvalidArgument for what is no content.
    """
    parts: list[Part] = []
    changes: list[ToolChange] = []  # that are not described yet
    for index, block in enumerate(_block_list(content, where), start):
        block_where = f"{where}[{index}]"
        block_type = _block_type(block, block_where)
        if block_type in CHANGE_TYPES:
            changes += parse_changes([block], block_where)
            continue
        parts += _described(changes, parts, tools)
        changes = []
        if block_type == "thinking":
            parts.append(ReasoningPart(optional_text(block, "thinking", block_where)))
        elif block_type in _SILENT_TYPES:
            continue
        elif block_type.endswith("tool_use"):
            name = optional_text(block, "name", block_where) or block_type.removesuffix("_tool_use")
            call_id = optional_text(block, "id", block_where)
            parts.append(ToolCall(call_id, name, parse_argument_value(block.get("input"))))
        elif block_type.endswith("tool_result"):
            parts.append(_tool_result(block, block_where, tools))
        elif not is_answer or block_type in _KNOWN_TYPES:
            parts += _content_parts(block, block_where, tools)
        if is_summary(block):
            changes = parse_changes(block.get("tool_changes"), f"{block_where}.tool_changes")
    return [*parts, *_described(changes, parts, tools)]


def _described(
    changes: Sequence[ToolChange], before: Sequence[Part], tools: _ToolsByName
) -> list[TextPart]:
    """Return changes of tools as a text in lines of its own. before: the parts before it."""
    text = changes_text(changes, tools)
    if not text:
        return []
    last = before[-1] if before else None
    start = "\n" if isinstance(last, TextPart) and not last.text.endswith("\n") else ""
    return [TextPart(start + text)]


def parse_content(
    content: Any, where: str, tools: _ToolsByName
) -> tuple[TextPart | MediaPart, ...]:
    """Return the parts of a content without calls, results and thinking; neighbouring texts joined.

    Arguments as of `parse_blocks`.
    """
    blocks = enumerate(_block_list(content, where))
    parts = [
        part
        for index, block in blocks
        for part in _content_parts(block, f"{where}[{index}]", tools)
    ]
    (message,) = normalized([Message("tool", tuple(parts))])
    return tuple(part for part in message.parts if isinstance(part, (TextPart, MediaPart)))


def format_parts(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return parts as blocks. Audio and video become text: the API has no blocks for them."""
    return [_format_part(part) for part in parts]


def _format_part(part: Part) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case ReasoningPart():
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case ToolCall():
            call = {"id": part.id, "name": part.name, "input": dict(part.arguments)}
            return {"type": "tool_use", **call}
        case ToolResult():
            content = format_parts(part.content)
            error = {"is_error": True} if part.is_error else {}
            return {"type": "tool_result", "tool_use_id": part.call_id, "content": content, **error}
        case MediaPart(kind="image" | "file"):
            block_type = "image" if part.kind == "image" else "document"
            return {"type": block_type, "source": {"type": "file", "file_id": part.name}}
    return {"type": "text", "text": part.placeholder}


def _block_list(content: Any, where: str) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidArgument(f"{where} must be text or a list of blocks; found {content!r:.100}")
    return content


def _block_type(block: Any, where: str) -> str:
    block_type = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(block_type, str):
        return block_type
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return "text"
    raise InvalidArgument(f"{where} must be a block with a type; found {block!r:.100}")


def _content_parts(block: Any, where: str, tools: _ToolsByName) -> list[TextPart | MediaPart]:
    """Return the parts of a block that is neither a call, a result nor thinking."""
    block_type = _block_type(block, where)
    match block_type:
        case "text":
            if not isinstance(block.get("text"), str):
                raise InvalidArgument(
                    f"{where}.text must be text; found {block.get('text')!r:.100}"
                )
            return [TextPart(block["text"])]
        case "image":
            name = _source_name(block)
            require_remote_url(name, f"{where}.source.url")
            return [MediaPart("image", name)]
        case "document":
            return _document(block, where, tools)
        case "search_result":
            attributes = {"title": block.get("title"), "source": block.get("source")}
            content = parse_content(block.get("content"), f"{where}.content", tools)
            return _element("search_result", attributes, content)
        case "tool_reference":
            return [TextPart(_reference_text(optional_text(block, "tool_name", where), tools))]
        case "container_upload":
            return [MediaPart("file", optional_text(block, "file_id", where))]
        case "compaction":  # a summary of what was before
            return list(parse_content(block.get("content"), f"{where}.content", tools))
    return [TextPart(f"[{block_type} omitted]")]


def _document(
    block: Mapping[str, Any], where: str, tools: _ToolsByName
) -> list[TextPart | MediaPart]:
    """Return a document: its text as an element, or a placeholder if it is not text."""
    source = optional_mapping(block.get("source"))
    source_type = source.get("type")
    if source_type == "text":
        content: tuple[TextPart | MediaPart, ...] = (TextPart(str(source.get("data") or "")),)
    elif source_type == "content":
        content = parse_content(source.get("content"), f"{where}.source.content", tools)
    else:
        return [MediaPart("file", str(block.get("title") or "") or _source_name(block))]
    attributes = {"title": block.get("title"), "context": block.get("context")}
    return _element("document", attributes, content)


def _element(
    name: str, attributes: Mapping[str, Any], content: Iterable[TextPart | MediaPart]
) -> list[TextPart | MediaPart]:
    """Return the content in a tag that sets it apart from the text around it."""
    written = "".join(
        f" {key}={quoteattr(str(value))}" for key, value in attributes.items() if value
    )
    return [TextPart(f"<{name}{written}>\n"), *content, TextPart(f"\n</{name}>\n")]


def _source_name(block: Mapping[str, Any]) -> str:
    """Return the URL or the file id of an image or a document; "" for data."""
    source = optional_mapping(block.get("source"))
    name = source.get("file_id") or source.get("url") or ""
    return name if isinstance(name, str) and not name.startswith("data:") else ""


def _reference_text(name: str, tools: _ToolsByName) -> str:
    """Return a tool's definition as a line of JSON; its name if the request does not define it."""
    tool = tools.get(name)
    if tool is None:
        return f"{name}\n"
    return tool_line(tool) + "\n"


def _tool_result(block: Mapping[str, Any], where: str, tools: _ToolsByName) -> ToolResult:
    call_id, content = optional_text(block, "tool_use_id", where), block.get("content")
    if block["type"] in _RESULT_TYPES:
        parts = parse_content(content, f"{where}.content", tools)
        return ToolResult(call_id, parts, is_error=bool(block.get("is_error")))
    texts = [text for item in _items(content) if (text := _server_result_text(item, tools))]
    is_error = any(_is_error(item) for item in _items(content))
    return ToolResult(call_id, (TextPart("\n".join(texts)),) if texts else (), is_error)


def _items(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _is_error(item: Any) -> bool:
    return str(optional_mapping(item).get("type")).endswith("_error")


def _server_result_text(item: Any, tools: _ToolsByName) -> str:
    """Return an item of a server tool's result as text: tool references, texts, or JSON."""
    if isinstance(item, str) or item is None:
        return item or ""
    if not isinstance(item, Mapping):
        return json.dumps(item, ensure_ascii=False)
    if isinstance(references := item.get("tool_references"), list):
        names = [str(optional_mapping(reference).get("tool_name")) for reference in references]
        return "".join(_reference_text(name, tools) for name in names).removesuffix("\n")
    document = optional_mapping(item.get("content"))
    if document.get("type") == "document":
        text = content_text(_document(document, "content", tools))
        return f"{item.get('url') or ''}\n{text}".strip()
    fields = {
        key: value
        for key, value in item.items()
        if key not in _OPAQUE_FIELDS and key != "type" and value not in (None, "", [])
    }
    if fields.keys() == {"text"}:
        return str(fields["text"])
    return json.dumps(fields, ensure_ascii=False) if fields else ""
