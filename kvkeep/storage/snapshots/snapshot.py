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
_WINDOW = ("size", "discard", "moves")
_STATE = "recurrent."  # begins the names of the tensors that are states


@dataclass(frozen=True)
class Snapshot:
    """Everything a session needs to go on exactly where it was.

    Taking one is cheap: cells are shared with the session until one side would overwrite them.

    fingerprint: of the model. policy: name and settings. settings: of the session: `prefill_step`,
    `keep_whole_prompt` and `spans`. memory: tokens, cells and the last token's logits. sampler: the
    seed and the random generator's state. layout: of plain cells; local_layout: the same of local
    layers, if the model has such. bits: of the cells. arithmetic: what they were computed with; see
    `LoadedModel`; empty in files of earlier releases. codec: of the file that the snapshot was
    loaded from. created: seconds since 1970. notes: JSON values of the program that keeps the
    session, such as what a chat must remember beside it; kvkeep's library reads none of them.
    """

    fingerprint: dict[str, str]
    model: str
    policy: dict[str, Any]
    settings: dict[str, Any]
    memory: MemoryState
    sampler: dict[str, Any]
    layout: Layout
    local_layout: Layout | None = None
    bits: Bits = field(default_factory=Bits)
    arithmetic: dict[str, str] = field(default_factory=dict)
    codec: str = "none"
    created: float = field(default_factory=time.time)
    notes: dict[str, Any] = field(default_factory=dict)

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
    def tokens(self) -> Tensor:
        """`[n]` int32: all tokens, the forgotten ones too."""
        return self.memory.tokens

    @property
    def serials(self) -> Tensor:
        """`[n]` int64: the number of each token, by which its cell is found."""
        return self.memory.serials

    @property
    def clock(self) -> int:
        """The time of the next token."""
        return self.memory.cache.time

    @property
    def serial(self) -> int:
        """The serial of the next token."""
        return self.memory.cache.serial

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.memory.cache.segments

    @property
    def local(self) -> tuple[Segment, ...]:
        """The segments of local layers."""
        return self.memory.cache.local

    @property
    def recurrent(self) -> Mapping[str, Tensor]:
        """The states of layers that have no cells."""
        return self.memory.cache.recurrent

    @property
    def observed(self) -> Queries | None:
        """The newest queries, if the policy decides by them."""
        return self.memory.cache.observed

    @property
    def hidden(self) -> Tensor | None:
        """`[1, hidden_size]` of the last token; None in an empty session."""
        return self.memory.hidden

    @property
    def logits(self) -> Tensor | None:
        """`[vocab]` of the last token; None in an empty session."""
        return self.memory.logits

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
            "settings": self._settings_entry(),
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

    def _settings_entry(self) -> dict[str, Any]:
        """The settings as in a file: there, pins and the window are among them."""
        window = self.memory.cache.window
        own = {name: value for name, value in self.settings.items() if name != "spans"}
        return {
            **own,
            "pins": list(self.memory.pins),
            "spans": self.settings.get("spans", {}),
            "window": {name: getattr(window, name) for name in _WINDOW},
        }

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


def describe(path: str | Source) -> dict[str, Any]:
    """Return the document of a snapshot file, from its checked header alone. Raises as `load`."""
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
    segments = [read_segment(index, layouts, entry, tensors) for index, entry in enumerate(entries)]
    is_local = [entry.get("local", False) for entry in entries]
    require(len(tensors["tokens"]) == document["tokens"], "another number of tokens")
    settings, observed = dict(document["settings"]), _observed(tensors)
    pins, window = settings.pop("pins", []), settings.pop("window", {})
    cache = CacheState(
        tuple(segment for segment, local in zip(segments, is_local, strict=True) if not local),
        Window(**window),
        document["clock"],
        document["serial"],
        observed,
        tuple(segment for segment, local in zip(segments, is_local, strict=True) if local),
        {
            name.removeprefix(_STATE): state
            for name, state in tensors.items()
            if name.startswith(_STATE)
        },
    )
    memory = MemoryState(
        tensors["tokens"],
        tensors["serials"],
        pins,
        tensors.get("hidden"),
        tensors.get("logits"),
        cache,
    )
    near, far, *local_layouts = layouts
    heads = observed.values.shape[1] if observed else 0
    cache.check(near, far, heads, next(iter(local_layouts), None))
    memory.check_itself()
    return Snapshot(
        fingerprint=document["fingerprint"],
        model=document["model"],
        policy=document["policy"],
        settings=settings,
        memory=memory,
        sampler=document["sampler"],
        layout=layout,
        local_layout=local[0] if local else None,
        bits=bits,
        arithmetic=document.get("arithmetic", {}),
        codec=document["codec"],
        created=document["created"],
        notes=document.get("notes", {}),
    )


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
