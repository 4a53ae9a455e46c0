"""JSON schemas with which the grammars of calls can work: references, closed objects, size.

Such a schema has no annotations, and its references are `#/$defs/NAME`, so that it can be moved
into another. Its definitions are those that it needs.
"""

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from kvkeep.chat.schema_references import References, map_parts, states_values
from kvkeep.errors import InvalidArgument
from kvkeep.server.closed_schemas import close_objects
from kvkeep.server.limits import MAX_SCHEMA_CHARACTERS
from kvkeep.server.schema_safety import (
    references_of,
    require_few_references,
    require_safe_schema,
)

_PREFIX = "#/$defs/"


def prepared_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its references resolved and its objects closed.

    Raises InvalidArgument for one that is too large or could end the process.
    """
    require_few_references(schema)
    try:
        resolved = resolved_schema(schema)
        _require_short(resolved)
        require_safe_schema(resolved)
        result = close_objects(resolved)
        _require_short(result)
    except InvalidArgument:
        raise
    except RecursionError as error:
        raise InvalidArgument("the schema has too many levels") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the schema is not JSON: {error}") from error
    return result


def _require_short(schema: Mapping[str, Any]) -> None:
    length = len(json.dumps(schema))
    if length > MAX_SCHEMA_CHARACTERS:
        raise InvalidArgument(
            f"a schema can have at most {MAX_SCHEMA_CHARACTERS:,} characters; found {length:,}"
        )


def resolved_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an equal schema with its own references only, and without annotations.

    Raises InvalidArgument for references to nothing, and for one that allows no value.
    """
    resolution = _Resolution(References(schema))
    result = resolution.resolved(resolution.references.object_schema())
    if not isinstance(result, dict):
        raise InvalidArgument("the schema allows no value")
    result.update({key: schema[key] for key in ("$schema", "type") if key in schema})
    if definitions := resolution.definitions():
        result["$defs"] = definitions
    return result


def with_definitions(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a resolved schema with those of its definitions that the part needs."""
    found = dict[str, Any]()
    pending = [*references_of(schema)]
    while pending:
        name = pending.pop().removeprefix(_PREFIX)
        if name in definitions and name not in found:
            found[name] = definitions[name]
            pending += references_of(definitions[name])
    return {**schema, **({"$defs": found} if found else {})}


class _Resolution:
    """The definitions of a schema under their new names."""

    def __init__(self, references: References):
        self.references = references
        self._names: dict[int, str] = {}
        self._pending: deque[tuple[str, Mapping[str, Any]]] = deque()
        # Parts that others refer to are written once.
        self._shared = {
            id(references.followed(references.target(part)))
            for part in references.parts()
            if isinstance(part.get("$ref"), str)
        }

    def definitions(self) -> dict[str, Any]:
        result = {}
        while self._pending:
            name, schema = self._pending.popleft()
            result[name] = self.resolved(schema)
        return result

    def resolved(self, schema: Mapping[str, Any]) -> Any:
        """Return a schema that states something itself in its new form."""
        result = {key: value for key, value in schema.items() if states_values(key)}
        if isinstance(schema.get("$ref"), str):
            target = self.references.target(schema)
            if target is None:
                reference = schema["$ref"][:100]
                raise InvalidArgument(f"the reference {reference!r} leads to nothing")
            found = self.references.followed(target)
            if found is False:
                return False
            if isinstance(found, Mapping):
                result["$ref"] = self._reference(found)
            else:
                del result["$ref"]
        return map_parts(result, self.written)

    def written(self, schema: Mapping[str, Any]) -> Any:
        """Return any part of the schema in its new form."""
        found = self.references.followed(schema)
        if not isinstance(found, Mapping):
            return found is not False
        if id(found) in self._shared:
            return {"$ref": self._reference(found)}
        return self.resolved(found)

    def _reference(self, schema: Mapping[str, Any]) -> str:
        if id(schema) not in self._names:
            self._names[id(schema)] = f"d{len(self._names)}"
            self._pending.append((self._names[id(schema)], schema))
        return _PREFIX + self._names[id(schema)]
