"""References inside of JSON schemas: the parts that `$ref` names, and the values they allow.

A reference is a JSON pointer (`#/$defs/Name`), an anchor, or either behind the `$id` of a part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urljoin

from kvkeep.chat.messages import Tool

# Keywords that state something about values; `$defs` only holds what is referred to.
_KEYWORDS = frozenset(
    (
        *("type", "enum", "const", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf"),
        *("oneOf", "not", "if", "then", "else", "properties", "patternProperties", "required"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
        *("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "items"),
        *("prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains"),
        *("maxContains", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength"),
        *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("multipleOf", "divisibleBy", "disallow", "extends"),
    )
)
_MEMBERS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_PARTS = (
    *("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_TYPE_KEYWORDS = frozenset(("$ref", "type", "allOf", "anyOf", "oneOf", "enum", "const"))
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")  # without keywords beside `$ref`


def map_parts(
    schema: Mapping[str, Any], convert: Callable[[Mapping[str, Any]], Any]
) -> dict[str, Any]:
    """Return a schema whose parts that are schemas, and objects, are converted."""
    result = dict(schema)
    for key in _MEMBERS:
        if isinstance(members := schema.get(key), Mapping):
            result[key] = {
                name: convert(part) if isinstance(part, Mapping) else part
                for name, part in members.items()
            }
    for key in (*_LISTS, *_PARTS):
        value = schema.get(key)
        if isinstance(value, Mapping):
            result[key] = convert(value)
        elif isinstance(value, list):
            result[key] = [convert(part) if isinstance(part, Mapping) else part for part in value]
    return result


class References:
    """The references of a schema."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._untyped_root = {key: value for key, value in root.items() if key != "type"}
        self._is_old = any(draft in str(root.get("$schema")) for draft in _OLD_DRAFTS)
        self._bases: dict[int, str] = {}  # by the id of a part, which the root keeps alive
        self._resources: dict[str, Mapping[str, Any]] = {"": root}
        self._anchors: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._followed: dict[int, Any] = {}  # by the id of a part
        self._parts: list[Mapping[str, Any]] = []

    def parts(self) -> Sequence[Mapping[str, Any]]:
        """Return the schema and all schemas in it that are objects."""
        self._collect(self._root, "")
        return self._parts

    def _collect(self, schema: Mapping[str, Any], base: str) -> None:
        """Find the parts of a schema, with the URIs and anchors by which they are referred to."""
        pending = [(schema, base)]
        while pending:
            part, base = pending.pop()
            if id(part) in self._bases:
                continue
            identifier = part.get("$id")
            if isinstance(identifier, str) and identifier.startswith("#"):
                self._anchors.setdefault((base, identifier[1:]), part)
            elif isinstance(identifier, str):
                base = _joined(base, identifier).partition("#")[0]
                self._resources.setdefault(base, part)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := part.get(key), str):
                    self._anchors.setdefault((base, anchor), part)
            self._bases[id(part)] = base
            self._parts.append(part)
            inner = list[Mapping[str, Any]]()
            map_parts(part, inner.append)
            pending += [(member, base) for member in inner]

    def target(self, schema: Mapping[str, Any]) -> Any:
        """Return the part of the root that the `$ref` of one of its parts names; None if none."""
        self._collect(self._root, "")
        reference, base = schema["$ref"], self._bases.get(id(schema), "")
        uri, _, fragment = _joined(base, reference).partition("#")
        resource = self._resources.get(uri)
        if resource is None:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((uri, fragment))
        target = _pointed(resource, fragment)
        if target is None:  # some generators of schemas write an `$id` that is no base
            target = _pointed(self._root, fragment)
        if isinstance(target, Mapping):
            self._collect(target, uri)
        return target

    def followed(self, schema: Any) -> Any:
        """Return a schema, or what it refers to if it is no more than a reference.

        The only member of `allOf`, `anyOf` or `oneOf` counts as referred to. None for references
        in a circle; one to nothing stays.
        """
        passed = list[int]()
        while id(schema) not in self._followed:
            passed.append(id(schema))
            self._followed[id(schema)] = None  # unless there is an end
            further = self._only_reference(schema)
            if further is None:
                self._followed[id(schema)] = schema
            else:
                schema = further
        result = self._followed[id(schema)]
        self._followed.update(dict.fromkeys(passed, result))
        return result

    def _only_reference(self, schema: Any) -> Any:
        """Return what a schema refers to; None unless that is all that it states."""
        if not isinstance(schema, Mapping):
            return None
        keywords = [key for key in schema if states_values(key)]
        if isinstance(schema.get("$ref"), str) and (self._is_old or keywords == ["$ref"]):
            return self.target(schema)
        if keywords not in (["allOf"], ["anyOf"], ["oneOf"]):
            return None
        parts = schema[keywords[0]]
        is_single = isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping)
        return parts[0] if is_single else None

    def object_schema(self) -> Mapping[str, Any]:
        """Return the root, or the object that it refers to."""
        if "properties" in self._root or self._root.get("type", "object") != "object":
            return self._root
        self._collect(self._root, "")
        own = self._untyped_root
        self._bases[id(own)] = self._bases[id(self._root)]
        found = self.followed(own)
        has_properties = isinstance(found, Mapping) and "properties" in found
        return found if has_properties and found is not own else self._root

    def arguments(self) -> tuple[dict[str, Any], set[str]]:
        """Return the schemas of the root's properties by name, and the names that are required.

        Those of the parts of `allOf`, and of references, are among them.
        """
        schemas, required = dict[str, list[Any]](), set[str]()
        pending, passed = [self.object_schema()], set[int]()
        while pending:
            part = pending.pop(0)
            if not isinstance(part, Mapping) or id(part) in passed:
                continue
            passed.add(id(part))
            for key, schema in _mapping(part.get("properties")).items():
                schemas.setdefault(key, []).append(schema)
            required |= {name for name in _list(part.get("required")) if isinstance(name, str)}
            if isinstance(part.get("$ref"), str):
                pending.append(self.target(part))
            pending += _list(part.get("allOf"))
        return {key: _joint(parts) for key, parts in schemas.items()}, required

    def alternatives(self, schema: Any, to_types: bool) -> Iterator[Any]:
        """Yield the schemas of which a value follows one: those that state types, or choices.

        References and `anyOf` or `oneOf` are followed, each reference once.
        """
        pending, passed = [schema], set[int]()
        while pending:
            part = pending.pop()
            if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                target = self.target(part)
                if target is None:
                    pending.append({key: part[key] for key in part if key != "$ref"})
                elif id(target) not in passed:
                    passed.add(id(target))
                    pending.append(target)
                continue
            further = _alternatives(part, to_types) if isinstance(part, Mapping) else []
            if further:
                pending += reversed(further)
            else:
                yield part


def states_values(keyword: str) -> bool:
    """Whether a keyword states something about values, and is no annotation or definition."""
    return keyword in _KEYWORDS


def argument_schemas(tool: Tool) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments; empty if it names none."""
    return References(tool.parameters).arguments()[0]


def stated_types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type")
    if isinstance(types, str):
        return [types]
    return [name for name in types if isinstance(name, str)] if isinstance(types, list) else []


def _alternatives(schema: Mapping[str, Any], to_types: bool) -> list[Any]:
    """Return the parts that decide on a schema's types or choices; empty if it does itself."""
    if to_types and isinstance(schema.get("type"), (str, list)):
        return []
    members = _list(schema.get("allOf"))
    if to_types:
        for member in members:
            if isinstance(member, Mapping) and not _TYPE_KEYWORDS.isdisjoint(member):
                return [member]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(keyword), list):
            return parts
    return members if len(members) == 1 else []


def _joint(schemas: list[Any]) -> Any:
    """Return the schema of what all of some schemas hold for."""
    stating = [schema for schema in schemas if schema not in ({}, True)]
    return stating[0] if len(stating) == 1 else {"allOf": stating} if stating else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _joined(base: str, reference: str) -> str:
    if reference.startswith("#"):  # `urljoin` leaves out bases such as URNs
        return f"{base}{reference}"
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _pointed(schema: Any, pointer: str) -> Any:
    """Return what a JSON pointer refers to; None if nothing."""
    for step in pointer.split("/")[1:] if pointer != "/" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping):
            schema = schema.get(name)
        elif isinstance(schema, list) and name in map(str, range(len(schema))):
            schema = schema[int(name)]
        else:
            return None
    return schema
