"""Snapshots of quantised cells: their tensors, and which files are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small_models import small_model

from kvkeep.errors import CorruptFile
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.snapshot import Snapshot, read_snapshot_document

MODEL = small_model()
TEXT = list(b"a session that wraps around its window more than once")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A snapshot of 4 anchor cells and a ring of 20, with keys in 8 bits and values in 4."""
    session = MODEL.session(24, kv_bits="8/4")
    session.feed(TEXT)
    session.snapshot().save(tmp_path / "a.kvkeep")
    return tmp_path / "a.kvkeep"


def test_the_file_records_the_bits_of_its_cells(path: Path) -> None:
    assert read_snapshot_document(path)["bits"] == {"kv": "8/4", "far": None}
    with safe_open(path, "pt") as file:
        assert file.metadata()["version"] == "2"
        tensors = {n: file.get_tensor(n) for n in file.keys() if n.startswith("segment.1.")}  # noqa: SIM118
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "segment.1.keys.int8": (torch.int8, (2, 2, 20, 16)),
        "segment.1.keys.scale": (torch.bfloat16, (2, 2, 20, 1)),
        "segment.1.values.int4": (torch.uint8, (2, 2, 20, 8)),
        "segment.1.values.scale": (torch.bfloat16, (2, 2, 20, 2)),
        "segment.1.positions": (torch.int64, (20,)),
        "segment.1.serials": (torch.int64, (20,)),
    }


def test_cells_outside_the_window_can_be_quantised_alone(tmp_path: Path) -> None:
    session = MODEL.session(24, far_bits="4")
    session.feed(TEXT)
    session.snapshot().save(tmp_path / "a.kvkeep")
    tensors = read_container(tmp_path / "a.kvkeep", "snapshot", 2).tensors
    assert {"segment.0.keys.int4", "segment.0.values.int4", "segment.1.keys"} <= set(tensors)


@pytest.mark.parametrize("codec", ["none", "zstd", "int8"])
def test_codecs_do_not_change_quantised_cells(path: Path, codec: Any) -> None:
    snapshot = Snapshot.load(path)
    session = MODEL.restore(snapshot)
    snapshot.save(path, codec)
    other = MODEL.restore(Snapshot.load(path))
    for _ in range(5):
        assert session.next_token() == other.next_token()
    assert torch.equal(session.logits, other.logits)


@pytest.mark.parametrize(
    ("document", "tensors"),
    [
        ({"bits": {"kv": "8", "far": None}}, {}),
        ({"bits": {"kv": None, "far": "8/4"}}, {}),
        ({"bits": {}}, {}),
        ({"bits": {"kv": "5", "far": None}}, {}),
        ({"bits": {"kv": ["8"], "far": None}}, {}),
        ({"bits": {"unheard": "8"}}, {}),
        ({"bits": "8"}, {}),
        ({}, {"segment.1.keys.int8": torch.ones(2, 2, 20, 16)}),
        ({}, {"segment.1.keys.int8": torch.ones(2, 2, 20, 8, dtype=torch.int8)}),
        ({}, {"segment.1.values.int4": torch.ones(2, 2, 20, 8, dtype=torch.int8)}),
        ({}, {"segment.1.values.int4": torch.ones(2, 2, 20, 16, dtype=torch.uint8)}),
        ({}, {"segment.1.keys.scale": torch.ones(2, 2, 20, 1, dtype=torch.float16)}),
        ({}, {"segment.1.values.scale": torch.ones(2, 2, 20, 1, dtype=torch.bfloat16)}),
        ({}, {"segment.1.values.scale": torch.ones(2, 2, 3, 2, dtype=torch.bfloat16)}),
    ],
)
def test_wrong_entries_are_refused(
    path: Path, document: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    content = read_container(path, "snapshot", 2)
    write_container(path, "snapshot", 2, content.document | document, content.tensors | tensors)
    with pytest.raises(CorruptFile):
        Snapshot.load(path)
