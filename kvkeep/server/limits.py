"""The largest requests: limits of every field, far beyond what clients send, as pydantic types.

A field beyond its limit is refused with status 400: the error names the field, the limit and what
was found. A body of too many values gets 413 before it is parsed (`require_few_values`).
"""

import json
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from kvkeep.server.errors import ApiError

MAX_BODY_BYTES = 64_000_000  # after decompression too
MAX_TEXT = 16_000_000  # characters of a prompt, a file or another text
MAX_VALUES = 2_000_000  # numbers, texts, lists, objects and names in the JSON of a body
MAX_ENTRIES = 20_000  # of a list or an object inside a message, a tool, a schema or other data
MAX_TOKENS = 1_000_000  # of one generation
MAX_TOKEN_IDS = 1_000_000  # of one list
MAX_BATCH = 64  # generations of one request
MAX_MESSAGES = 20_000  # of a conversation, and input items
MAX_TOOLS = 1_024
MAX_CHARACTERS = 1_000  # of names, stop texts and other short texts
MAX_STOPS = 64
MAX_BIASES = 100_000  # entries of `logit_bias`
MAX_INPUTS = 2_048  # texts to embed in one request, as in OpenAI's API
MAX_SCHEMA_CHARACTERS = 200_000  # of a schema or a grammar
MAX_GRAMMAR_RULES = 1_000  # of GBNF: converting them takes time by the square of their number
MAX_FIELDS = 1_000  # of `metadata`, `response_fields`, `include` and other lists of options
MAX_SECONDS = 1e12  # of `keep_alive`

_VALUE_MARKS = b",:[{"  # one before each value
_MARKS = tuple(bytes([mark]) for mark in _VALUE_MARKS)
_QUOTE = ord('"')
_NO_MARKS = bytes(set(range(256)) - set(_VALUE_MARKS) - {_QUOTE})


def _with_few_entries(data: Any) -> Any:
    """Return data whose lists and objects have few entries. Raises ValueError for other data."""
    level: list[tuple[str, Any]] = [("", data)]
    while level:  # the nesting was checked before
        inner: list[tuple[str, Any]] = []
        for place, container in level:
            if len(container) > MAX_ENTRIES:
                raise ValueError(
                    f"{place or 'it'} can have at most {MAX_ENTRIES:,} entries; "
                    f"found {len(container):,}"
                )
            items = container.items() if isinstance(container, dict) else enumerate(container)
            inner += [
                (f"{place}.{key}"[:MAX_CHARACTERS] if place else str(key), value)
                for key, value in items
                if isinstance(value, (dict, list))
            ]
        level = inner
    return data


# Types of fields. `Data` is an object of any form, such as a message, a tool or a JSON schema.
LongText = Annotated[str, Field(max_length=MAX_TEXT)]
ShortText = Annotated[str, Field(max_length=MAX_CHARACTERS)]
GrammarText = Annotated[str, Field(max_length=MAX_SCHEMA_CHARACTERS)]
Data = Annotated[dict[str, Any], Field(max_length=MAX_ENTRIES), AfterValidator(_with_few_entries)]
Metadata = Annotated[
    dict[str, Any], Field(max_length=MAX_FIELDS), AfterValidator(_with_few_entries)
]
Messages = Annotated[list[Data], Field(max_length=MAX_MESSAGES)]
Blocks = Annotated[list[Data], Field(max_length=MAX_ENTRIES)]  # parts of one text
Tools = Annotated[list[Data], Field(max_length=MAX_TOOLS)]
Options = Annotated[list[ShortText], Field(max_length=MAX_FIELDS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)]
Bias = Annotated[float, Field(ge=-1e6, le=1e6)]
Biases = Annotated[dict[ShortText, Bias], Field(max_length=MAX_BIASES)]


def require_few_values(body: bytes) -> None:
    """Raise ApiError (413) for a JSON body of too many values, before it takes memory."""
    if len(body) <= MAX_VALUES or sum(map(body.count, _MARKS)) <= MAX_VALUES:
        return
    count = count_values(body)  # texts have commas, too
    if count > MAX_VALUES:
        message = f"the JSON of a request can have at most {MAX_VALUES:,} values; found {count:,}"
        raise ApiError(413, message, code="too_large")


def parse_json(body: bytes) -> Any:
    """Parse JSON in UTF-8 (RFC 8259), the only encoding in which values are counted.

    Raises ValueError and RecursionError, and UnicodeDecodeError for another encoding.
    """
    if b"\0" in body[:4]:  # UTF-16 or UTF-32
        raise UnicodeDecodeError("utf-8", body[:4], 0, 1, "there is a zero byte")
    return json.loads(body.decode("utf-8-sig"))


def count_values(body: bytes) -> int:
    """Return the number of values of a JSON text, and of names, by the marks before each."""
    without_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(without_escapes.translate(None, _NO_MARKS), dtype=np.uint8)
    quotes = marks == _QUOTE
    in_text = np.logical_xor.accumulate(quotes)
    return int(np.count_nonzero(~(quotes | in_text)))
