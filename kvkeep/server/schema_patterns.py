"""Regular expressions in JSON schemas: those that the grammar's engine lacks are dropped."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

_VALUE_KEYWORDS = frozenset(("const", "default", "enum", "examples"))  # they hold no schemas


def without_unsupported_patterns(schema: Any) -> tuple[Any, list[str]]:
    """Return a schema without the patterns that cannot be compiled, and these patterns.

    The engine has no look-around and no back-references, which JSON schemas of pydantic and zod
    contain now and then.
    """
    unsupported = [pattern for pattern in set(_patterns(schema)) if not _is_supported(pattern)]
    return _without(schema, frozenset(unsupported)), sorted(unsupported)


def _patterns(schema: Any) -> Iterator[str]:
    for key, value in _members(schema):
        if key == "pattern" and isinstance(value, str):
            yield value
        elif key == "patternProperties" and isinstance(value, Mapping):
            yield from value
        yield from _patterns(value)


def _without(schema: Any, patterns: frozenset[str]) -> Any:
    if isinstance(schema, list):
        return [_without(member, patterns) for member in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {}
    for key, value in schema.items():
        if key in _VALUE_KEYWORDS:
            result[key] = value
        elif key == "patternProperties" and isinstance(value, Mapping):
            supported = {name: part for name, part in value.items() if name not in patterns}
            result[key] = _without(supported, patterns)
        elif not (key == "pattern" and isinstance(value, str) and value in patterns):
            result[key] = _without(value, patterns)
    return result


def _members(schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, Mapping):
        yield from ((key, value) for key, value in schema.items() if key not in _VALUE_KEYWORDS)
    elif isinstance(schema, list):
        yield from (("", member) for member in schema)


def _is_supported(pattern: str) -> bool:
    schema = json.dumps({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
