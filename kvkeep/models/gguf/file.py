"""A GGUF file, opened and checked: its metadata, and its tensors, packed as they were stored."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.header import check_header
from kvkeep.models.gguf.parts import parts_of


@dataclass(frozen=True)
class PackedTensor:
    """One tensor as the file stores it.

    quantisation: GGML's name of the format, such as "Q4_1", "F16".
    shape: as torch counts it, `[rows, columns]` or `[rows]`.
    data: memory-mapped, one entry (for a matrix, one row of packed blocks) for each row. Blocks
        never cross a row, so rows can be reordered, chunked or repacked without unpacking them.
    """

    name: str
    quantisation: str
    shape: tuple[int, ...]
    data: NDArray[Any]

    def unpack(self, rows: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float32]:
        """The chosen rows as float32, `[len(rows), *shape[1:]]`.

        Raises UnsupportedModel for a format that cannot be unpacked.
        """
        from gguf import GGMLQuantizationType, dequantize

        packed = np.ascontiguousarray(self.data[rows])
        try:
            unpacked = dequantize(packed, GGMLQuantizationType[self.quantisation])
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensor {self.name} is stored as {self.quantisation}, which cannot be unpacked; "
                "take a Q4_0, Q4_1, Q8_0, K-quant, F16, BF16 or F32 file of the model instead"
            ) from error
        return np.asarray(unpacked, dtype=np.float32)


@dataclass(frozen=True)
class GgufFile:
    """metadata: GGUF keys to Python values. tensors: by GGUF name, in file order."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, PackedTensor]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map the file, or all parts of the model that it is one of, and check that all is there.

        Raises BadModelFile if it is missing, empty, truncated, corrupt, or not GGUF, and
        UnsupportedModel if it is newer than the reader.
        """
        first, *others = [cls._of_one(part) for part in parts_of(path)]
        first.require_part(0, 1 + len(others))
        tensors = dict(first.tensors)
        for number, part in enumerate(others, 1):
            part.require_part(number, 1 + len(others))
            if twice := tensors.keys() & part.tensors:
                raise BadModelFile(f"{part.path} has {min(twice)}, as another part of the model")
            tensors |= part.tensors
        total = first.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise BadModelFile(
                f"the parts of {first.path} have {len(tensors)} tensors where the first says "
                f"{shown(total)}: they are of different models; fetch them again"
            )
        return cls(first.path, first.metadata, tensors)

    @classmethod
    def _of_one(cls, path: Path) -> Self:
        _check_magic(path)
        check_header(path)
        from gguf import GGUFReader

        # The reader indexes into a map of the file: where bytes are wrong it trips over whatever
        # comes of that, an IndexError, a ValueError, a KeyError, an OverflowError.
        try:
            reader = GGUFReader(path)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
            tensors = {
                tensor.name: PackedTensor(
                    name=tensor.name,
                    quantisation=tensor.tensor_type.name,
                    shape=tuple(int(size) for size in reversed(tensor.shape.tolist())),
                    data=tensor.data,
                )
                for tensor in reader.tensors
            }
        except Exception as error:
            raise BadModelFile(
                f"{path} is a truncated or corrupt GGUF file ({type(error).__name__}: {error}); "
                "fetch it again"
            ) from error
        return cls(path, metadata, tensors)

    def require_part(self, number: int, count: int) -> None:
        """Raises BadModelFile where the file says that it is another part, or of more."""
        found = self.metadata.get("split.count", 1) or 1, self.metadata.get("split.no", 0)
        if found == (count, number):
            return
        says = f"part {shown(found[1])} (from 0) of {shown(found[0])}"
        if count == 1:
            raise BadModelFile(
                f"{self.path} is {says} of a split model, under a name that does not say so: call "
                "the parts NAME-00001-of-00003.gguf and so on, in one folder, and give the first"
            )
        raise BadModelFile(
            f"{self.path} is {says}, not part {number} of {count}: give its parts the names that "
            "they had"
        )

    def required(self, key: str) -> Any:
        """The metadata value of a key; BadModelFile if the file has none."""
        if key not in self.metadata:
            raise BadModelFile(
                f"{self.path} has no metadata field {key}, so it does not describe a whole model; "
                "fetch it again, or convert the model to GGUF anew"
            )
        return self.metadata[key]

    def has(self, key: str) -> bool:
        """Whether the metadata have a value of this key, of whatever type."""
        return key in self.metadata

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up, where nothing else makes sense. Raises BadModelFile."""
        return self._at_least(1, key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 up. Raises BadModelFile."""
        return self._at_least(0, key, default)

    def _at_least(self, least: int, key: str, default: int | None) -> int:
        value = self._value(key, default)
        if not _is_whole(value, least):
            raise self._wrong(key, f"a whole number of at least {least}", value)
        return int(value)

    def same(self, key: str, default: int | None = None) -> int:
        """A count that may be written as a list with an entry for each layer, all of them equal.

        Raises BadModelFile, and UnsupportedModel where layers differ.
        """
        value = self._value(key, default)
        if not isinstance(value, list):
            return self.count(key, default)
        if not value or not all(_is_whole(one, 0) for one in value):
            raise self._wrong(key, "a whole number of at least 1, or a list of them", value)
        if any(one != value[0] for one in value):
            raise UnsupportedModel(
                f"{self.path} has another {key} in each layer ({shown(value)}), which is not "
                "supported"
            )
        if value[0] < 1:
            raise self._wrong(key, "a whole number of at least 1, or a list of them", value)
        return int(value[0])

    def layers(self, family: str) -> int:
        """How many layers the model has. Raises BadModelFile, also for more than it has tensors."""
        layers = self.count(f"{family}.block_count")
        if layers > len(self.tensors):
            raise BadModelFile(
                f"{self.path} has {layers} layers ({family}.block_count) and {len(self.tensors)} "
                "tensors; fetch it again"
            )
        return layers

    def of_each(self, key: str, layers: int) -> list[int]:
        """A count for each layer, written once or as a list. Raises BadModelFile."""
        value = self.required(key)
        each = value if isinstance(value, list) else [value] * layers
        if len(each) != layers or not all(_is_whole(one, 1) for one in each):
            raise self._wrong(
                key, f"a whole number of at least 1 for each of {layers} layers", value
            )
        return each

    def integer(self, key: str) -> int:
        """A whole number, negative ones among them. Raises BadModelFile."""
        value = self.required(key)
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises BadModelFile for anything else."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number", value)
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises BadModelFile for anything else."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Raises BadModelFile for anything else."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts. Raises BadModelFile for anything else."""
        value = self.required(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(key, "a list of texts", value)
        return value

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers. Raises BadModelFile for anything else."""
        value = self.required(key)
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self._wrong(key, "a list of whole numbers", value)
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of numbers, infinite ones among them, but no NaN. Raises BadModelFile."""
        value = self.required(key)
        if not isinstance(value, list) or not all(_is_number(each) for each in value):
            raise self._wrong(key, "a list of numbers", value)
        return value

    def _value(self, key: str, default: object) -> Any:
        return self.required(key) if default is None else self.metadata.get(key, default)

    def _wrong(self, key: str, expected: str, found: object) -> BadModelFile:
        return BadModelFile(
            f"{self.path}: metadata field {key} must be {expected}, found {shown(found)}; fetch "
            "it again"
        )


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value == value


def shown(value: object) -> str:
    """A value from a file for a message: a list of 100,000 tokens would be no help."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(24)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read ({error.strerror}); check the path") from error
    if not head:
        raise BadModelFile(f"{path} is empty; fetch it again")
    if head[:4] != b"GGUF":
        raise BadModelFile(
            f"{path} is not a GGUF file: it starts with {head[:4]!r}, not b'GGUF'; "
            "give a .gguf file, or a folder with config.json and model.safetensors"
        )
    if len(head) < 24:
        raise BadModelFile(f"{path} is truncated: {len(head)} bytes; fetch it again")
    version = struct.unpack("<I", head[4:8])[0]
    if version not in (2, 3):
        raise BadModelFile(
            f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read: "
            "convert the model to GGUF anew"
        )
