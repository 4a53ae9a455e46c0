"""A snapshot: all that a session is at one moment, in memory or in a file."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Block, Layout, PositionMap, Segment
from kvkeep.errors import CorruptFile
from kvkeep.store.codec import Codec, decode, encode
from kvkeep.store.container import read_container, read_document, write_container

KIND, FORMAT = "snapshot", 1


@dataclass(frozen=True)
class Snapshot:
    """Everything a session needs to go on exactly where it was.

    Taking one is cheap: cells are shared with the session until one side would overwrite them.

    fingerprint: of the model. policy: name and settings. settings: of the session. tokens: `[n]`
    int32, all of them, the forgotten ones too. clock: the position of the next token. hidden:
    `[1, hidden_size]` and logits: `[vocab]` of the last token; None in an empty session. sampler:
    the seed and the random generator's state. created: seconds since 1970.
    """

    fingerprint: dict[str, str]
    model: str
    policy: dict[str, Any]
    settings: dict[str, Any]
    tokens: Tensor
    clock: int
    segments: tuple[Segment, ...]
    hidden: Tensor | None
    logits: Tensor | None
    sampler: dict[str, Any]
    layout: Layout
    created: float = field(default_factory=time.time)

    @property
    def cells(self) -> int:
        return sum(segment.length for segment in self.segments)

    def save(self, path: str | Path, codec: Codec = "none") -> int:
        """Writes the snapshot, or leaves the file that is there as it is. Returns its bytes.

        codec: "none" maps straight into memory on load; "zstd" is smaller, slower and still
        exact; "int8" keeps keys and values in 8 bits and is not exact.

        Raises StoreError where the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for index, segment in enumerate(self.segments):
            tensors |= _segment_tensors(index, segment)
        tensors["tokens"] = self.tokens
        if self.hidden is not None and self.logits is not None:
            tensors |= {"hidden": self.hidden, "logits": self.logits}
        stored, coding = encode(tensors, codec)
        document = {
            "fingerprint": self.fingerprint,
            "model": self.model,
            "policy": self.policy,
            "settings": self.settings,
            "clock": self.clock,
            "sampler": self.sampler,
            "layout": {
                "layers": self.layout.layers,
                "kv_heads": self.layout.kv_heads,
                "head_dim": self.layout.head_dim,
                "dtype": str(self.layout.dtype).removeprefix("torch."),
            },
            "segments": [_segment_entry(segment) for segment in self.segments],
            "codec": codec,
            "coding": coding,
            "created": self.created,
        }
        return write_container(Path(path), KIND, FORMAT, document, stored)

    @classmethod
    def load(cls, path: str | Path) -> "Snapshot":
        """Reads a snapshot and verifies every byte of it.

        Raises StoreError and its kinds: foreign, newer, truncated, corrupt.
        """
        container = read_container(Path(path), KIND, FORMAT)
        document = container.document
        try:
            return _assemble(document, decode(container.tensors, document["coding"]))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CorruptFile(f"{path} is corrupt: {error!r} while it was put together") from error


def describe(path: str | Path) -> dict[str, Any]:
    """What a snapshot file says of itself, from its checked header alone."""
    return read_document(Path(path), KIND, FORMAT)


def _in_slot_order(segment: Segment) -> bool:
    """A full ring is saved as it lies: in another order, sums would be rounded otherwise."""
    return segment.length == segment.capacity


def _segment_tensors(index: int, segment: Segment) -> dict[str, Tensor]:
    block = segment.block
    if _in_slot_order(segment):
        keys, values, positions = block.keys, block.values, block.positions
    elif len(slots := segment.slots(0, segment.length)) == 1:
        keys, values = block.keys[:, :, slots[0]], block.values[:, :, slots[0]]
        positions = block.positions[slots[0]]
    else:
        keys, values, positions = segment.read(0, segment.length)
    prefix = f"segment.{index}."
    return {
        f"{prefix}keys": keys,
        f"{prefix}values": values,
        f"{prefix}positions": positions,
    }


def _segment_entry(segment: Segment) -> dict[str, Any]:
    return {
        "map": asdict(segment.map),
        "limit": segment.limit,
        "window": segment.window,
        "frozen": segment.frozen,
        "start": segment.start,
        "length": segment.length,
        "capacity": segment.capacity,
        "slot_order": _in_slot_order(segment),
    }


def _assemble(document: dict[str, Any], tensors: dict[str, Tensor]) -> Snapshot:
    layout = Layout(
        **document["layout"] | {"dtype": getattr(torch, document["layout"]["dtype"])},
        device=torch.device("cpu"),
    )
    segments = tuple(
        _segment(
            layout, entry, *(tensors[f"segment.{i}.{x}"] for x in ("keys", "values", "positions"))
        )
        for i, entry in enumerate(document["segments"])
    )
    return Snapshot(
        fingerprint=document["fingerprint"],
        model=document["model"],
        policy=document["policy"],
        settings=document["settings"],
        tokens=tensors["tokens"],
        clock=document["clock"],
        segments=segments,
        hidden=tensors.get("hidden"),
        logits=tensors.get("logits"),
        sampler=document["sampler"],
        layout=layout,
        created=document["created"],
    )


def _segment(
    layout: Layout, entry: dict[str, Any], keys: Tensor, values: Tensor, positions: Tensor
) -> Segment:
    segment = Segment(layout, PositionMap(**entry["map"]), entry["limit"], entry["window"])
    segment.frozen = entry["frozen"]
    segment.start, segment.length = entry["start"], entry["length"]
    if segment.frozen and not entry["slot_order"]:
        segment.start = 0  # a frozen run needs no room for more
    if entry["slot_order"] or segment.start == 0:
        segment.block = Block(keys, values, positions)
    else:
        segment.block = Block.allocate(layout, entry["capacity"])
        segment.write(segment.slots(0, segment.length), keys, values, positions)
    return segment
