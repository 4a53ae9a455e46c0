"""Snapshots of compressed cells: tensors, format versions, and which files are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from session_state import differences, whole_state
from small_models import small_model

from kvkeep.cache import RaggedCells
from kvkeep.errors import CorruptFile
from kvkeep.policies import make_policy
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.snapshot import Snapshot

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(70)]


def archive(method: str, tokens: list[int] = TEXT) -> Session:
    """Return a session with 4 anchors, 18 compressed cells, and a window of 20."""
    policy = make_policy("archive", 48, keep=4, window=16, block=8, span=200, method=method)
    session = Session(MODEL, policy, 512)
    session.feed(tokens)
    return session


def compressed_by_half() -> Session:
    session = MODEL.session(policy="full")
    session.feed(TEXT)
    session.compress(2.0, "knorm", recent=8)
    return session


def compressed_by_heads() -> Session:
    """Return a session with 4 exact cells, ragged ones, and 8 exact ones."""
    session = MODEL.session(policy="full")
    session.feed(TEXT)
    session.compress(2.0, "knorm", recent=8, budget="heads")
    return session


def compressed_by_heads_quantised() -> Session:
    session = MODEL.session(policy="full", kv_bits="8/4")
    session.feed(TEXT)
    session.compress(2.0, "knorm", recent=8, budget="heads")
    return session


def compressed_with_residual_cells() -> Session:
    session = MODEL.session(policy="full")
    session.feed(TEXT)
    session.compress(2.0, "kvzip", recent=8)
    return session


def archive_by_heads(tokens: list[int] = TEXT, method: str = "knorm") -> Session:
    policy = make_policy(
        "archive", 48, keep=4, window=16, block=8, span=200, method=method, budget="heads"
    )
    session = Session(MODEL, policy, 512)
    session.feed(tokens)
    return session


RAGGED = [compressed_by_heads, compressed_by_heads_quantised, archive_by_heads]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    archive("snapkv").snapshot().save(tmp_path / "a.kvkeep")
    return tmp_path / "a.kvkeep"


@pytest.mark.parametrize(
    ("session", "version"),
    [
        (lambda: archive("average"), "2"),
        (lambda: archive("average", TEXT[:20]), "1"),
        (
            lambda: archive("snapkv", TEXT[:20]),
            "2",
        ),  # nothing is compressed yet, but queries are stored
        (compressed_by_half, "2"),
        (compressed_by_heads, "3"),
        (compressed_by_heads_quantised, "3"),
        (compressed_with_residual_cells, "8"),
        (archive_by_heads, "4"),
        (
            lambda: archive_by_heads(method="keydiff"),
            "3",
        ),  # scores by comparing cells, so no scores are stored
        (lambda: archive_by_heads(TEXT[:20]), "3"),  # nothing is compressed yet
    ],
    ids=[
        "archive",
        "archive before compression",
        "archive that observes queries",
        "compressed uniformly",
        "compressed by heads",
        "compressed by heads, quantised",
        "residual cells",
        "archive by heads",
        "archive by heads without scores",
        "archive by heads before compression",
    ],
)
def test_the_format_version_is_the_oldest_that_knows_the_cells(
    tmp_path: Path, session: Any, version: str
) -> None:
    session().snapshot().save(tmp_path / "a.kvkeep")
    with safe_open(tmp_path / "a.kvkeep", "pt") as file:
        assert file.metadata()["version"] == version


def test_compressed_cells_store_positions_and_a_bias_per_kv_head(path: Path) -> None:
    content = read_container(path, "snapshot", 2)
    compressed = [entry["compressed"] for entry in content.document["segments"]]
    assert compressed == [False, True, False]
    tensors = {n.removeprefix("segment.1."): t for n, t in content.tensors.items() if "ent.1." in n}
    count = content.document["segments"][1]["length"]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "keys": (torch.float32, (2, 2, count, 16)),
        "values": (torch.float32, (2, 2, count, 16)),
        "positions": (torch.int64, (2, 2, count)),
        "bias": (torch.float32, (2, 2, count)),
        "serials": (torch.int64, (count,)),
    }
    assert tensors["serials"].tolist() == [-1] * count
    assert content.tensors["queries"].shape == (2, 4, 70, 16)
    assert content.tensors["query_times"].tolist() == list(range(70))


@pytest.mark.parametrize("make", RAGGED)
def test_ragged_cells_are_stored_in_one_row_with_a_count_per_kv_head(
    tmp_path: Path, make: Callable[[], Session]
) -> None:
    session = make()
    session.snapshot().save(tmp_path / "a.kvkeep")
    content = read_container(tmp_path / "a.kvkeep", "snapshot", 4)
    entry = content.document["segments"][1]
    assert [tensor.get("ragged") for tensor in content.document["segments"]] == [None, True, None]
    (segment,) = (s for s in session.cache.segments if s.compressed)
    cells = segment.block.slots
    assert isinstance(cells, RaggedCells)
    assert (entry["length"], entry["capacity"], entry["start"]) == (
        segment.length,
        segment.length,
        0,
    )
    assert entry["compressed"]
    assert entry["frozen"]
    tensors = {n.removeprefix("segment.1."): t for n, t in content.tensors.items() if "ent.1." in n}
    vectors = {
        "keys": (torch.float32, (cells.total, 16)),
        "values": (torch.float32, (cells.total, 16)),
    }
    if make is compressed_by_heads_quantised:
        vectors = {
            "keys.int8": (torch.int8, (cells.total, 16)),
            "keys.scale": (torch.bfloat16, (cells.total, 1)),
            "values.int4": (torch.uint8, (cells.total, 8)),
            "values.scale": (torch.bfloat16, (cells.total, 2)),
        }
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        **vectors,
        "positions": (torch.int64, (cells.total,)),
        "bias": (torch.float32, (cells.total,)),
        "serials": (torch.int64, (segment.length,)),
        "counts": (torch.int64, (2, 2)),
        **({"worth": (torch.float32, (cells.total,))} if make is archive_by_heads else {}),
    }
    assert len(set(tensors["counts"].flatten().tolist())) > 1
    assert int(tensors["counts"].sum()) == cells.total
    assert tensors["serials"].tolist() == [-1] * segment.length


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("session", [lambda: archive("snapkv"), compressed_by_half, *RAGGED])
def test_a_restored_compressed_session_continues_like_the_original(
    tmp_path: Path, session: Any, codec: Any
) -> None:
    original = session()
    original.snapshot().save(tmp_path / "a.kvkeep", codec)
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    assert list(differences(whole_state(original), whole_state(restored))) == []
    assert restored.token_status == original.token_status
    assert restored.cache.nbytes <= original.cache.nbytes
    for _ in range(20):
        assert restored.next_token() == original.next_token()
    assert torch.equal(restored.logits, original.logits)


def _with_entry(document: dict[str, Any], **changed: object) -> dict[str, Any]:
    segments = document["segments"]
    return document | {"segments": [segments[0], segments[1] | changed, *segments[2:]]}


@pytest.mark.parametrize("wrong", [{"compressed": False}, {"compressed": 1, "length": 3}])
def test_wrong_entries_are_refused(path: Path, wrong: dict[str, object]) -> None:
    content = read_container(path, "snapshot", 2)
    write_container(path, "snapshot", 2, _with_entry(content.document, **wrong), content.tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("segment.1.bias", None),
        ("segment.1.bias", torch.zeros(1)),
        ("segment.1.bias", torch.zeros(2, 2, 3)),
        ("segment.1.positions", torch.zeros(3, dtype=torch.int64)),
        ("segment.1.positions", torch.zeros(2, 2, 3, dtype=torch.int64)),
        ("queries", torch.zeros(2, 4, 3, 16)),
        ("queries", torch.zeros(3, 4, 70, 16)),
        ("queries", torch.zeros(2, 4, 70, 16, dtype=torch.bfloat16)),
        ("query_times", None),
        ("query_times", torch.zeros(70)),
    ],
)
def test_wrong_tensors_are_refused(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    content = read_container(path, "snapshot", 2)
    tensors = {other: value for other, value in content.tensors.items() if other != name}
    tensors |= {} if tensor is None else {name: tensor}
    write_container(path, "snapshot", 2, content.document, tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(path)


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    compressed_by_heads().snapshot().save(tmp_path / "a.kvkeep")
    return tmp_path / "a.kvkeep"


def counts_in_file(path: Path) -> torch.Tensor:
    return read_container(path, "snapshot", 3).tensors["segment.1.counts"]


def test_the_int8_codec_keeps_ragged_keys_within_one_step(ragged: Path) -> None:
    """The codec "int8" rounds to a 127th of the largest key."""
    session = compressed_by_heads()
    session.snapshot().save(ragged, "int8")
    restored = MODEL.restore(Snapshot.load(ragged))
    for one, other in zip(session.cache.segments, restored.cache.segments, strict=True):
        exact, decoded = (segment.block.slots for segment in (one, other))
        assert type(exact) is type(decoded)
        assert (exact.keys - decoded.keys).abs().max() <= exact.keys.abs().max() / 127
    assert counts_in_file(ragged).tolist() == counts_in_session(session)


def counts_in_session(session: Session) -> list[list[int]]:
    (cells,) = (s.block.slots for s in session.cache.segments if s.compressed)
    assert isinstance(cells, RaggedCells)
    counts: list[list[int]] = cells.counts.tolist()
    return counts


@pytest.mark.parametrize(
    "wrong",
    [
        {"ragged": False},
        {"ragged": 1},
        {"ragged": "yes"},
        {"ragged": None},
        {"compressed": False},
        {"frozen": False},
        {"length": 22},
        {"length": 24, "capacity": 24, "limit": 24},
        {"capacity": 40},
        {"capacity": 40, "start": 3},
        {"length": 5},
    ],
    ids=str,
)
def test_wrong_entries_of_ragged_cells_are_refused(ragged: Path, wrong: dict[str, object]) -> None:
    content = read_container(ragged, "snapshot", 3)
    assert content.document["segments"][1]["length"] == 23
    write_container(ragged, "snapshot", 3, _with_entry(content.document, **wrong), content.tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(ragged)


COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda x: None,
    "in 32 bits": lambda x: x.int(),
    "as fractions": lambda x: x.double(),
    "flattened": lambda x: x.flatten(),
    "of one layer fewer": lambda x: x[:1],
    "of one KV head more": lambda x: torch.cat((x, x[:, :1]), 1),
    "of one cell more": lambda x: x + torch.tensor([[1, 0], [0, 0]]),
    "of one cell fewer": lambda x: x - torch.tensor([[1, 0], [0, 0]]),
    "all zero": lambda x: 0 * x,
    "negative": lambda x: x + torch.tensor([[-500, 500], [0, 0]]),
    "huge": lambda x: x + torch.tensor([[2**40, -(2**40)], [0, 0]]),
    "with an overflowing sum": lambda x: x + torch.tensor([[2**62, 2**62], [2**62, 2**62]]),
}


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("wrong", COUNTS)
def test_invalid_counts_are_refused(ragged: Path, wrong: str, codec: Any) -> None:
    compressed_by_heads().snapshot().save(ragged, codec)
    content = read_container(ragged, "snapshot", 3)
    counts = COUNTS[wrong](content.tensors.pop("segment.1.counts"))
    tensors = content.tensors if counts is None else content.tensors | {"segment.1.counts": counts}
    write_container(ragged, "snapshot", 3, content.document, tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(ragged)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("keys", lambda x: x[:-1]),
        ("values", lambda x: x[:, :8]),
        ("keys", lambda x: x.view(1, 1, *x.shape)),
        ("positions", lambda x: x[:-1]),
        ("positions", lambda x: x[None]),
        ("bias", lambda x: x[:-1]),
        ("bias", lambda x: x.double()),
        ("serials", lambda x: x[:-1]),
    ],
)
def test_ragged_tensors_of_a_wrong_shape_are_refused(
    ragged: Path, name: str, cut: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    content = read_container(ragged, "snapshot", 3)
    tensors = content.tensors | {f"segment.1.{name}": cut(content.tensors[f"segment.1.{name}"])}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    write_container(ragged, "snapshot", 3, content.document, tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(ragged)


def test_residual_cells_are_marked_and_a_bad_mark_is_refused(tmp_path: Path) -> None:
    session, path = compressed_with_residual_cells(), tmp_path / "a.kvkeep"
    session.snapshot().save(path)
    (cells,) = (s.block.slots for s in session.cache.segments if s.compressed)
    assert isinstance(cells, RaggedCells)
    content = read_container(path, "snapshot", 8)
    assert [entry.get("residual") for entry in content.document["segments"]] == [None, True, None]
    marks = content.tensors["segment.1.residual"]
    assert marks.dtype == torch.uint8
    assert torch.equal(marks.bool(), cells.residual_mask)
    assert 0 < int(marks.sum()) < cells.total
    restored = MODEL.restore(Snapshot.load(path))
    assert not list(differences(whole_state(session), whole_state(restored)))
    marks[-1] = 2
    write_container(path, "snapshot", 8, content.document, content.tensors)
    with pytest.raises(CorruptFile, match="residual must be 0 to 1"):
        MODEL.restore(Snapshot.load(path))
