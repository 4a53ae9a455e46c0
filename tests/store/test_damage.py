"""Damaged snapshot files raise a typed error; none loads and continues differently."""

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_models import small_model

from kvkeep.errors import CorruptFile, ForeignFile, NewerFormat, StoreError, TruncatedFile
from kvkeep.storage.snapshots.container import write_container
from kvkeep.storage.snapshots.snapshot import Snapshot, read_snapshot_document

MODEL = small_model()
TEXT = list(b"a session that wraps around its window more than once")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    session = MODEL.session(24)
    session.feed(TEXT)
    session.snapshot().save(tmp_path / "a.kvkeep")
    return tmp_path / "a.kvkeep"


def header_size(data: bytes) -> int:
    return 8 + struct.unpack("<Q", data[:8])[0]


def with_flipped_bits(path: Path, bits: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Flip each of the given (byte offset, bit) pairs in the file, one at a time."""
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for offset, bit in bits:
            file.seek(offset)
            file.write(bytes([data[offset] ^ 1 << bit]))
            yield offset, bit
            file.seek(offset)
            file.write(data[offset : offset + 1])


def test_a_flipped_bit_in_any_byte_of_the_header_is_refused(path: Path) -> None:
    draw = random.Random(0)
    bits = [(offset, draw.randrange(8)) for offset in range(header_size(path.read_bytes()))]
    for _ in with_flipped_bits(path, bits):
        for read in (Snapshot.load, read_snapshot_document):
            with pytest.raises((CorruptFile, ForeignFile, TruncatedFile)):
                read(path)
    Snapshot.load(path)


def test_every_flipped_bit_of_the_first_64_bytes_is_refused(path: Path) -> None:
    for _ in with_flipped_bits(path, [(offset, bit) for offset in range(64) for bit in range(8)]):
        with pytest.raises((CorruptFile, ForeignFile, TruncatedFile)):
            Snapshot.load(path)


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param("none", marks=pytest.mark.extended),
        "zstd",
        pytest.param("int8", marks=pytest.mark.extended),
    ],
)
def test_a_flipped_bit_of_the_payload_is_refused(path: Path, codec: str) -> None:
    Snapshot.load(path).save(path, codec)  # type: ignore[arg-type]
    data, draw = path.read_bytes(), random.Random(1)
    first = header_size(data)
    bits = [(draw.randrange(first, len(data)), draw.randrange(8)) for _ in range(500)]
    for _ in with_flipped_bits(path, bits):
        with pytest.raises(CorruptFile, match="the checksum of"):
            Snapshot.load(path)
    Snapshot.load(path)


def test_loading_does_not_change_a_corrupt_file(path: Path) -> None:
    for _ in with_flipped_bits(path, [(path.stat().st_size // 2, 3)]):
        damaged = path.read_bytes()
        with pytest.raises(CorruptFile):
            Snapshot.load(path)
        assert path.read_bytes() == damaged


def test_a_truncated_file_is_reported_as_truncated(path: Path) -> None:
    data = path.read_bytes()
    lengths = {9, 20, 100, header_size(data) - 1, header_size(data), len(data) - 1}
    for length in sorted(lengths | set(range(64, len(data), 97))):
        path.write_bytes(data[:length])
        with pytest.raises(TruncatedFile):
            Snapshot.load(path)


@pytest.mark.parametrize("extra", [b"\0", b"more" * 1000])
def test_extra_bytes_at_the_end_are_refused(path: Path, extra: bytes) -> None:
    path.write_bytes(path.read_bytes() + extra)
    with pytest.raises(CorruptFile, match=f"{len(extra)} bytes too many"):
        Snapshot.load(path)


def test_files_of_another_kind_are_foreign(tmp_path: Path) -> None:
    path = tmp_path / "b.kvkeep"
    for content in (b"", b"\0", b"a text, not a snapshot", b"\xff" * 4096, bytes(4096)):
        path.write_bytes(content)
        with pytest.raises(ForeignFile, match="not a kvkeep snapshot"):
            Snapshot.load(path)
    save_file({"weights": torch.ones(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ForeignFile, match="not a kvkeep snapshot"):
        Snapshot.load(path)
    write_container(path, "prefix-block", 1, {"start": 0}, {"tokens": torch.ones(3)})
    with pytest.raises(ForeignFile, match="is a kvkeep prefix-block; expected a snapshot"):
        Snapshot.load(path)


def test_a_newer_format_raises_newer_format(tmp_path: Path) -> None:
    path = tmp_path / "b.kvkeep"
    write_container(
        path, "snapshot", 99, {"written by": "a later release"}, {"unknown": torch.ones(3)}
    )
    for read in (Snapshot.load, read_snapshot_document):
        with pytest.raises(NewerFormat, match="format 99; this kvkeep reads up to 9"):
            read(path)


def test_an_unreadable_path_is_a_store_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.kvkeep", tmp_path):
        with pytest.raises(StoreError, match="cannot be read"):
            Snapshot.load(path)


# Files with correct checksums and content that no release of kvkeep writes.


def rewrite(path: Path, change: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    from kvkeep.storage.snapshots.container import read_container

    content = read_container(path, "snapshot", 1)
    write_container(path, "snapshot", 1, content.document | change, content.tensors | tensors)


def changed_segment(path: Path, **entry: object) -> dict[str, object]:
    segments = read_snapshot_document(path)["segments"]
    return {"segments": [*segments[:-1], segments[-1] | entry]}


@pytest.mark.parametrize(
    "entry",
    [
        {"start": -1},
        {"start": 10**6},
        {"length": 10**6},
        {"length": 0},
        {"capacity": 1},
        {"capacity": 10**15, "slot_order": False, "start": 1},
        {"limit": 1},
        {"start": None},
        {"map": {"unknown": 1}},
    ],
)
def test_an_invalid_segment_entry_is_refused(path: Path, entry: dict[str, object]) -> None:
    rewrite(path, changed_segment(path, **entry), {})
    with pytest.raises(CorruptFile):
        Snapshot.load(path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"segment.1.keys": torch.ones(2, 2, 20, 8)},
        {"segment.1.values": torch.ones(2, 2, 3, 16)},
        {"segment.1.keys": torch.ones(2, 2, 20, 16, dtype=torch.bfloat16)},
        {"segment.1.positions": torch.ones(20, dtype=torch.float32)},
        {"tokens": torch.ones(3, dtype=torch.int64)},
        {"tokens": torch.ones(2, 3, dtype=torch.int32)},
    ],
)
def test_tensors_of_a_wrong_shape_or_dtype_are_refused(
    path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    rewrite(path, {}, tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"segments": None},
        {"coding": {"tokens": {"codec": "zstd", "dtype": "float32", "shape": [1]}}},
        {"coding": {"tokens": {"codec": "unknown", "dtype": "int32", "shape": [1]}}},
        {"layout": {"layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "load"}},
        {"clock": "soon"},
    ],
)
def test_an_invalid_document_is_refused(path: Path, change: dict[str, object]) -> None:
    rewrite(path, change, {})
    with pytest.raises(CorruptFile):
        Snapshot.load(path)


def test_overlapping_tensors_are_refused(path: Path) -> None:
    """Two entries share their bytes, and the header's checksum is correct."""
    from blake3 import blake3

    data = path.read_bytes()
    size = header_size(data)
    header = json.loads(data[8:size])
    header["segment.0.keys"]["data_offsets"] = header["segment.0.values"]["data_offsets"]
    header["__metadata__"]["checksum"] = "0" * 64

    def sealed_header() -> bytes:
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (size - 8 - len(text))
        return struct.pack("<Q", len(text)) + text

    header["__metadata__"]["checksum"] = blake3(sealed_header()).hexdigest()
    path.write_bytes(sealed_header() + data[size:])
    with pytest.raises(CorruptFile):
        Snapshot.load(path)
