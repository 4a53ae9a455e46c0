"""Take kvkeep files apart and assemble them with correct checksums, whatever they contain.

Written from docs/snapshot-format.md alone, so that it shares no mistakes with the reader.
"""

import json
import struct
from dataclasses import dataclass
from random import Random
from typing import Any

from blake3 import blake3
from fuzz.mutations import mutate_bytes, mutate_json

_BLANK_CHECKSUM = "0" * 64


@dataclass
class FileParts:
    """The parts of a file.

    document: the JSON document. entries: the header's entries of tensors, by name. data: the bytes
    of all tensors.
    """

    kind: str
    version: str
    document: Any
    entries: Any
    data: bytearray


def take_apart(file: bytes) -> FileParts:
    (length,) = struct.unpack("<Q", file[:8])
    entries = json.loads(file[8 : 8 + length])
    metadata = entries.pop("__metadata__")
    document = json.loads(metadata["document"])
    data = bytearray(file[8 + length :])
    return FileParts(metadata["kvkeep"], metadata["version"], document, entries, data)


def assemble(parts: FileParts) -> bytes:
    checksums = {}
    for name, entry in parts.entries.items() if isinstance(parts.entries, dict) else ():
        checksums[name] = _checksum(entry, parts.data)
    metadata = {
        "kvkeep": parts.kind,
        "version": parts.version,
        "checksum": _BLANK_CHECKSUM,
        "checksums": json.dumps(checksums),
        "document": json.dumps(parts.document),
    }
    entries = parts.entries if isinstance(parts.entries, dict) else {}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    start = struct.pack("<Q", len(text))
    digest = blake3(start + text).hexdigest().encode()
    return start + text.replace(_BLANK_CHECKSUM.encode(), digest, 1) + bytes(parts.data)


def _checksum(entry: Any, data: bytearray) -> str:
    try:
        first, last = entry["data_offsets"]
        return blake3(bytes(data[first:last])).hexdigest()
    except (TypeError, ValueError, KeyError):
        return _BLANK_CHECKSUM


def mutate_tensor(parts: FileParts, random: Random) -> None:
    """Change some bytes within one tensor: tokens, serials, positions, biases or keys."""
    name = random.choice([n for n in parts.entries if not n.startswith("padding.")])
    first, last = parts.entries[name]["data_offsets"]
    new_bytes = mutate_bytes(bytes(parts.data[first:last]), random)[: last - first]
    parts.data[first : first + len(new_bytes)] = new_bytes


def mutate_and_seal(file: bytes, random: Random) -> bytes:
    """Change the content of a file and give it correct checksums."""
    parts = take_apart(file)
    kind = random.randrange(4)
    if kind == 0:
        parts.entries = mutate_json(parts.entries, random)
    elif kind == 1:
        mutate_tensor(parts, random)
    else:
        parts.document = mutate_json(parts.document, random)
    return assemble(parts)


def mutate(file: bytes, random: Random) -> bytes:
    """Change a file: the raw bytes one time in five, otherwise its content under new checksums."""
    return mutate_bytes(file, random) if random.random() < 0.2 else mutate_and_seal(file, random)
