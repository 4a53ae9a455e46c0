"""Rules of a grammar as text for llguidance, in its variant of Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvkeep.errors import InvalidArgument
from kvkeep.server.limits import MAX_SCHEMA_CHARACTERS

_COMPACT = {"whitespace_flexible": False, "lenient": True}
_LOOSE = {**_COMPACT, "item_separator": ", ?", "key_separator": ": ?"}
_SPACED = {**_COMPACT, "item_separator": ", ", "key_separator": ": "}
_INDENTED = {"whitespace_pattern": "[ \\n]{1,24}", "lenient": True}
_ANY_TEXT = "/(?s:.*)/"


class LarkRules:
    """The rules of one grammar. Methods return expressions for the bodies of further rules."""

    def __init__(self, marker_ids: Mapping[str, int], end_ids: Sequence[int]):
        """marker_ids: the tokens of markers; others are plain text. end_ids: the end tokens."""
        self._marker_ids, self._end_ids = marker_ids, frozenset(end_ids)
        self._lines: list[str] = []
        self._size = 0
        self._names: dict[str, str] = {}

    def add(self, body: str, options: str = "") -> str:
        """Add a rule, and return its name. Raises InvalidArgument if there is too much text."""
        name = f"rule{len(self._lines)}"
        self.define(f"{name}{options}", body)
        return name

    def add_once(self, body: str) -> str:
        """Return the name of a rule that is added if there is none of the same body."""
        if body not in self._names:
            self._names[body] = self.add(body)
        return self._names[body]

    def define(self, name: str, body: str) -> None:
        """Add a rule with a name, which others can use before."""
        self._size += len(body)
        if self._size > MAX_SCHEMA_CHARACTERS:
            raise InvalidArgument(
                f"a grammar can have at most {MAX_SCHEMA_CHARACTERS:,} characters"
            )
        self._lines.append(f"{name}: {body}")

    def text(self, start: str) -> str:
        """Return the whole grammar, which begins with the expression `start`."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def is_token(self, marker: str) -> bool:
        return marker in self._marker_ids

    def marker(self, text: str) -> str:
        """Return a marker; nothing for an end token, which ends the answer anyway."""
        token = self._marker_ids.get(text)
        if token is None:
            return literal(text)
        return "" if token in self._end_ids else f"<[{token}]>"

    def template_text(self, text: str) -> str:
        """Return a template's text, in which the texts of markers are these."""
        names = sorted(self._marker_ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, filter(None, names))) or "(?!)"
        parts = re.split(f"({pattern})", text)
        return " ".join(self.marker(part) for part in parts if part)

    def text_up_to(self, end: str) -> str:
        """Return any text and the first `end` behind it, a marker or a text."""
        if self.is_token(end):
            return f"{_ANY_TEXT} {self.marker(end)}"
        return self.add(_ANY_TEXT, f"[suffix={literal(end)}]")

    def repeated(self, body: str, between: str = "") -> str:
        """Return something once or several times, with something between."""
        name = self.add(body)
        return f"{name} ({between} {name})*"

    def separated(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return items in their order, and separators between them. Each with: is it required?"""
        first = rest = ""
        for item, is_required in reversed(items):
            later = f"{separator} {item} {rest}"
            alone = f"{item} {rest}"
            if not is_required:
                later = f"{later} | {rest}" if rest else f"({later})?"
                alone = f"{alone} | {first}" if first else f"({alone})?"
            first, rest = self.add(alone), self.add(later)
        return first


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def either(expressions: Iterable[str]) -> str:
    return " | ".join(expressions)


def json_value(schema: Mapping[str, Any], options: Mapping[str, Any] = _LOOSE) -> str:
    """Return JSON by a prepared schema. A space may follow commas and colons."""
    return "%json " + json.dumps({**schema, "x-guidance": options})


def compact_json(schema: Mapping[str, Any]) -> str:
    """Return JSON without spaces, as `Grammar.from_schema` writes it."""
    return json_value(schema, _COMPACT)


def spaced_json(schema: Mapping[str, Any]) -> str:
    """Return JSON with a space after each comma and colon."""
    return json_value(schema, _SPACED)


def indented_json(schema: Mapping[str, Any]) -> str:
    """Return JSON that may have line breaks and indentation."""
    return json_value(schema, _INDENTED)
