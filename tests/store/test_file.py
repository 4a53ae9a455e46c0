"""The snapshot file: as described in docs/snapshot-format.md, aligned, as large as its cells."""

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy
import torch
from altered_snapshots import altered
from small_models import small_model
from topics import topic_ids

from kvkeep.cache import Cells, Layout, PositionMap, Segment
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.objects import open_object_store
from kvkeep.storage.objects.paths import as_path
from kvkeep.storage.snapshots.header import check_output_path
from kvkeep.storage.snapshots.snapshot import Snapshot, read_snapshot_document

MODEL = small_model()
TEXT = list(b"any reader of safetensors can open this, and find the keys in it")
CELL_BYTES = MODEL.session().cache.layout.cell_bytes


def sessions() -> dict[str, Session]:
    empty = MODEL.session(48)
    filling, wrapped, full = MODEL.session(200), MODEL.session(48), MODEL.session(policy="full")
    for session in (filling, wrapped, full):
        session.feed(TEXT)
        for _ in range(10):
            session.next_token()
    rewound, forked = wrapped.fork(), filling.fork()
    rewound.rewind(7)
    forked.feed(TEXT[:9])
    return {
        "empty": empty,
        "filling": filling,
        "wrapped": wrapped,
        "rewound": rewound,
        "forked": forked,
        "full": full,
    }


SESSIONS = sessions()


@pytest.mark.parametrize("name", SESSIONS)
def test_a_reader_written_from_the_format_description_finds_the_cells(
    tmp_path: Path, name: str
) -> None:
    session, path = SESSIONS[name], tmp_path / "a.kvkeep"
    session.snapshot().save(path)
    # The following lines use only facts from docs/snapshot-format.md.
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    document = json.loads(metadata["document"])
    tensors = safetensors.numpy.load(data)
    keys, values, positions = [], [], []
    for index, entry in enumerate(document["segments"]):
        order = np.arange(entry["length"])
        if entry["slot_order"]:
            order = (entry["start"] + order) % entry["capacity"]
        keys.append(tensors[f"segment.{index}.keys"][:, :, order])
        values.append(tensors[f"segment.{index}.values"][:, :, order])
        positions.append(tensors[f"segment.{index}.positions"][order])
    assert (metadata["kvkeep"], metadata["version"]) == ("snapshot", "1")
    assert tensors["tokens"].tolist() == session.tokens

    live = [segment.read(0, segment.length) for segment in session.cache.segments]
    assert len(live) == len(keys)
    for expected, k, v, p in zip(live, keys, values, positions, strict=True):
        assert np.array_equal(expected.keys.numpy(), k)
        assert np.array_equal(expected.values.numpy(), v)
        assert np.array_equal(expected.positions.numpy(), p)
    if session.logits is not None:
        assert np.array_equal(session.logits.numpy(), tensors["logits"])


@pytest.mark.parametrize("codec", ["none", "zstd", "int8"])
def test_every_tensor_starts_at_a_multiple_of_64_bytes(tmp_path: Path, codec: str) -> None:
    for name, session in SESSIONS.items():
        path = tmp_path / f"{name}.kvkeep"
        session.snapshot().save(path, codec)
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        offsets = [8 + length + entry["data_offsets"][0] for entry in header.values()]
        padding = [name.startswith("padding.") for name in header]
        assert all(b % 64 == 0 for b, p in zip(offsets, padding, strict=True) if not p)
        assert len(data) % 64 == 0


@pytest.mark.parametrize("codec", ["none", "zstd", "int8"])
def test_every_loaded_tensor_is_aligned_to_64_bytes(tmp_path: Path, codec: str) -> None:
    session = MODEL.session(policy="full")
    session.feed(TEXT * 30)
    session.snapshot().save(tmp_path / "a.kvkeep", codec)
    slots = Snapshot.load(tmp_path / "a.kvkeep").segments[0].block.slots
    for tensor in (slots.keys, slots.values, slots.positions, slots.serials):
        assert tensor.data_ptr() % 64 == 0


def test_unused_capacity_is_not_written(tmp_path: Path) -> None:
    for count in (1, 10, 1000):
        session = MODEL.session(policy="full")
        session.feed([5] * count)
        session.next_token()  # allocates storage for 256 more
        size = session.snapshot().save(tmp_path / "a.kvkeep")
        assert size == (tmp_path / "a.kvkeep").stat().st_size
        assert session.cache.nbytes >= (count + 255) * CELL_BYTES
        # Per token, beside its cell: the id, the serial twice, and the position.
        assert 0 <= size - (count + 1) * (CELL_BYTES + 28) <= 6000


def test_the_file_of_a_wrapped_session_has_the_size_of_its_budget(tmp_path: Path) -> None:
    session = MODEL.session(48)
    session.feed(TEXT * 20)
    size = session.snapshot().save(tmp_path / "a.kvkeep")
    assert 0 <= size - 48 * CELL_BYTES - 12 * len(session.tokens) <= 8000


def test_describe_reads_the_header(tmp_path: Path) -> None:
    SESSIONS["wrapped"].snapshot().save(tmp_path / "a.kvkeep")
    description = read_snapshot_document(tmp_path / "a.kvkeep")
    assert description["policy"]["name"] == "sliding"
    assert description["policy"]["max_kv_size"] == 48
    assert sum(entry["length"] for entry in description["segments"]) == 48


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_overwriting_a_loaded_file_changes_no_session(codec: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.kvkeep"
    SESSIONS["wrapped"].snapshot().save(path, codec)
    snapshot, loaded = Snapshot.load(path), MODEL.restore(Snapshot.load(path))
    with path.open("r+b") as file:  # overwritten in place, not replaced
        file.write(bytes(path.stat().st_size))
        file.flush()
        restored_later = MODEL.restore(snapshot)
        file.truncate(0)
    expected = SESSIONS["wrapped"].fork()
    for session in (loaded, restored_later):
        session.feed(TEXT)
    expected.feed(TEXT)
    assert torch.equal(restored_later.logits, expected.logits)
    assert torch.equal(loaded.logits, expected.logits)


def test_loading_needs_the_memory_of_the_cells_once_and_aligns_them(tmp_path: Path) -> None:
    layout = Layout(8, 8, 64, torch.float32, torch.device("cpu"))
    size = _snapshot_of_empty_cells(layout, 4096).save(tmp_path / "large.kvkeep")
    assert size > 130_000_000
    process = psutil.Process()
    before = process.memory_info().rss
    loaded = Snapshot.load(tmp_path / "large.kvkeep")
    assert process.memory_info().rss - before < 1.1 * size
    keys = loaded.segments[0].block.slots.keys
    assert keys.data_ptr() % 64 == 0
    assert float(keys.sum()) == 0


def test_a_small_tensor_of_a_file_does_not_keep_the_others_in_memory(tmp_path: Path) -> None:
    """A session replaces the cells of its window, and not those of its anchor."""
    layout = Layout(8, 8, 64, torch.float32, torch.device("cpu"))
    _snapshot_of_empty_cells(layout, 4096).save(tmp_path / "large.kvkeep")
    process = psutil.Process()
    before = process.memory_info().rss
    loaded = Snapshot.load(tmp_path / "large.kvkeep")
    positions = loaded.segments[0].block.slots.positions
    assert process.memory_info().rss - before > 100_000_000
    del loaded
    assert process.memory_info().rss - before < 50_000_000
    assert positions.tolist() == list(range(4096))


def test_a_header_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    snapshot, path = SESSIONS["filling"].snapshot(), tmp_path / "a.kvkeep"
    snapshot.save(path)
    before = path.read_bytes()
    for target in (path, as_path((tmp_path / "b.kvkeep").as_uri())):
        with pytest.raises(StoreError, match="Shorten its notes"):
            altered(snapshot, notes={"text": "x" * 100_000_000}).save(target)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.rglob("*.kvkeep")] == ["a.kvkeep"]


def _snapshot_of_empty_cells(layout: Layout, count: int) -> Snapshot:
    cells, numbers = Cells.zeros(layout, count), torch.arange(count)
    cells.serials.copy_(numbers)
    cells.positions.copy_(numbers)
    return altered(
        SESSIONS["empty"].snapshot(),
        segments=(Segment.from_cells(layout, cells, PositionMap(), is_anchor=False),),
        tokens=numbers.int(),
        serials=numbers,
        clock=count,
        serial=count,
        layout=layout,
    )


@pytest.mark.parametrize("policy", ["full", "sliding", "shift"])
def test_a_restored_session_never_writes_to_its_file(tmp_path: Path, policy: str) -> None:
    session, path = MODEL.session(200, policy=policy), tmp_path / "a.kvkeep"
    session.feed(TEXT if policy == "full" else TEXT * 4)
    session.snapshot().save(path)
    before = hashlib.sha256(path.read_bytes()).digest()
    loaded = Snapshot.load(path)
    restored = [MODEL.restore(loaded) for _ in range(2)]
    for session_copy in restored:
        for _ in range(100):
            session_copy.next_token()
    restored[0].rewind(50)
    restored[0].feed(TEXT[:20])
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert torch.equal(Snapshot.load(path).logits, session.logits)


def test_a_session_outlives_its_file(tmp_path: Path) -> None:
    session, path = MODEL.session(48), tmp_path / "a.kvkeep"
    session.feed(TEXT)
    session.snapshot().save(path)
    restored = MODEL.restore(Snapshot.load(path))
    MODEL.session(48).snapshot().save(path)
    path.unlink()
    for _ in range(60):
        assert restored.next_token() == session.next_token()
    assert torch.equal(restored.logits, session.logits)


@pytest.mark.parametrize("name", ["a\0b.kvkeep", "circle"])
def test_a_path_that_leads_to_no_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(StoreError, match="could not be written"):
        SESSIONS["full"].snapshot().save(path)
    with pytest.raises(StoreError, match="cannot be read"):
        Snapshot.load(path)
    with pytest.raises(StoreError, match="cannot be a store"):
        open_object_store(path)
    with pytest.raises(InvalidArgument, match="cannot be written"):
        check_output_path(path, "snapshot")
    assert [file.name for file in tmp_path.iterdir()] == ["circle"]


def test_notes_that_are_not_json_are_refused(tmp_path: Path) -> None:
    path, snapshot = tmp_path / "a.kvkeep", SESSIONS["full"].snapshot()
    snapshot.save(path)
    before = path.read_bytes()
    circular: dict[str, Any] = {}
    circular["self"] = circular
    for notes in ({"seen": {1, 2}}, circular):
        with pytest.raises(InvalidArgument, match="JSON"):
            replace(snapshot, notes=notes).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_int8_codec_halves_the_file_at_little_drift(smollm2: Model, tmp_path: Path) -> None:
    session = smollm2.session(policy="full")
    session.feed(topic_ids(smollm2)[:512])
    exact = session.snapshot().save(tmp_path / "a.kvkeep")
    small = session.snapshot().save(tmp_path / "b.kvkeep", "int8")
    assert small <= 0.55 * exact
    restored = smollm2.restore(Snapshot.load(tmp_path / "b.kvkeep"))
    for fed in (session, restored):
        fed.feed(topic_ids(smollm2)[512:544])
    expected, actual = (s.logits.double().log_softmax(-1) for s in (session, restored))
    drift = float((expected.exp() * (expected - actual)).sum())
    assert 0 < drift < 0.01


def test_the_int8_codec_rounds_each_number_by_at_most_half_a_step(tmp_path: Path) -> None:
    session = MODEL.session(48)
    session.feed(TEXT)
    session.snapshot().save(tmp_path / "a.kvkeep", "int8")
    loaded = Snapshot.load(tmp_path / "a.kvkeep")
    for original, decoded in zip(session.cache.segments, loaded.segments, strict=True):
        exact, rounded = (
            original.read(0, original.length).keys,
            decoded.read(0, decoded.length).keys,
        )
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert bool(((exact - rounded).abs() <= 0.51 * step + 1e-6).all())


def test_the_zstd_codec_is_smaller_and_exact(smollm2: Model, tmp_path: Path) -> None:
    session = smollm2.session(policy="full")
    session.feed(topic_ids(smollm2)[:512])
    exact = session.snapshot().save(tmp_path / "a.kvkeep")
    assert session.snapshot().save(tmp_path / "b.kvkeep", "zstd") < 0.85 * exact
    plain, decoded = (Snapshot.load(tmp_path / f"{x}.kvkeep").segments[0] for x in "ab")
    assert torch.equal(plain.read(0, 512).values, decoded.read(0, 512).values)


def test_the_rewound_session_of_these_tests_has_a_ring_that_is_not_full() -> None:
    ring = SESSIONS["rewound"].cache.segments[-1]
    assert ring.length < ring.capacity
    assert len(ring.slot_ranges(0, ring.length)) == 2
