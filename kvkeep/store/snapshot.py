"""A snapshot: all that a session is at one moment, in memory or in a file."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Bits, Layout, Queries, Segment
from kvkeep.errors import CorruptFile
from kvkeep.store.codec import Codec, decode, encode
from kvkeep.store.container import read_container, read_document, write_container
from kvkeep.store.segments import (
    read_segment,
    require,
    require_tensor,
    segment_entry,
    segment_tensors,
)

KIND, FORMAT = "snapshot", 2
_OF_PLAIN_CELLS = 1  # the format of a file that holds nothing which its readers cannot ignore


@dataclass(frozen=True)
class Snapshot:
    """Everything a session needs to go on exactly where it was.

    Taking one is cheap: cells are shared with the session until one side would overwrite them.

    fingerprint: of the model. policy: name and settings. settings: of the session. tokens: `[n]`
    int32, all of them, the forgotten ones too. serials: `[n]` int64, by which a token's cell is
    found; serial: the next. clock: the time of the next token. hidden: `[1, hidden_size]` and
    logits: `[vocab]` of the last token; None in an empty session. sampler: the seed and the random
    generator's state. layout: of plain cells. bits: in how many cells are kept. observed: the
    newest queries, where the policy decides by them. created: seconds since 1970. notes: JSON
    values of whoever keeps the session, such as what a chat must remember beside it; kvkeep's
    library reads none of them.
    """

    fingerprint: dict[str, str]
    model: str
    policy: dict[str, Any]
    settings: dict[str, Any]
    tokens: Tensor
    serials: Tensor
    clock: int
    serial: int
    segments: tuple[Segment, ...]
    hidden: Tensor | None
    logits: Tensor | None
    sampler: dict[str, Any]
    layout: Layout
    observed: Queries | None = None
    bits: Bits = field(default_factory=Bits)
    created: float = field(default_factory=time.time)
    notes: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        spans = self.settings.get("spans", {})
        named = f", {len(spans)} spans" if spans else ""
        nbytes = sum(segment.block.slots.nbytes for segment in self.segments)
        return (
            f"<Snapshot of {self.model}: {self.policy['name']}, {self.cells:,} cells "
            f"({nbytes / 1e6:,.1f} MB), {len(self.tokens):,} tokens{named}>"
        )

    @property
    def cells(self) -> int:
        return sum(segment.length for segment in self.segments)

    def save(self, path: str | Path, codec: Codec = "none") -> int:
        """Writes the snapshot, or leaves the file that is there as it is. Returns its bytes.

        codec: "none" is read straight into memory; "zstd" is smaller, slower and still
        exact; "int8" keeps keys and values in 8 bits and is not exact.

        Raises StoreError where the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for index, segment in enumerate(self.segments):
            tensors |= segment_tensors(index, segment)
        tensors |= {"tokens": self.tokens, "serials": self.serials}
        if self.hidden is not None and self.logits is not None:
            tensors |= {"hidden": self.hidden, "logits": self.logits}
        if self.observed is not None:
            tensors |= {"queries": self.observed.values, "query_times": self.observed.times}
        stored, coding = encode(tensors, codec)
        document = {
            "fingerprint": self.fingerprint,
            "model": self.model,
            "policy": self.policy,
            "settings": self.settings,
            "tokens": len(self.tokens),
            "clock": self.clock,
            "serial": self.serial,
            "sampler": self.sampler,
            "layout": {
                "layers": self.layout.layers,
                "kv_heads": self.layout.kv_heads,
                "head_dim": self.layout.head_dim,
                "dtype": str(self.layout.dtype).removeprefix("torch."),
            },
            "bits": asdict(self.bits),
            "segments": [segment_entry(segment) for segment in self.segments],
            "codec": codec,
            "coding": coding,
            "created": self.created,
            "notes": self.notes,
        }
        version = _OF_PLAIN_CELLS if self._plain else FORMAT
        return write_container(Path(path), KIND, version, document, stored)

    @property
    def _plain(self) -> bool:
        """Whether nothing is quantised or compressed, nor is to be."""
        compressed = any(segment.compressed for segment in self.segments)
        return self.bits == Bits() and self.observed is None and not compressed

    @classmethod
    def load(cls, path: str | Path) -> "Snapshot":
        """Reads a snapshot and verifies every byte of it.

        Raises StoreError and its kinds: foreign, newer, truncated, corrupt.
        """
        container = read_container(Path(path), KIND, FORMAT)
        document = container.document
        try:
            return _assemble(document, decode(container.tensors, document["coding"]))
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CorruptFile(f"{path} is corrupt: {error!r} while it was put together") from error


def describe(path: str | Path) -> dict[str, Any]:
    """What a snapshot file says of itself, from its checked header alone."""
    return read_document(Path(path), KIND, FORMAT)


def _assemble(document: dict[str, Any], tensors: dict[str, Tensor]) -> Snapshot:
    layout = Layout(
        **document["layout"] | {"dtype": getattr(torch, document["layout"]["dtype"])},
        device=torch.device("cpu"),
    )
    bits = Bits(**document.get("bits", {}))
    layouts = bits.layouts(layout)
    segments = tuple(
        read_segment(index, layouts, entry, tensors)
        for index, entry in enumerate(document["segments"])
    )
    _check(document, tensors)
    return Snapshot(
        fingerprint=document["fingerprint"],
        model=document["model"],
        policy=document["policy"],
        settings=document["settings"],
        tokens=tensors["tokens"],
        serials=tensors["serials"],
        clock=document["clock"],
        serial=document["serial"],
        segments=segments,
        hidden=tensors.get("hidden"),
        logits=tensors.get("logits"),
        sampler=document["sampler"],
        layout=layout,
        observed=_observed(tensors, layout),
        bits=bits,
        created=document["created"],
        notes=document.get("notes", {}),
    )


def _observed(tensors: dict[str, Tensor], layout: Layout) -> Queries | None:
    if "queries" not in tensors:
        return None
    queries, times = tensors["queries"], tensors["query_times"]
    shape = (layout.layers, None, len(times), layout.head_dim)
    require_tensor("queries", queries, layout.dtype, *shape)
    require_tensor("query_times", times, torch.int64, None)
    return Queries(queries, times)


def _check(document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """What the checksums cannot tell: that whoever wrote the file knew the format."""
    count = len(tensors["tokens"])
    require_tensor("tokens", tensors["tokens"], torch.int32, count)
    require_tensor("serials", tensors["serials"], torch.int64, count)
    require(("hidden" in tensors) == ("logits" in tensors), "hidden without logits, or the reverse")
    if "hidden" in tensors:
        require_tensor("hidden", tensors["hidden"], tensors["hidden"].dtype, 1, None)
        require_tensor("logits", tensors["logits"], torch.float32, None)
    require(type(document["clock"]) is int, "clock is not a whole number")
    require(type(document["serial"]) is int, "serial is not a whole number")
