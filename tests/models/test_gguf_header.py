"""The header of a GGUF file is read as gguf-py reads it, and in bounded time and memory."""

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.header import map_file, read_header

VALUES: dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]] = {
    "text": ("ein Gruß ▁", GGUFValueType.STRING, None),
    "empty": ("", GGUFValueType.STRING, None),
    "uint8": (255, GGUFValueType.UINT8, None),
    "int8": (-128, GGUFValueType.INT8, None),
    "uint16": (65535, GGUFValueType.UINT16, None),
    "int16": (-32768, GGUFValueType.INT16, None),
    "uint32": (2**32 - 1, GGUFValueType.UINT32, None),
    "int32": (-(2**31), GGUFValueType.INT32, None),
    "uint64": (2**64 - 1, GGUFValueType.UINT64, None),
    "int64": (-(2**63), GGUFValueType.INT64, None),
    "float32": (1e-5, GGUFValueType.FLOAT32, None),
    "float64": (1e-5, GGUFValueType.FLOAT64, None),
    "true": (True, GGUFValueType.BOOL, None),
    "false": (False, GGUFValueType.BOOL, None),
    "texts": (["a", "", "▁b"], GGUFValueType.ARRAY, GGUFValueType.STRING),
    "bools": ([True, False], GGUFValueType.ARRAY, GGUFValueType.BOOL),
    "bytes": ([0, 255], GGUFValueType.ARRAY, GGUFValueType.UINT8),
    "int32s": ([-1, 7], GGUFValueType.ARRAY, GGUFValueType.INT32),
    "float32s": ([0.1, -1e30], GGUFValueType.ARRAY, GGUFValueType.FLOAT32),
    "int64s": ([-(2**63), 5], GGUFValueType.ARRAY, GGUFValueType.INT64),
}
FORMATS = [Type.BF16, Type.Q4_0, Type.Q8_0, Type.Q6_K, Type.IQ4_XS, Type.MXFP4]


def written(path: Path, alignment: int = 32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for key, (value, kind, of) in VALUES.items():
        writer.add_key_value(key, value, kind, sub_type=of)
    random = np.random.default_rng(0)
    for index, form in enumerate(FORMATS):
        shape = gguf.quant_shape_to_byte_shape((2, 3, 256), form)
        blocks = random.integers(0, 256, shape, dtype=np.uint8)
        writer.add_tensor(f"{form.name}.weight", blocks, raw_dtype=form)
        writer.add_tensor(f"vector.{index}", np.arange(index + 1, dtype=np.float32))
    for dtype in (np.float16, np.float64, np.int8, np.int16, np.int32, np.int64):
        writer.add_tensor(dtype.__name__, np.arange(10, dtype=dtype).reshape(2, 5))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [32, 64, 1024])
def test_header_equals_that_of_gguf_py(alignment: int, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", alignment)
    file, reader = GgufFile.open(path), GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    expected = {key: value for key, value in fields.items() if not key.startswith("GGUF.")}
    assert dict(file.metadata) == expected
    assert [*map(type, file.metadata.values())] == [*map(type, expected.values())]
    assert VALUES.keys() < expected.keys()
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        read = file.tensors[tensor.name]
        assert read.ggml_type == tensor.tensor_type.name
        assert list(read.shape) == tensor.shape.tolist()[::-1]
        assert read.data.dtype == tensor.data.dtype
        assert np.array_equal(read.data, tensor.data)


def sparse_file(path: Path, header: bytes, size: int) -> Path:
    """Write a file that begins with one field, "a", and has zeros up to `size`."""
    start = struct.pack("<4sIQQQ1s", b"GGUF", 3, 0, 1, 1, b"a")
    path.write_bytes(start + header)
    with path.open("r+b") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<IIQ", 9, 0, 1 << 33), "arrays of more than 4,194,304 items"),
        (struct.pack("<IIQ", 9, 8, 1 << 23), "arrays of more than 4,194,304 items"),
        (struct.pack("<IQ", 8, 1 << 33), "a header of more than 64 MiB"),
    ],
    ids=["bytes", "strings", "string"],
)
def test_sparse_files_are_refused_before_their_zeros_are_read(
    header: bytes, message: str, tmp_path: Path
) -> None:
    path = sparse_file(tmp_path / "m.gguf", header, 1 << 35)
    with pytest.raises(BadModelFile, match=message):
        GgufFile.open(path)


def field(key: bytes, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + value


def test_items_of_all_arrays_count_together(tmp_path: Path) -> None:
    fields = [
        field(b"%d" % n, struct.pack("<IIQ", 9, 0, 1 << 20) + bytes(1 << 20)) for n in range(5)
    ]
    path = tmp_path / "m.gguf"
    for count in (4, 5):
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, count) + b"".join(fields[:count]))
        if count == 4:
            assert len(GgufFile.open(path).metadata["3"]) == 1 << 20
    with pytest.raises(BadModelFile, match="arrays of more than 4,194,304 items"):
        GgufFile.open(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"a", struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 7), "an array of type 9"),
        (b"a", struct.pack("<II", 13, 0), "a field of type 13"),
        (b"general.alignment", struct.pack("<IQ", 10, 32), "general.alignment of type 10"),
        (b"general.alignment", struct.pack("<II", 4, 24), "an alignment of 24 bytes"),
    ],
    ids=["nested", "unknown", "uint64-alignment", "no-power-of-two"],
)
def test_fields_that_gguf_has_not_are_refused(
    key: bytes, value: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + field(key, value))
    with pytest.raises(BadModelFile, match=message):
        GgufFile.open(path)


def test_header_and_tensors_are_of_the_same_file(tmp_path: Path) -> None:
    """A download that replaces the file meanwhile changes nothing."""
    path, other = written(tmp_path / "m.gguf"), tmp_path / "other.gguf"
    expected = GgufFile.open(path).tensors["Q4_0.weight"].data.copy()
    other.write_bytes(bytes(path.stat().st_size))
    data = map_file(path)
    other.replace(path)
    header = read_header(path, data)
    assert len(header.tensors) > 10
    start = next(tensor.offset for tensor in header.tensors if tensor.name == "Q4_0.weight")
    assert data[start : start + expected.nbytes] == expected.tobytes()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(BadModelFile, match="is not a regular file"):
        GgufFile.open(tmp_path / "m.gguf")


def test_a_repeated_field_is_refused(tmp_path: Path) -> None:
    number = field(b"a", struct.pack("<II", 4, 7))
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + number + number)
    with pytest.raises(BadModelFile, match="field 'a' appears twice"):
        GgufFile.open(path)


def tensor_entry(name: bytes, dims: tuple[int, ...], form: int, offset: int) -> bytes:
    parts = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return parts + struct.pack(f"<{len(dims)}QIQ", *dims, form, offset)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(b"a", (8,), 0, 0), (b"a", (8,), 0, 32)], "tensor 'a' appears twice"),
        ([(b"a", (9,), 0, 0)], "tensor 'a' would extend past its end"),
        ([(b"a", (2**63, 2**63), 0, 0)], "tensor 'a' would extend past its end"),
        ([(b"a", (8,), 0, 2**64 - 8)], "tensor 'a' would extend past its end"),
        ([(b"a", (31,), 2, 0)], "rows of 31 weights, which are no multiple of Q4_0's block of 32"),
    ],
    ids=["twice", "short", "overflow", "far", "part-of-a-block"],
)
def test_impossible_tensors_are_refused(
    entries: list[tuple[bytes, tuple[int, ...], int, int]], message: str, tmp_path: Path
) -> None:
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(entries), 0)
    header += b"".join(tensor_entry(*entry) for entry in entries)
    path = tmp_path / "m.gguf"
    path.write_bytes(header.ljust(-(-len(header) // 32) * 32, b"\0") + bytes(32))
    with pytest.raises(BadModelFile, match=message):
        GgufFile.open(path)
