"""Requests that try to take much time or memory: small ones that grow, and large ones."""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETION, LLAMACPP = "/v1/chat/completions", "/v1/completions", "/completion"
_MILLION = 1_000_000
_USER = [{"role": "user", "content": "x"}]


@dataclass(frozen=True)
class HostileCase:
    """A request. body: makes it, since some are as large as a body may be."""

    name: str
    path: str
    body: Callable[[], bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


def hostile_cases() -> Iterator[HostileCase]:
    """Yield the requests, by kind."""
    yield from _json_cases()
    yield from _field_cases()
    yield from _compression_cases()
    for name, schema in SCHEMAS.items():
        yield HostileCase(f"schema: {name}", LLAMACPP, _json({"json_schema": schema}))
    for name, grammar in GRAMMARS.items():
        yield HostileCase(f"grammar: {name}", LLAMACPP, _json({"grammar": grammar}))
    tools = [_tool(f"f{number}", SCHEMAS["patterns that count"]) for number in range(400)]
    yield HostileCase(
        "schema: 400 tools of patterns that count",
        CHAT,
        _json({"messages": _USER, "tools": tools, "tool_choice": "required"}),
    )


def _json(fields: Mapping[str, Any]) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "x", "max_tokens": 1, "n_predict": 1, **fields}).encode()


def _repeated(start: str, item: str, end: str, num_bytes: int = 60 * _MILLION) -> bytes:
    return (start + item * (num_bytes // len(item)) + end).encode()


def _json_cases() -> Iterator[HostileCase]:
    bodies: dict[str, Callable[[], bytes]] = {
        "nested lists": lambda: b"[" * (60 * _MILLION),
        "nested objects": lambda: b'{"a":' * (12 * _MILLION),
        "20 million empty lists": lambda: _repeated('{"x":[', "[],", "0]}"),
        "10 million empty objects": lambda: _repeated('{"x":[', "{},   ", "0]}"),
        "30 million numbers": lambda: _repeated('{"x":[', "1,", "0]}"),
        "one name, 10 million times": lambda: _repeated("{", '"a":0,', '"b":0}'),
        "4 million names": lambda: _names(4 * _MILLION),
        "a number of 60 million digits": lambda: _repeated('{"seed":', "9", "}"),
        "a fraction of 60 million digits": lambda: _repeated('{"temperature":0.', "9", "}"),
        "60 MB of escapes": lambda: _repeated('{"prompt":"', "\\u0041", '"}'),
    }
    for name, body in bodies.items():
        yield HostileCase(f"json: {name}", LLAMACPP, body)


def _names(count: int) -> bytes:
    return ("{" + ",".join(f'"{number:x}":0' for number in range(count)) + "}").encode()


def _field_cases() -> Iterator[HostileCase]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000_000}}
    part = {"type": "text", "text": "x"}
    bias = {str(number): 1 for number in range(4 * _MILLION)}
    fields: dict[str, tuple[str, dict[str, Any]]] = {
        "logit_bias of 4 million tokens": (COMPLETION, {"logit_bias": bias}),
        "64 stop texts of 900 kB": (COMPLETION, {"stop": ["x" * 900_000] * 64, "max_tokens": 64}),
        "a prompt of 60 MB": (COMPLETION, {"prompt": "all work and no play " * 2_850_000}),
        "a prompt of 60 MB without spaces": (COMPLETION, {"prompt": "ab" * 30_000_000}),
        "a prompt of 20 million token ids": (COMPLETION, {"prompt": [1] * 20_000_000}),
        "4 million prompts": (COMPLETION, {"prompt": [""] * 4_000_000}),
        "100,000 messages": (CHAT, {"messages": _USER * 100_000}),
        "a message of 1 million parts": (
            CHAT,
            {"messages": [{"role": "user", "content": [part] * 1_000_000}]},
        ),
        "an image of 50 MB": (CHAT, {"messages": [{"role": "user", "content": [image]}]}),
        "1,000 images": (
            CHAT,
            {"messages": [{"role": "user", "content": [_small_image(40_000)] * 1000}]},
        ),
        "1,000 tools of 50 kB": (
            CHAT,
            {"messages": _USER, "tools": [_tool(f"f{n}", _wide(50_000)) for n in range(1000)]},
        ),
        "response_fields of 4 million names": (LLAMACPP, {"response_fields": ["a/b"] * 4_000_000}),
        "chat_template_kwargs of 50 MB": (
            CHAT,
            {"messages": _USER, "chat_template_kwargs": {"x": "y" * 50_000_000}},
        ),
        "a role of 50 MB": (CHAT, {"messages": [{"role": "x" * 50_000_000, "content": "x"}]}),
    }
    for name, (path, values) in fields.items():
        yield HostileCase(f"field: {name}", path, _json(values))


def _small_image(num_bytes: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * num_bytes}"}}


def _tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _wide(num_bytes: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"x": {"type": "string", "description": "x" * num_bytes}},
    }


def _compression_cases() -> Iterator[HostileCase]:
    gzipped = {"Content-Encoding": "gzip"}
    bodies: dict[str, Callable[[], bytes]] = {
        "gzip of 4 GB of zeros": lambda: gzip.compress(bytes(_MILLION)) * 4000,
        "gzip of 63 MB of JSON": lambda: gzip.compress(_repeated('{"x":"', "y", '"}')),
        "gzip of 60 MB of empty lists": lambda: gzip.compress(_repeated('{"x":[', "[],", "0]}")),
        "a million gzip members of nothing": lambda: gzip.compress(b"") * _MILLION,
    }
    for name, body in bodies.items():
        yield HostileCase(f"compressed: {name}", LLAMACPP, body, gzipped)


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _doubling(levels: int) -> dict[str, Any]:
    """Each definition has the next one twice."""
    definitions: dict[str, Any] = {f"d{levels}": {"type": "string"}}
    for level in range(levels):
        twice = {"a": {"$ref": f"#/$defs/d{level + 1}"}, "b": {"$ref": f"#/$defs/d{level + 1}"}}
        definitions[f"d{level}"] = {
            "allOf": [{"properties": {name: value}} for name, value in twice.items()]
        }
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}


_OPTIONAL = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(4000)}}
_BRANCHES = {
    "anyOf": [{"type": "object", "properties": {f"p{n % 7}": {"const": n}}} for n in range(1500)]
}
_PRODUCT = {
    "allOf": [
        {"anyOf": [{"properties": {f"p{n}": {"const": m}}} for m in range(6)]} for n in range(12)
    ]
}
SCHEMAS: Mapping[str, Any] = {
    "a cycle of references": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "a reference to itself in allOf": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "90 levels": _nested(90),
    "40 doubling definitions": _doubling(40),
    "an enum of 15,000": {"enum": [f"v{n:06}" for n in range(15_000)]},
    "4,000 optional properties": _OPTIONAL,
    "1,500 branches": _BRANCHES,
    "a product of 12 choices of 6": _PRODUCT,
    "maxItems of 10^9": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9},
    "minItems of 10^9": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "maxLength of 10^9": {"type": "string", "maxLength": 10**9},
    "minLength of 10^9": {"type": "string", "minLength": 10**9},
    "minProperties of 10^9": {"type": "object", "minProperties": 10**9},
    "multipleOf 1e-300": {"type": "number", "multipleOf": 1e-300, "maximum": 1e300},
    "an integer of 300 digits": {"type": "integer", "minimum": 10**299, "maximum": 10**300},
    "nested quantifiers": _text("^((a+)+)+$"),
    "alternatives that overlap": _text("^((a|a)*(a|aa)*)*b$"),
    "patterns that count": _text("^(a?){1000}a{1000}$"),
    "counts of counts": _text("^(((a{100}){100}){100}){100}$"),
    "an exponential automaton": _text("^(a|b)*a(a|b){24}$"),
    "an intersection": {"allOf": [_text(f"^(.*{c}){{6}}.*$") for c in "abcdefgh"]},
    "classes of all letters": _text(r"^[\p{L}\p{N}]{1,5000}$"),
}

GRAMMARS: Mapping[str, str] = {
    "a repetition of 10^9": 'root ::= "a"{1000000000}',
    "a range to 10^9": "root ::= [a-z]{1,1000000000}",
    "repetitions of repetitions": 'root ::= ((("a"{1000}){1000}){1000}){1000}',
    "ambiguous": 'root ::= root root | "a" | ""',
    "left recursion": 'root ::= root "a" | root',
    "a cycle of empty rules": "root ::= a\na ::= b | b b\nb ::= a | a a",
    "10,000 rules": "\n".join(
        ["root ::= r0", *(f'r{n} ::= "a" r{n + 1}' for n in range(9999)), 'r9999 ::= "b"']
    ),
    "40 doubling rules": "\n".join(
        ["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)), 'r40 ::= "a"']
    ),
    "50,000 brackets": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "190 kB of alternatives": "root ::= " + " | ".join(f'"v{n}"' for n in range(21_000)),
    "190 kB of one text": 'root ::= "' + "a" * 190_000 + '"',
    "a class of 190 kB": "root ::= [" + "a-z" * 60_000 + "]",
    "an unclosed text": 'root ::= "' + "\\" * 190_000,
    "190 kB of comments": "# x\n" * 47_000 + 'root ::= "a"',
    "an exponential automaton": 'root ::= [ab]* "a" ' + "[ab] " * 24,
}
