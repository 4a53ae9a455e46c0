"""Snapshots of compressed cells: what is in them, in which format, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small import small_model

from kvkeep.errors import CorruptFile
from kvkeep.policies import make_policy
from kvkeep.session.session import Session
from kvkeep.store.container import read_container, write_container
from kvkeep.store.snapshot import Snapshot

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(70)]


def archive(method: str, tokens: list[int] = TEXT) -> Session:
    """4 anchors, 18 compressed cells, and a window of 20."""
    policy = make_policy("archive", 48, keep=4, window=16, block=8, span=200, method=method)
    session = Session(MODEL, policy, 512)
    session.feed(tokens)
    return session


def compressed_at_once() -> Session:
    session = MODEL.session(policy="full")
    session.feed(TEXT)
    session.compress(2.0, "knorm", recent=8)
    return session


@pytest.fixture
def path(tmp_path: Path) -> Path:
    archive("snapkv").snapshot().save(tmp_path / "a.kvkeep")
    return tmp_path / "a.kvkeep"


@pytest.mark.parametrize(
    ("session", "version"),
    [
        (lambda: archive("average"), "2"),
        (lambda: archive("average", TEXT[:20]), "1"),
        (lambda: archive("snapkv", TEXT[:20]), "2"),  # nothing is compressed, but queries are kept
        (compressed_at_once, "2"),
    ],
    ids=["archive", "not yet", "observing", "at once"],
)
def test_a_reader_that_does_not_know_such_cells_is_told(
    tmp_path: Path, session: Any, version: str
) -> None:
    session().snapshot().save(tmp_path / "a.kvkeep")
    with safe_open(tmp_path / "a.kvkeep", "pt") as file:
        assert file.metadata()["version"] == version


def test_each_kv_head_has_positions_and_a_bias(path: Path) -> None:
    found = read_container(path, "snapshot", 2)
    which = [entry["compressed"] for entry in found.document["segments"]]
    assert which == [False, True, False]
    tensors = {n.removeprefix("segment.1."): t for n, t in found.tensors.items() if "ent.1." in n}
    count = found.document["segments"][1]["length"]
    assert {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == {
        "keys": (torch.float32, (2, 2, count, 16)),
        "values": (torch.float32, (2, 2, count, 16)),
        "positions": (torch.int64, (2, 2, count)),
        "bias": (torch.float32, (2, 2, count)),
        "serials": (torch.int64, (count,)),
    }
    assert tensors["serials"].tolist() == [-1] * count
    assert found.tensors["queries"].shape == (2, 4, 70, 16)
    assert found.tensors["query_times"].tolist() == list(range(70))


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("session", [lambda: archive("snapkv"), compressed_at_once])
def test_what_is_read_goes_on_as_what_was_written(tmp_path: Path, session: Any, codec: Any) -> None:
    going = session()
    going.snapshot().save(tmp_path / "a.kvkeep", codec)
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    assert restored.standing == going.standing
    for _ in range(20):
        assert restored.next_token() == going.next_token()
    assert torch.equal(restored.logits, going.logits)


def _entries(document: dict[str, Any], **changed: object) -> dict[str, Any]:
    segments = document["segments"]
    return document | {"segments": [segments[0], segments[1] | changed, *segments[2:]]}


@pytest.mark.parametrize("wrong", [{"compressed": False}, {"compressed": 1, "length": 3}])
def test_wrong_entries_are_refused(path: Path, wrong: dict[str, object]) -> None:
    found = read_container(path, "snapshot", 2)
    write_container(path, "snapshot", 2, _entries(found.document, **wrong), found.tensors)
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
    found = read_container(path, "snapshot", 2)
    tensors = {other: each for other, each in found.tensors.items() if other != name}
    tensors |= {} if tensor is None else {name: tensor}
    write_container(path, "snapshot", 2, found.document, tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(path)
