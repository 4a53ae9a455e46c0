"""Headers with correct checksums and invalid content are reported as damage."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from small_models import small_model

from kvkeep import Calibration, Snapshot, load_calibration
from kvkeep.compression.methods.statistics import Statistics, Surrogate
from kvkeep.errors import CorruptFile, FingerprintMismatch, StoreError, TruncatedFile
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.snapshot import read_snapshot_document

MODEL = small_model()
READERS: dict[str, Callable[[Path], object]] = {
    "snapshot": Snapshot.load,
    "description": read_snapshot_document,
    "calibration": lambda path: load_calibration(path, MODEL),
}


def calibration() -> Calibration:
    spec = MODEL.spec
    heads = (spec.layers, spec.kv_heads)
    statistics = Statistics(
        torch.ones(*heads, spec.head_dim),
        torch.eye(spec.head_dim).expand(*heads, -1, -1).contiguous(),
        torch.full(heads, 0.5),
        Surrogate.from_weights(torch.ones(*heads, 2 * spec.head_dim + 1)),
    )
    return Calibration(statistics, MODEL.fingerprint.to_dict(), MODEL.name, 3000, 0.5)


@pytest.fixture(params=READERS)
def read(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[Path], object]]:
    path = tmp_path / "a.kvkeep"
    if request.param == "calibration":
        calibration().save(path)
    else:
        session = MODEL.session(24)
        session.feed([(i * 7) % 250 + 1 for i in range(60)])
        session.snapshot().save(path)
    READERS[request.param](path)
    return path, READERS[request.param]


def reseal(path: Path, change: Callable[[str], str]) -> None:
    """Change the header's text and give it the matching checksum."""
    data = path.read_bytes()
    size = 8 + struct.unpack("<Q", data[:8])[0]
    text = data[8:size].decode()
    text = text.replace(json.loads(text)["__metadata__"]["checksum"], "0" * 64, 1)
    changed = change(text).rstrip().encode()
    changed += b" " * (-(8 + len(changed)) % 64)
    start = struct.pack("<Q", len(changed))
    digest = blake3(start + changed).hexdigest().encode()
    path.write_bytes(start + changed.replace(b"0" * 64, digest, 1) + data[size:])


def in_first_tensor(**changed: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        header = json.loads(text)
        first = next(name for name in header if name != "__metadata__")
        header[first] |= changed
        return json.dumps(header, separators=(",", ":"))

    return change


def in_metadata(**changed: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        header = json.loads(text)
        header["__metadata__"] |= changed
        return json.dumps(header, separators=(",", ":"))

    return change


def duplicate_name(text: str) -> str:
    first = next(name for name in json.loads(text) if name != "__metadata__")
    return text.rstrip()[:-1] + f',"{first}":{json.dumps(json.loads(text)[first])}}}'


DEEP = "[" * 100_000 + "]" * 100_000
CHANGES: dict[str, Callable[[str], str]] = {
    "a negative size": in_first_tensor(shape=[-1, -4]),
    "a fractional size": in_first_tensor(shape=[2.0, 2]),
    "a size that is a bool": in_first_tensor(shape=[True]),
    "a huge size": in_first_tensor(shape=[10**400]),
    "sizes that are text": in_first_tensor(shape="24"),
    "no sizes": in_first_tensor(shape=None),
    "an offset that is a fraction": in_first_tensor(data_offsets=[0.0, 64.0]),
    "an offset below 0": in_first_tensor(data_offsets=[-64, 0]),
    "a huge offset": in_first_tensor(data_offsets=[0, 10**400]),
    "one offset": in_first_tensor(data_offsets=[0]),
    "three offsets": in_first_tensor(data_offsets=[0, 1, 2]),
    "an unknown dtype": in_first_tensor(dtype="F99"),
    "a dtype that is a list": in_first_tensor(dtype=["F32"]),
    "a duplicate name": duplicate_name,
    "deeply nested header": lambda text: text.rstrip()[:-1] + f',"deep":{DEEP}}}',
    "deeply nested checksums": in_metadata(checksums=DEEP),
    "a deeply nested document": in_metadata(document=DEEP),
    "a document that is a list": in_metadata(document="[]"),
    "a document that is not JSON": in_metadata(document="{"),
    "a document that is a number": in_metadata(document=5),
    "empty checksums": in_metadata(checksums="{}"),
    "checksums that are a list": in_metadata(checksums="[]"),
    "a version that is text": in_metadata(version="two"),
    "a version of many digits": in_metadata(version="9" * 10_000),
    "a version that is a list": in_metadata(version=[1]),
    "a negative version": in_metadata(version="-1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_invalid_header_is_damage(
    name: str, read: tuple[Path, Callable[[Path], object]]
) -> None:
    path, reader = read
    reseal(path, lambda text: text)
    reader(path)
    reseal(path, CHANGES[name])
    with pytest.raises((CorruptFile, TruncatedFile)):
        reader(path)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": "many"},
        {"tokens": 2**80},
        {"tokens": None},
        {"model": 5},
        {"fingerprint": None},
        {"fingerprint": []},
        {"fingerprint": {"weights": 5}},
        {"r_squared": "good"},
    ],
    ids=str,
)
def test_a_calibrations_document_is_validated(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.kvkeep"
    calibration().save(path)
    content = read_container(path, "calibration", 2)
    write_container(path, "calibration", 2, content.document | change, content.tensors)
    with pytest.raises((CorruptFile, FingerprintMismatch)):
        load_calibration(path, MODEL)


TENSORS = ["mean", "moment_half", "tolerance"]
TENSORS += ["surrogate.key", "surrogate.value", "surrogate.constant"]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_calibration_with_non_finite_numbers_is_refused(
    name: str, number: float, tmp_path: Path
) -> None:
    path = tmp_path / "a.kvkeep"
    calibration().save(path)
    content = read_container(path, "calibration", 2)
    content.tensors[name].view(-1)[3] = number
    write_container(path, "calibration", 2, content.document, content.tensors)
    with pytest.raises(StoreError, match="finite"):
        load_calibration(path, MODEL)


@pytest.mark.parametrize("name", TENSORS)
def test_missing_or_misshapen_calibration_tensors_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.kvkeep"
    calibration().save(path)
    content = read_container(path, "calibration", 2)
    without = {other: tensor for other, tensor in content.tensors.items() if other != name}
    for tensors in (content.tensors | {name: content.tensors[name][..., :-1]}, without):
        if name == "surrogate.key" and tensors is without:
            tensors = without | {"surrogate.key": torch.ones(1)}
        write_container(path, "calibration", 2, content.document, tensors)
        with pytest.raises(CorruptFile):
            load_calibration(path, MODEL)
