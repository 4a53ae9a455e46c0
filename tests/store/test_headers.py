"""Headers that are sealed well and say what no header says: damage, told as such."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from small import small_model

from kvkeep import Calibration, Snapshot, load_calibration
from kvkeep.compression.methods import Statistics
from kvkeep.compression.methods.statistics import Surrogate
from kvkeep.errors import CorruptFile, FingerprintMismatch, StoreError, TruncatedFile
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.snapshot import describe

MODEL = small_model()
READERS: dict[str, Callable[[Path], object]] = {
    "snapshot": Snapshot.load,
    "description": describe,
    "calibration": lambda path: load_calibration(path, MODEL),
}


def calibration() -> Calibration:
    spec = MODEL.spec
    heads = (spec.layers, spec.kv_heads)
    known = Statistics(
        torch.ones(*heads, spec.head_dim),
        torch.eye(spec.head_dim).expand(*heads, -1, -1).contiguous(),
        torch.full(heads, 0.5),
        Surrogate.from_weights(torch.ones(*heads, 2 * spec.head_dim + 1)),
    )
    return Calibration(known, MODEL.fingerprint.saved(), MODEL.name, 3000, 0.5)


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


def sealed_with(path: Path, change: Callable[[str], str]) -> None:
    """The file with its header's text changed, and the right checksum for that."""
    data = path.read_bytes()
    size = 8 + struct.unpack("<Q", data[:8])[0]
    text = data[8:size].decode()
    text = text.replace(json.loads(text)["__metadata__"]["checksum"], "0" * 64, 1)
    changed = change(text).rstrip().encode()
    changed += b" " * (-(8 + len(changed)) % 64)
    start = struct.pack("<Q", len(changed))
    digest = blake3(start + changed).hexdigest().encode()
    path.write_bytes(start + changed.replace(b"0" * 64, digest, 1) + data[size:])


def of_first_tensor(**changed: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        header = json.loads(text)
        first = next(name for name in header if name != "__metadata__")
        header[first] |= changed
        return json.dumps(header, separators=(",", ":"))

    return change


def of_metadata(**changed: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        header = json.loads(text)
        header["__metadata__"] |= changed
        return json.dumps(header, separators=(",", ":"))

    return change


def named_twice(text: str) -> str:
    first = next(name for name in json.loads(text) if name != "__metadata__")
    return text.rstrip()[:-1] + f',"{first}":{json.dumps(json.loads(text)[first])}}}'


DEEP = "[" * 100_000 + "]" * 100_000
CHANGES: dict[str, Callable[[str], str]] = {
    "a negative size": of_first_tensor(shape=[-1, -4]),
    "a fractional size": of_first_tensor(shape=[2.0, 2]),
    "a size that is true": of_first_tensor(shape=[True]),
    "a size beyond all numbers": of_first_tensor(shape=[10**400]),
    "sizes that are text": of_first_tensor(shape="24"),
    "no size at all": of_first_tensor(shape=None),
    "an offset that is a fraction": of_first_tensor(data_offsets=[0.0, 64.0]),
    "an offset below 0": of_first_tensor(data_offsets=[-64, 0]),
    "an offset beyond all numbers": of_first_tensor(data_offsets=[0, 10**400]),
    "one offset": of_first_tensor(data_offsets=[0]),
    "three offsets": of_first_tensor(data_offsets=[0, 1, 2]),
    "an unheard-of dtype": of_first_tensor(dtype="F99"),
    "a dtype that is a list": of_first_tensor(dtype=["F32"]),
    "a name twice": named_twice,
    "deep in itself": lambda text: text.rstrip()[:-1] + f',"deep":{DEEP}}}',
    "checksums deep in themselves": of_metadata(checksums=DEEP),
    "a document deep in itself": of_metadata(document=DEEP),
    "a document that is a list": of_metadata(document="[]"),
    "a document that is none": of_metadata(document="{"),
    "a document that is a number": of_metadata(document=5),
    "checksums of nothing": of_metadata(checksums="{}"),
    "checksums that are a list": of_metadata(checksums="[]"),
    "a version that is none": of_metadata(version="two"),
    "a version of many digits": of_metadata(version="9" * 10_000),
    "a version that is a list": of_metadata(version=[1]),
    "a version below all": of_metadata(version="-1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_damage(name: str, read: tuple[Path, Callable[[Path], object]]) -> None:
    path, reader = read
    sealed_with(path, lambda text: text)
    reader(path)
    sealed_with(path, CHANGES[name])
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
def test_a_calibrations_words_are_checked(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.kvkeep"
    calibration().save(path)
    found = read_container(path, "calibration", 2)
    write_container(path, "calibration", 2, found.document | change, found.tensors)
    with pytest.raises((CorruptFile, FingerprintMismatch)):
        load_calibration(path, MODEL)


TENSORS = ["mean", "moment_half", "tolerance"]
TENSORS += ["surrogate.key", "surrogate.value", "surrogate.constant"]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_calibrations_numbers_are_numbers(name: str, number: float, tmp_path: Path) -> None:
    path = tmp_path / "a.kvkeep"
    calibration().save(path)
    found = read_container(path, "calibration", 2)
    found.tensors[name].view(-1)[3] = number
    write_container(path, "calibration", 2, found.document, found.tensors)
    with pytest.raises(StoreError, match="finite"):
        load_calibration(path, MODEL)


@pytest.mark.parametrize("name", TENSORS)
def test_a_calibrations_tensors_are_there_in_their_shapes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.kvkeep"
    calibration().save(path)
    found = read_container(path, "calibration", 2)
    without = {each: tensor for each, tensor in found.tensors.items() if each != name}
    for tensors in (found.tensors | {name: found.tensors[name][..., :-1]}, without):
        if name == "surrogate.key" and tensors is without:
            tensors = without | {"surrogate.key": torch.ones(1)}
        write_container(path, "calibration", 2, found.document, tensors)
        with pytest.raises(CorruptFile):
            load_calibration(path, MODEL)
