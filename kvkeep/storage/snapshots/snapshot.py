"""A snapshot: all that a session is at one moment, in memory or in a file."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Bits, CacheState, Layout, Queries, Segment, Window
from kvkeep.cache.checks import require, require_tensor
from kvkeep.errors import CorruptFile
from kvkeep.storage.objects.paths import Source, Target, as_path
from kvkeep.storage.snapshots.codec import Codec, decode, encode
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.document import check_document, layout_of
from kvkeep.storage.snapshots.header import SNAPSHOT, SNAPSHOT_FORMAT, read_document
from kvkeep.storage.snapshots.memory_state import MemoryState
from kvkeep.storage.snapshots.segments import (
    is_ragged,
    knows_worth,
    read_segment,
    segment_entry,
    segment_tensors,
)

# The formats of files that hold nothing which their readers cannot ignore.
_OF_PLAIN_CELLS, _OF_EVEN_CELLS, _WITHOUT_WORTH, _OF_ONE_LAYOUT, _OF_CELLS = 1, 2, 3, 4, 5
_STATE = "recurrent."  # begins the names of the tensors that are states


@dataclass(frozen=True)
class Snapshot:
    """Everything a session needs to go on exactly where it was.

    Taking one is cheap: cells are shared with the session until one side would overwrite them.

    fingerprint: of the model. policy: name and settings. settings: of the session. tokens: `[n]`
    int32, all of them, the forgotten ones too. serials: `[n]` int64, by which a token's cell is
    found; serial: the next. clock: the time of the next token. hidden: `[1, hidden_size]` and
    logits: `[vocab]` of the last token; None in an empty session. sampler: the seed and the random
    generator's state. layout: of plain cells. local, local_layout: the same of local layers, where
    the model has such. recurrent: the states of layers that have no cells. bits: in how many cells
    are kept. observed: the newest queries, where the policy decides by them. arithmetic: what it
    was computed with; see `LoadedModel`; empty in files of earlier releases. codec: of the file
    that it was in. created: seconds since 1970. notes: JSON values of whoever keeps the session,
    such as what a chat must remember beside it; kvkeep's library reads none of them.
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
    arithmetic: dict[str, str] = field(default_factory=dict)
    codec: str = "none"
    created: float = field(default_factory=time.time)
    notes: dict[str, Any] = field(default_factory=dict)
    local: tuple[Segment, ...] = ()
    local_layout: Layout | None = None
    recurrent: Mapping[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        spans = self.settings.get("spans", {})
        named = f", {len(spans)} spans" if spans else ""
        every = (*self.segments, *self.local)
        nbytes = sum(segment.block.slots.nbytes for segment in every)
        return (
            f"<Snapshot of {self.model}: {self.policy['name']}, {self.cells:,} cells "
            f"({nbytes / 1e6:,.1f} MB), {len(self.tokens):,} tokens{named}>"
        )

    @property
    def cells(self) -> int:
        return sum(segment.length for segment in self.segments)

    def save(self, path: str | Path | Target, codec: Codec = "none") -> int:
        """Writes the snapshot, or leaves the file that is there as it is. Returns its bytes.

        path: of a file, or the URL of an object, as s3://bucket/prefix/name.kvkeep.

        codec: "none" is read straight into memory; "zstd" is smaller, slower and still
        exact; "int8" keeps keys and values in 8 bits and is not exact.

        Raises StoreError where the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for index, segment in enumerate((*self.segments, *self.local)):
            tensors |= segment_tensors(index, segment)
        tensors |= {"tokens": self.tokens, "serials": self.serials}
        if self.hidden is not None and self.logits is not None:
            tensors |= {"hidden": self.hidden, "logits": self.logits}
        if self.observed is not None:
            tensors |= {"queries": self.observed.values, "query_times": self.observed.times}
        tensors |= {f"{_STATE}{name}": state for name, state in self.recurrent.items()}
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
            "layout": _layout_entry(self.layout),
            "bits": asdict(self.bits),
            "segments": [
                *(segment_entry(segment) for segment in self.segments),
                *(segment_entry(segment, local=True) for segment in self.local),
            ],
            "codec": codec,
            "arithmetic": self.arithmetic,
            "coding": coding,
            "created": self.created,
            "notes": self.notes,
        }
        if self.local_layout is not None:
            document["local_layout"] = _layout_entry(self.local_layout)
        return write_container(as_path(path), SNAPSHOT, self._format, document, stored)

    @property
    def _format(self) -> int:
        """The oldest whose readers know all that is in it."""
        if self.recurrent:
            return SNAPSHOT_FORMAT
        if self.local:
            return _OF_CELLS
        if any(knows_worth(segment) for segment in self.segments):
            return _OF_ONE_LAYOUT
        if "budget" in self.policy or any(is_ragged(segment) for segment in self.segments):
            return _WITHOUT_WORTH
        compressed = any(segment.compressed for segment in self.segments)
        plain = self.bits == Bits() and self.observed is None and not compressed
        return _OF_PLAIN_CELLS if plain else _OF_EVEN_CELLS

    @classmethod
    def load(cls, path: str | Source) -> "Snapshot":
        """Reads a snapshot and verifies every byte of it.

        path: of a file, or the URL of an object.

        Raises StoreError and its kinds: foreign, newer, truncated, corrupt.
        """
        container = read_container(as_path(path), SNAPSHOT, SNAPSHOT_FORMAT)
        document = container.document
        try:
            check_document(document)
            return _assemble(document, _decoded(document, container.tensors))
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise _corrupt(path, error) from error

    def memory(self) -> MemoryState:
        """What the session's memory was."""
        window = Window(**self.settings.get("window", {}))
        held = CacheState(
            self.segments,
            window,
            self.clock,
            self.serial,
            self.observed,
            self.local,
            self.recurrent,
        )
        pins = self.settings.get("pins", [])
        return MemoryState(self.tokens, self.serials, pins, self.hidden, self.logits, held)


def describe(path: str | Source) -> dict[str, Any]:
    """What a snapshot file says of itself, from its checked header alone. Raises as `load`."""
    document = read_document(as_path(path), SNAPSHOT, SNAPSHOT_FORMAT)
    try:
        check_document(document)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise _corrupt(path, error) from error
    return document


def _corrupt(path: str | Source, error: Exception) -> CorruptFile:
    return CorruptFile(
        f"{path} is corrupt: no session could be so, though each byte is as it was written "
        f"({error!r}). Restore it from a copy, or evaluate the text again"
    )


def _decoded(document: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors as they were before they were coded, each as large as its segment is."""
    coding, layouts = document["coding"], _plain_layouts(document)
    sizes: dict[str, list[int]] = {}
    for index, entry in enumerate(document["segments"]):
        # Whatever is coded is as long as what is not.
        serials, positions = (tensors[f"segment.{index}.{n}"] for n in ("serials", "positions"))
        require_tensor("serials", serials, torch.int64, entry["length"])
        layout = layouts[entry.get("local", False)]
        shape = [layout.layers, layout.kv_heads, entry["length"], layout.head_dim]
        if entry.get("ragged", False):
            require_tensor("positions", positions, torch.int64, None)
            shape[:3] = [len(positions)]
        sizes |= {f"segment.{index}.{name}": shape for name in ("keys", "values")}
    for name, how in coding.items():
        require(how["shape"] == sizes[name], f"{name} is coded as of another shape")
    return decode(tensors, coding)


def _assemble(document: dict[str, Any], tensors: dict[str, Tensor]) -> Snapshot:
    (layout, *local), bits = _plain_layouts(document), Bits(**document.get("bits", {}))
    layouts = (*bits.layouts(layout), *(bits.layouts(each)[0] for each in local))
    entries = document["segments"]
    read = [read_segment(index, layouts, entry, tensors) for index, entry in enumerate(entries)]
    is_local = [entry.get("local", False) for entry in entries]
    require(len(tensors["tokens"]) == document["tokens"], "another number of tokens")
    snapshot = Snapshot(
        fingerprint=document["fingerprint"],
        model=document["model"],
        policy=document["policy"],
        settings=document["settings"],
        tokens=tensors["tokens"],
        serials=tensors["serials"],
        clock=document["clock"],
        serial=document["serial"],
        segments=tuple(each for each, near in zip(read, is_local, strict=True) if not near),
        hidden=tensors.get("hidden"),
        logits=tensors.get("logits"),
        sampler=document["sampler"],
        layout=layout,
        observed=_observed(tensors),
        bits=bits,
        arithmetic=document.get("arithmetic", {}),
        codec=document["codec"],
        created=document["created"],
        notes=document.get("notes", {}),
        local=tuple(each for each, near in zip(read, is_local, strict=True) if near),
        local_layout=local[0] if local else None,
        recurrent={
            name.removeprefix(_STATE): state
            for name, state in tensors.items()
            if name.startswith(_STATE)
        },
    )
    memory, observed = snapshot.memory(), snapshot.observed
    near, far, *of_local = layouts
    heads = observed.values.shape[1] if observed else 0
    memory.cache.check(near, far, heads, next(iter(of_local), None))
    memory.check_itself()
    return snapshot


def _layout_entry(layout: Layout) -> dict[str, Any]:
    return {
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "dtype": str(layout.dtype).removeprefix("torch."),
    }


def _plain_layouts(document: dict[str, Any]) -> list[Layout]:
    """Of the cells as they were evaluated; the second of local layers, where there are any."""
    found = [document[name] for name in ("layout", "local_layout") if name in document]
    return [layout_of(each) for each in found]


def _observed(tensors: dict[str, Tensor]) -> Queries | None:
    if "queries" not in tensors:
        return None
    return Queries(tensors["queries"], tensors["query_times"])
