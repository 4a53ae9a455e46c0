"""Files as nobody meant them: a whole one with a few bytes, or a few values, changed."""

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    255,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "../..",
    [],
    [1],
    [[]],
    [None, "x"],
    {},
    {"x": 1},
    {"name": "sliding"},
    "9" * 400,
)
_NUMBERS = (0, 1, -1, 2, 0x7F, 0x80, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def bytes_changed(data: bytes, random: Random) -> bytes:
    """One to four places changed: bits, bytes, numbers, stretches; cut short or made longer."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        random.choice(_BYTE_CHANGES)(changed, random)
    return bytes(changed)


def _at(data: bytearray, random: Random) -> int:
    """Somewhere; half of the time near the beginning, where the structure is."""
    end = len(data) if random.random() < 0.5 else min(len(data), 2000)
    return random.randrange(end) if end else 0


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[_at(data, random)] ^= 1 << random.randrange(8)


def _byte(data: bytearray, random: Random) -> None:
    if data:
        data[_at(data, random)] = random.choice((0, 1, 0x20, 0x22, 0x7B, 0x7D, 0xFF))


def _number(data: bytearray, random: Random) -> None:
    at, size = _at(data, random), random.choice((2, 4, 8))
    value = random.choice(_NUMBERS) % (1 << 8 * size)
    data[at : at + size] = value.to_bytes(size, "little")


def _cut(data: bytearray, random: Random) -> None:
    del data[_at(data, random) :]


def _remove(data: bytearray, random: Random) -> None:
    at = _at(data, random)
    del data[at : at + random.randint(1, 40)]


def _repeat(data: bytearray, random: Random) -> None:
    at = _at(data, random)
    data[at:at] = data[at : at + random.randint(1, 40)]


def _append(data: bytearray, random: Random) -> None:
    data += random.randbytes(random.randint(1, 100))


_BYTE_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip,
    _byte,
    _number,
    _cut,
    _remove,
    _repeat,
    _append,
)


def json_changed(value: Any, random: Random) -> Any:
    """One to three values within a JSON value replaced, removed, or put in another's place."""
    changed = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        places = list(_places(changed))
        holder, key = random.choice(places)
        kind = random.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other, there = random.choice(places)
            holder[key] = copy.deepcopy(other[there])
        elif kind == 2 and isinstance(holder[key], int):
            holder[key] += random.choice((-1, 1, 64, -64, 0.5))
        else:
            holder[key] = copy.deepcopy(random.choice(VALUES))
        if not list(_places(changed)):
            break
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
