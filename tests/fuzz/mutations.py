"""Mutations of valid files: a few bytes or a few JSON values changed."""

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


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Flip, overwrite, truncate, remove, repeat or append bytes, one to four times."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        random.choice(_BYTE_CHANGES)(changed, random)
    return bytes(changed)


def _random_offset(data: bytearray, random: Random) -> int:
    """Return a random offset, half of the time in the first 2,000 bytes, where headers are."""
    end = len(data) if random.random() < 0.5 else min(len(data), 2000)
    return random.randrange(end) if end else 0


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[_random_offset(data, random)] ^= 1 << random.randrange(8)


def _overwrite_byte(data: bytearray, random: Random) -> None:
    if data:
        data[_random_offset(data, random)] = random.choice((0, 1, 0x20, 0x22, 0x7B, 0x7D, 0xFF))


def _overwrite_number(data: bytearray, random: Random) -> None:
    offset, size = _random_offset(data, random), random.choice((2, 4, 8))
    value = random.choice(_NUMBERS) % (1 << 8 * size)
    data[offset : offset + size] = value.to_bytes(size, "little")


def _cut(data: bytearray, random: Random) -> None:
    del data[_random_offset(data, random) :]


def _remove(data: bytearray, random: Random) -> None:
    offset = _random_offset(data, random)
    del data[offset : offset + random.randint(1, 40)]


def _repeat(data: bytearray, random: Random) -> None:
    offset = _random_offset(data, random)
    data[offset:offset] = data[offset : offset + random.randint(1, 40)]


def _append(data: bytearray, random: Random) -> None:
    data += random.randbytes(random.randint(1, 100))


_BYTE_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip,
    _overwrite_byte,
    _overwrite_number,
    _cut,
    _remove,
    _repeat,
    _append,
)


def mutate_json(value: Any, random: Random) -> Any:
    """Replace, remove or copy one to three values within a JSON value."""
    changed = copy.deepcopy(value)
    for _ in range(random.randint(1, 3)):
        slots = list(_slots(changed))
        holder, key = random.choice(slots)
        kind = random.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            other_holder, other_key = random.choice(slots)
            holder[key] = copy.deepcopy(other_holder[other_key])
        elif kind == 2 and isinstance(holder[key], int):
            holder[key] += random.choice((-1, 1, 64, -64, 0.5))
        else:
            holder[key] = copy.deepcopy(random.choice(VALUES))
        if next(_slots(changed), None) is None:
            break
    return changed


def _slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key or index of every value within a JSON value."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _slots(value[key])


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()
