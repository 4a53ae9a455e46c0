"""A kvkeep file taken apart and sealed again: whatever is in it, its checksums are right.

Written from docs/snapshot-format.md alone, so that it shares no mistake with the reader.
"""

import json
import struct
from dataclasses import dataclass
from random import Random
from typing import Any

from blake3 import blake3
from fuzz.mutations import bytes_changed, json_changed

_BLANK = "0" * 64


@dataclass
class Opened:
    """document: JSON values. entries: of tensors, by name. data: theirs, all in a row."""

    kind: str
    version: str
    document: Any
    entries: Any
    data: bytearray


def opened(file: bytes) -> Opened:
    (length,) = struct.unpack("<Q", file[:8])
    entries = json.loads(file[8 : 8 + length])
    metadata = entries.pop("__metadata__")
    document = json.loads(metadata["document"])
    data = bytearray(file[8 + length :])
    return Opened(metadata["kvkeep"], metadata["version"], document, entries, data)


def sealed(parts: Opened) -> bytes:
    checksums = {}
    for name, entry in parts.entries.items() if isinstance(parts.entries, dict) else ():
        checksums[name] = _checksum(entry, parts.data)
    metadata = {
        "kvkeep": parts.kind,
        "version": parts.version,
        "checksum": _BLANK,
        "checksums": json.dumps(checksums),
        "document": json.dumps(parts.document),
    }
    entries = parts.entries if isinstance(parts.entries, dict) else {}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    start = struct.pack("<Q", len(text))
    digest = blake3(start + text).hexdigest().encode()
    return start + text.replace(_BLANK.encode(), digest, 1) + bytes(parts.data)


def _checksum(entry: Any, data: bytearray) -> str:
    try:
        first, last = entry["data_offsets"]
        return blake3(bytes(data[first:last])).hexdigest()
    except (TypeError, ValueError, KeyError):
        return _BLANK


def tensors_changed(parts: Opened, random: Random) -> None:
    """Some bytes within one tensor: a token, a serial, a position, a bias, a key."""
    name = random.choice([n for n in parts.entries if not n.startswith("padding.")])
    first, last = parts.entries[name]["data_offsets"]
    changed = bytes_changed(bytes(parts.data[first:last]), random)[: last - first]
    parts.data[first : first + len(changed)] = changed


def resealed(file: bytes, random: Random) -> bytes:
    """The file as somebody would write it who knows the format, and not what belongs in it."""
    parts = opened(file)
    kind = random.randrange(4)
    if kind == 0:
        parts.entries = json_changed(parts.entries, random)
    elif kind == 1:
        tensors_changed(parts, random)
    else:
        parts.document = json_changed(parts.document, random)
    return sealed(parts)


def changed(file: bytes, random: Random) -> bytes:
    return bytes_changed(file, random) if random.random() < 0.2 else resealed(file, random)
