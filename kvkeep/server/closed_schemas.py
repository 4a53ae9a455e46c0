"""Closing the objects of JSON schemas: they get no properties but those that the schema names.

A model would invent more properties where `additionalProperties` is missing, a small one without
end. llama.cpp closes such objects, too.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.errors import InvalidArgument
from kvkeep.server.limits import MAX_SCHEMA_CHARACTERS

_PREFIX = "#/$defs/"
_ARRAY_KEYS = ("items", "prefixItems", "additionalItems")
_ITEMS = ""  # stands for the items of an array among names of properties
_CHOICES = ("anyOf", "oneOf")


@dataclass(frozen=True)
class _Shared:
    """Names of the properties of an object that several schemas have. every: all may be."""

    names: Collection[str] = ()
    every: bool = False

    def __contains__(self, name: str) -> bool:
        return self.every or name in self.names


_EVERY = _Shared(every=True)


@dataclass
class _Names:
    """The properties that schemas of one object name.

    counts: the number of schemas that each has. others: names without a schema. is_open: whether
    there may be more.
    """

    counts: Counter[str] = field(default_factory=Counter)
    others: dict[str, None] = field(default_factory=dict)
    is_open: bool = False

    def add(self, other: "_Names") -> None:
        self.counts.update(other.counts)
        self.others.update(other.others)
        self.is_open |= other.is_open

    def add_part(self, schema: Mapping[str, Any], is_condition: bool = False) -> None:
        """Add what a schema names itself. is_condition: whether it holds for some objects only."""
        properties, required = schema.get("properties"), schema.get("required")
        names = list(properties) if isinstance(properties, Mapping) else []
        if isinstance(required, list):
            self.others.update(dict.fromkeys(name for name in required if isinstance(name, str)))
        if is_condition:
            self.others.update(dict.fromkeys(names))
            return
        self.counts.update(names)
        for part in _conditional_parts(schema):
            self.add_part(part, is_condition=True)
        if any(key in schema for key in _ARRAY_KEYS):
            self.counts[_ITEMS] += 1
        least = schema.get("minProperties")
        self.is_open |= (
            schema.get("additionalProperties", False) is not False
            or schema.get("unevaluatedProperties", False) is not False
            or bool(schema.get("patternProperties"))
            or "propertyNames" in schema
            or (isinstance(least, int) and least > len(names))
        )

    @property
    def states_parts(self) -> bool:
        return self.is_open or bool(self.counts)

    def shared(self) -> _Shared:
        names = {name for name, count in self.counts.items() if count > 1}
        return _EVERY if self.is_open else _Shared(names)


def close_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose objects have no properties but their own, unless it says otherwise.

    Several schemas of one object, as in `allOf`, are closed by the names of all of them. The
    schema's references must be those of `resolved_schema`. Raises InvalidArgument for too many.
    """
    definitions = schema.get("$defs")
    return _Closing(definitions if isinstance(definitions, Mapping) else {}).closed_root(schema)


class _Closing:
    """The closing of the objects of a schema and its definitions."""

    def __init__(self, definitions: Mapping[str, Any]):
        self._definitions = definitions
        # Definitions that are one of several schemas of a value, and which properties these share.
        self._merged: dict[str, _Shared] = {}
        self._changed: deque[str] = deque()
        self._own_names: dict[str, tuple[_Names, frozenset[str]]] = {}  # by a definition's name
        self._all_names: dict[str, _Names] = {}
        self._num_added = 0  # characters

    def closed_root(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        root = {key: value for key, value in schema.items() if key != "$defs"}
        result = self._closed(root, None)
        definitions = {name: self._definition(name) for name in self._definitions}
        while self._changed:
            name = self._changed.popleft()
            definitions[name] = self._definition(name)
        if "$defs" in schema:
            result["$defs"] = definitions or schema["$defs"]
        return result

    def _definition(self, name: str) -> Any:
        return self._part(self._definitions[name], self._merged.get(name))

    def _part(self, schema: Any, merged: _Shared | None) -> Any:
        return self._closed(schema, merged) if isinstance(schema, Mapping) else schema

    def _closed(self, schema: Mapping[str, Any], merged: _Shared | None) -> dict[str, Any]:
        """Close a schema and its parts.

        merged: None unless it is one of several schemas of a value; then it stays open itself.
        """
        names, num_stating = self._summed(schema)
        shared = names.shared() if merged is None and num_stating > 1 else merged
        result = self._with_closed_parts(schema, shared)
        has_names = "properties" in schema or (num_stating > 1 and any(names.counts))
        if merged is None and has_names and not names.is_open:
            own = result.get("properties", {})
            if isinstance(own, Mapping):
                further = dict.fromkeys((*names.counts, *names.others))
                further.pop(_ITEMS, None)
                self._require_few(further.keys() - own.keys())
                result["properties"] = {**own, **{n: {} for n in further if n not in own}}
                result["additionalProperties"] = False
                result.pop("unevaluatedProperties", None)
        elif schema.get("unevaluatedProperties") is False and num_stating < 2:
            del result["unevaluatedProperties"]
            if not _groups(schema):
                result["additionalProperties"] = False
        return result

    def _require_few(self, names: Collection[str]) -> None:
        """Refuse names that are added to objects if there are too many of all together."""
        self._num_added += sum(map(len, names)) + len(names)
        if self._num_added > MAX_SCHEMA_CHARACTERS:
            message = "a schema with its merged parts can have at most"
            raise InvalidArgument(f"{message} {MAX_SCHEMA_CHARACTERS:,} characters")

    def _with_closed_parts(
        self, schema: Mapping[str, Any], shared: _Shared | None
    ) -> dict[str, Any]:
        """Close the parts of a schema. shared: of several schemas of its value, if there are."""
        result = dict(schema)
        name = _definition_name(schema)
        if shared is not None and name is not None and name in self._definitions:
            self._merge(name, shared)
        for key in ("allOf", *_CHOICES):
            if isinstance(parts := schema.get(key), list):
                result[key] = [self._part(part, shared) for part in parts]
        if isinstance(members := schema.get("properties"), Mapping):
            result["properties"] = {
                name: self._part(member, _EVERY if shared and name in shared else None)
                for name, member in members.items()
            }
        within = _EVERY if shared is not None else None
        if isinstance(members := schema.get("patternProperties"), Mapping):
            closed = {name: self._part(member, within) for name, member in members.items()}
            result["patternProperties"] = closed
        if "additionalProperties" in schema:
            result["additionalProperties"] = self._part(schema["additionalProperties"], within)
        within = _EVERY if shared and _ITEMS in shared else None
        for key in _ARRAY_KEYS:
            if isinstance(parts := schema.get(key), list):
                result[key] = [self._part(part, within) for part in parts]
            elif key in schema:
                result[key] = self._part(schema[key], within)
        return result

    def _merge(self, name: str, shared: _Shared) -> None:
        """Keep a definition open, as one of several schemas of a value."""
        before = self._merged.get(name)
        if before is None or not (before.every or shared == before):
            self._merged[name] = shared if before is None else _EVERY
            self._changed.append(name)

    def _summed(self, schema: Mapping[str, Any]) -> tuple[_Names, int]:
        """Return the names of all schemas of an object, and how many of these state parts of it.

        Schemas of which one holds count as one.
        """
        result = _Names()
        result.add_part(schema)
        num_stating, groups = int(result.states_parts), _groups(schema)
        if num_stating + len(groups) < 2:
            return result, num_stating
        for group in groups:
            names = _Names()
            for part in group:
                names.add(self._names(part))
            result.add(names)
            num_stating += names.states_parts
        return result, num_stating

    def _names(self, schema: Mapping[str, Any]) -> _Names:
        """Return the names of a schema and of all that it applies to the same object."""
        name = _definition_name(schema)
        if name is not None and name in self._all_names and len(schema) == 1:
            return self._all_names[name]
        result, references = _applied_names(schema)
        reached, pending = set(references), list(references)
        while pending:
            names, further = self._names_of(pending.pop())
            result.add(names)
            pending += further - reached
            reached |= further
        if name is not None and len(schema) == 1:
            self._all_names[name] = result
        return result

    def _names_of(self, name: str) -> tuple[_Names, frozenset[str]]:
        """Return what a definition names itself, and the definitions that it applies."""
        if name not in self._own_names:
            self._own_names[name] = _applied_names(self._definitions.get(name))
        return self._own_names[name]


def _groups(schema: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Return the schemas that are applied to the same value, in groups of which one holds."""
    groups = list[list[Mapping[str, Any]]]()
    if "$ref" in schema:
        groups.append([{"$ref": schema["$ref"]}])
    for key in ("allOf", *_CHOICES):
        parts = schema.get(key)
        schemas = [p for p in parts if isinstance(p, Mapping)] if isinstance(parts, list) else []
        groups += [[part] for part in schemas] if key == "allOf" else [schemas] * bool(schemas)
    return groups


def _applied_names(schema: Any) -> tuple[_Names, frozenset[str]]:
    """Return the names of a schema and of those that it applies, and the definitions it applies."""
    names, references, pending = _Names(), set[str](), [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            names.add_part(part)
            references |= {name for name in [_definition_name(part)] if name is not None}
            for key in ("allOf", *_CHOICES):
                pending += parts if isinstance(parts := part.get(key), list) else []
    return names, frozenset(references)


def _conditional_parts(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    dependent = schema.get("dependentSchemas")
    parts = [schema.get("then"), schema.get("else")]
    parts += dependent.values() if isinstance(dependent, Mapping) else ()
    return [part for part in parts if isinstance(part, Mapping)]


def _definition_name(schema: Mapping[str, Any]) -> str | None:
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith(_PREFIX):
        return reference.removeprefix(_PREFIX)
    return None
