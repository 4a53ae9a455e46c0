"""A snapshot: all that a session is at one moment, in memory or in a file."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from kvkeep.cache import Bits, Layout, Queries, Segment
from kvkeep.cache.checkpoint import Checkpoints
from kvkeep.errors import CorruptFile, InvalidArgument, StoreError
from kvkeep.storage.lossy.basis import LOSSY_CODECS, CellBasis, newest_basis
from kvkeep.storage.lossy.shared import fetch_bases
from kvkeep.storage.objects.paths import ReadablePath, StoredPath, WritablePath, as_path
from kvkeep.storage.snapshots.checkpoints import checkpoints_entry
from kvkeep.storage.snapshots.codec import (
    ROUNDING_CODECS,
    Codec,
    checked_codec,
    coarser,
    encode,
)
from kvkeep.storage.snapshots.container import read_open_container, write_container
from kvkeep.storage.snapshots.document import check_document, layout_entry, layout_of
from kvkeep.storage.snapshots.header import (
    SNAPSHOT_FORMAT,
    SNAPSHOT_KIND,
    read_document,
    read_file,
    rounded_by,
)
from kvkeep.storage.snapshots.memory_state import MemoryState
from kvkeep.storage.snapshots.memory_tensors import memory_tensors, read_memory
from kvkeep.storage.snapshots.segments import (
    has_residual_cells,
    has_scores,
    is_ragged,
    segment_entry,
)

_log = logging.getLogger("kvkeep.storage")


@dataclass(frozen=True)
class Snapshot:
    """Everything that a session needs to continue exactly.

    Taking a snapshot is cheap: cells are shared with the session, copy-on-write.

    fingerprint: of the model. model: its name. policy: name and settings. settings: of the session:
    `prefill_step`, `keep_whole_prompt` and `spans`. memory: tokens, cells and the last token's
    logits. sampler: the seed and the random generator's state. layout, local_layout: of the cells
    before quantisation; local_layout is None if the model has no local layers. bits: of the cells.
    arithmetic: the kernels, threads and weights that computed them; empty in files of earlier
    releases. codec: of the file that the snapshot was loaded from. rounded: the codec by which its
    cells were once rounded, or "". created: seconds since 1970.
    notes: JSON values of the application, such as a chat's settings; the library ignores them.
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
    rounded: str = ""
    created: float = field(default_factory=time.time)
    notes: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        spans = self.settings.get("spans", {})
        span_count = f", {len(spans)} spans" if spans else ""
        points = len(self.checkpoints.entries)
        checkpoint_count = f", {points} checkpoints" if points else ""
        nbytes = sum(segment.block.slots.nbytes for segment in (*self.segments, *self.local))
        return (
            f"<Snapshot of {self.model}: {self.policy['name']}, {self.cells:,} cells "
            f"({nbytes / 1e6:,.1f} MB), {len(self.tokens):,} tokens{span_count}{checkpoint_count}>"
        )

    @property
    def tokens(self) -> Tensor:
        """`[n]` int32: all tokens, the forgotten ones too."""
        return self.memory.tokens

    @property
    def serials(self) -> Tensor:
        """`[n]` int64: the serial of each token, by which its cell is found."""
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
        return self.memory.cache.local_segments

    @property
    def recurrent(self) -> Mapping[str, Tensor]:
        """The states of layers that have no cells."""
        return self.memory.cache.recurrent_states

    @property
    def observed(self) -> Queries | None:
        """The newest queries, if the policy decides by them."""
        return self.memory.cache.observed_queries

    @property
    def hidden(self) -> Tensor | None:
        """`[1, hidden_size]` of the last token; None in an empty session."""
        return self.memory.hidden

    @property
    def logits(self) -> Tensor | None:
        """`[vocab]` of the last token; None in an empty session."""
        return self.memory.logits

    @property
    def checkpoints(self) -> Checkpoints:
        """Copies of local windows and recurrent states after earlier tokens."""
        return self.memory.checkpoints

    @property
    def cells(self) -> int:
        return sum(segment.length for segment in self.segments)

    def save(self, path: str | Path | WritablePath, codec: Codec = "none") -> int:
        """Write the snapshot atomically; return the size of the file in bytes.

        path: of a file, or the URL of an object, as s3://bucket/prefix/name.kvkeep. codec: "exact"
        (or "none") is fastest to load; "zstd" is smaller, slower and still exact. "small" and
        "smaller" round keys and values in the basis that `kvkeep calibrate` made for the model, and
        "int8" to 8 bits: a session restored from such a file is not exact. Raises InvalidArgument
        if there is no basis, the cells are quantised already, or the notes are not JSON, and
        StoreError if the file cannot be written; then the existing file is unchanged.
        """
        codec = checked_codec(codec)
        basis = self._basis() if codec in LOSSY_CODECS else None
        cache = self.memory.cache
        checkpoints, checkpoint_tensors = checkpoints_entry(self.memory.checkpoints, cache)
        tensors = memory_tensors(self.memory) | checkpoint_tensors
        uniform = [f"segment.{i}" for i, s in enumerate(cache.segments) if not s.compressed]
        stored, encodings = encode(tensors, codec, uniform, basis)
        document = self._document(codec, encodings)
        if self.memory.checkpoints != Checkpoints():
            document["checkpoints"] = checkpoints
        return write_container(
            as_path(path), SNAPSHOT_KIND, self._min_format(codec), document, stored
        )

    def _document(self, codec: Codec, encodings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the document of a file, without its checkpoints. encodings: of its tensors."""
        memory, cache = self.memory, self.memory.cache
        window = {name: getattr(cache.window, name) for name in ("size", "discard", "moves")}
        document = {
            "fingerprint": self.fingerprint,
            "model": self.model,
            "policy": self.policy,
            "settings": {"spans": {}, **self.settings, "pins": list(memory.pins), "window": window},
            "tokens": len(memory.tokens),
            "clock": cache.time,
            "serial": cache.serial,
            "sampler": self.sampler,
            "layout": layout_entry(self.layout),
            "bits": asdict(self.bits),
            "segments": [
                *(segment_entry(segment) for segment in cache.segments),
                *(segment_entry(segment, local=True) for segment in cache.local_segments),
            ],
            "codec": codec,
            "arithmetic": self.arithmetic,
            "coding": encodings,
            "created": self.created,
            "notes": self.notes,
        }
        rounds = any(entry["codec"] in ROUNDING_CODECS for entry in encodings.values())
        rounded = coarser(codec, self.rounded) if rounds else self.rounded
        if rounded or codec in ROUNDING_CODECS:  # without it, a reader decides by the codec
            document["rounded"] = rounded
        if self.local_layout is not None:
            document["local_layout"] = layout_entry(self.local_layout)
        return document

    def save_by(self, path: str | Path | WritablePath, preferred: Codec) -> int:
        """Write the snapshot by a codec, or exactly if that codec cannot store it; see `save`.

        For programs that save what would be lost otherwise. Quantised cells are stored exactly;
        without a usable basis all cells are, and a warning is logged.
        """
        if preferred in ROUNDING_CODECS and self.bits != Bits():
            return self.save(path)
        if preferred in LOSSY_CODECS:
            try:
                self._basis()
            except (InvalidArgument, StoreError) as error:
                _log.warning("%s is saved exactly, not by codec %s: %s", path, preferred, error)
                return self.save(path)
        return self.save(path, preferred)

    def require_codec(self, codec: Codec) -> None:
        """Raise InvalidArgument or StoreError if the snapshot cannot be saved by a codec."""
        if checked_codec(codec) in LOSSY_CODECS:
            self._basis()

    def _basis(self) -> CellBasis:
        """Return the basis to code cells in. Raises InvalidArgument if there can be none."""
        if self.bits != Bits():
            raise InvalidArgument(
                "the codecs small and smaller round cells of 16 bits, and this session stores them "
                "in fewer already: use exact or zstd"
            )
        return newest_basis(self.fingerprint)

    def _min_format(self, codec: Codec) -> int:
        """Return the oldest format whose readers know everything in this snapshot."""
        segments = self.segments
        compressed = any(segment.compressed for segment in segments)
        is_format_needed = {
            9: codec in LOSSY_CODECS,
            8: any(has_residual_cells(segment) for segment in segments),
            7: bool(self.checkpoints.entries),
            6: bool(self.recurrent),
            5: bool(self.local),
            4: any(has_scores(segment) for segment in segments),
            3: "budget" in self.policy or any(is_ragged(segment) for segment in segments),
            2: self.bits != Bits() or self.observed is not None or compressed,
        }
        return next((version for version, is_needed in is_format_needed.items() if is_needed), 1)

    @classmethod
    def load(cls, path: str | ReadablePath) -> "Snapshot":
        """Read a snapshot, and verify every byte of it.

        path: of a file, or the URL of an object. A basis that its cells need is read from the store
        of that object if it is not here. Raises StoreError and its kinds: foreign, newer,
        truncated, corrupt.
        """
        path = as_path(path)
        return read_file(path, lambda file: cls.read(file, path))

    @classmethod
    def read(cls, file: BinaryIO, path: ReadablePath) -> "Snapshot":
        """Read a snapshot from an open file as `load` does. path: of the file."""
        container = read_open_container(file, path, SNAPSHOT_KIND, SNAPSHOT_FORMAT)
        with _translated_errors(path):
            check_document(container.document)
            if isinstance(path, StoredPath):
                codings = container.document["coding"].values()
                fetch_bases(path.store, {x["basis"] for x in codings if "basis" in x})
            return _from_document(container.document, container.tensors)


def read_snapshot_document(path: str | ReadablePath) -> dict[str, Any]:
    """Return the document of a snapshot file, from its verified header alone. Raises as `load`."""
    document = read_document(as_path(path), SNAPSHOT_KIND, SNAPSHOT_FORMAT)
    with _translated_errors(path):
        check_document(document)
    return document


@contextmanager
def _translated_errors(path: object) -> Iterator[None]:
    """Raise CorruptFile in place of any error that invalid content causes."""
    try:
        yield
    except StoreError:  # the basis is not here
        raise
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CorruptFile(
            f"{path} is corrupt: its checksums match, but its contents are invalid ({error!r}). "
            "Restore it from a copy, or evaluate the text again"
        ) from error


def _from_document(document: dict[str, Any], stored: dict[str, Tensor]) -> Snapshot:
    """Return the snapshot of a checked document and the tensors stored with it."""
    memory = read_memory(document, stored)
    names = ("fingerprint", "model", "policy", "sampler", "codec", "created")
    later_names = {"arithmetic", "notes"} & document.keys()  # earlier files lack them
    settings = document["settings"].items()
    return Snapshot(
        **{name: document[name] for name in (*names, *later_names)},
        rounded=rounded_by(document),
        settings={name: value for name, value in settings if name not in ("pins", "window")},
        memory=memory,
        layout=layout_of(document["layout"]),
        local_layout=layout_of(document["local_layout"]) if "local_layout" in document else None,
        bits=Bits(**document.get("bits", {})),
    )
