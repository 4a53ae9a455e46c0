"""Refusal of JSON schemas with which llguidance overflows its stack, which ends the process."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvkeep.errors import InvalidArgument

_MIN_NUMBER = -9.2e18  # llguidance recurses endlessly at integers from -2^63 to about -2^63 + 1000
_MAX_REFERENCES = 500  # different ones
_MAX_LEVELS = 2_000  # through references; it overflows a stack of 8 MB at some 3,000


def require_safe_schema(schema: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for very low numbers, and for long chains of references.

    The library follows each reference once on a path. So its depth is at most that of the schema
    and of all targets which can be reached from one reference.
    """
    references = require_few_references(schema)
    targets = {reference: _target(schema, reference) for reference in references}
    depths = {reference: _depth(target) for reference, target in targets.items()}
    links = {reference: references_of(target) for reference, target in targets.items()}
    own_depth = _depth(schema)
    for reference in references:
        levels = own_depth + sum(depths[other] for other in _reachable(reference, links))
        if levels > _MAX_LEVELS:
            raise InvalidArgument(
                f"a schema can have at most {_MAX_LEVELS:,} levels, those of its references "
                f"included; found {levels:,}"
            )


def require_few_references(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the references. Raises InvalidArgument for too many, and for very low numbers."""
    for value in _values(schema):
        if isinstance(value, (int, float)) and value < _MIN_NUMBER:
            message = f"numbers of a schema must be {_MIN_NUMBER:g} or more; found {value}"
            raise InvalidArgument(message[:200])
    references = references_of(schema)
    if len(references) > _MAX_REFERENCES:
        raise InvalidArgument(
            f"a schema can have at most {_MAX_REFERENCES:,} different references; "
            f"found {len(references):,}"
        )
    return references


def _values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it."""
    pending = [value]
    while pending:
        current = pending.pop()
        yield current
        if isinstance(current, Mapping):
            pending += current.values()
        elif isinstance(current, list):
            pending += current


def references_of(schema: Any) -> frozenset[str]:
    """Return the references in a schema, and in values that it contains."""
    references = (value.get("$ref") for value in _values(schema) if isinstance(value, Mapping))
    return frozenset(reference for reference in references if isinstance(reference, str))


def _target(schema: Any, reference: str) -> Any:
    """Return what a JSON pointer refers to; the whole schema for "#" and what is not understood."""
    target = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or name not in target:
            return schema
        target = target[name]
    return target


def _depth(value: Any) -> int:
    """Return the number of objects and lists inside each other."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, (Mapping, list))]:
        depth += 1
        level = [
            member
            for item in level
            for member in (item.values() if isinstance(item, Mapping) else item)
        ]
    return depth


def _reachable(reference: str, links: Mapping[str, frozenset[str]]) -> set[str]:
    """Return a reference and those that its target leads to."""
    found, pending = {reference}, [reference]
    while pending:
        new = links[pending.pop()] - found
        found |= new
        pending += new
    return found
