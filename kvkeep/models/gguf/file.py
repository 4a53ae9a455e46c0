"""GGUF files: checked metadata, and memory-mapped tensors in their quantised formats."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.header import check_header, parts_of


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as the file stores it.

    quantisation: GGML's name of the format, such as "Q4_1", "F16".
    shape: in torch's order, `[rows, columns]` or `[rows]`.
    data: memory-mapped, with one entry for each row (for a matrix, its packed blocks). Blocks never
        cross a row, so rows can be reordered, chunked or repacked without unpacking them.
    """

    name: str
    quantisation: str
    shape: tuple[int, ...]
    data: NDArray[Any]

    def unpack(self, rows: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float32]:
        """Dequantise rows to float32, `[len(rows), *shape[1:]]`.

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
    """A GGUF model, of one file or several parts.

    path: of the (first) file. metadata: GGUF keys to Python values. tensors: by GGUF name, in file
    order. The accessors raise BadModelFile for a missing key without a default and for a value of
    another type than they return.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, PackedTensor]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file, or all parts of the model that it is a part of, and check completeness.

        Raises BadModelFile if a file is missing, empty, truncated, corrupt, or not GGUF, and
        UnsupportedModel if it is newer than gguf-py.
        """
        first, *others = [cls._open_one(part) for part in parts_of(path)]
        first.require_part(0, 1 + len(others))
        tensors = dict(first.tensors)
        for number, part in enumerate(others, 1):
            part.require_part(number, 1 + len(others))
            if duplicates := tensors.keys() & part.tensors:
                raise BadModelFile(
                    f"{part.path} has {min(duplicates)}, as another part of the model"
                )
            tensors |= part.tensors
        total = first.metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise BadModelFile(
                f"the parts of {first.path} have {len(tensors)} tensors where the first says "
                f"{shown(total)}: they are of different models; fetch them again"
            )
        return cls(first.path, first.metadata, tensors)

    @classmethod
    def _open_one(cls, path: Path) -> Self:
        check_header(path)
        from gguf import GGUFReader

        # gguf-py does not validate: wrong bytes surface as IndexError, ValueError, KeyError,
        # OverflowError and others.
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
        """Check that the metadata call the file part `number` (from 0) of `count`.

        Raises BadModelFile.
        """
        stated_count = self.metadata.get("split.count", 1) or 1
        stated_number = self.metadata.get("split.no", 0)
        if (stated_count, stated_number) == (count, number):
            return
        stated = f"part {shown(stated_number)} (from 0) of {shown(stated_count)}"
        if count == 1:
            raise BadModelFile(
                f"{self.path} is {stated} of a split model, under a name that does not say so: "
                "call the parts NAME-00001-of-00003.gguf and so on, in one folder, and give the "
                "first"
            )
        raise BadModelFile(
            f"{self.path} is {stated}, not part {number} of {count}: give its parts the names that "
            "they had"
        )

    def required(self, key: str) -> Any:
        """Return the value of a key of any type. Raises BadModelFile if the file has none."""
        if key not in self.metadata:
            raise BadModelFile(
                f"{self.path} has no metadata field {key}, so it does not describe a whole model; "
                "fetch it again, or convert the model to GGUF anew"
            )
        return self.metadata[key]

    def has(self, key: str) -> bool:
        """Whether the metadata have this key."""
        return key in self.metadata

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        return self._at_least(1, key, default)

    def non_negative(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 0."""
        return self._at_least(0, key, default)

    def _at_least(self, minimum: int, key: str, default: int | None) -> int:
        value = self._value(key, default)
        if not _is_whole(value, minimum):
            raise self._wrong(key, f"a whole number of at least {minimum}", value)
        return int(value)

    def uniform_count(self, key: str, default: int | None = None) -> int:
        """Return a count that is stated once, or equally for each layer in a list.

        Raises BadModelFile, and UnsupportedModel if layers differ.
        """
        value = self._value(key, default)
        if not isinstance(value, list):
            return self.count(key, default)
        if not value or not all(_is_whole(count, 0) for count in value):
            raise self._wrong(key, "a whole number of at least 1, or a list of them", value)
        if any(count != value[0] for count in value):
            raise UnsupportedModel(
                f"{self.path} has another {key} in each layer ({shown(value)}), which is not "
                "supported"
            )
        if value[0] < 1:
            raise self._wrong(key, "a whole number of at least 1, or a list of them", value)
        return int(value[0])

    def layer_count(self, family: str) -> int:
        """Return the number of layers. Raises BadModelFile if there are more than tensors."""
        layers = self.count(f"{family}.block_count")
        if layers > len(self.tensors):
            raise BadModelFile(
                f"{self.path} has {layers} layers ({family}.block_count) and {len(self.tensors)} "
                "tensors; fetch it again"
            )
        return layers

    def counts_per_layer(self, key: str, layers: int) -> list[int]:
        """Return a count for each layer, stated once or as a list."""
        value = self.required(key)
        counts = value if isinstance(value, list) else [value] * layers
        if len(counts) != layers or not all(_is_whole(count, 1) for count in counts):
            raise self._wrong(
                key, f"a whole number of at least 1 for each of {layers} layers", value
            )
        return counts

    def integer(self, key: str) -> int:
        """Return a whole number, which may be negative."""
        value = self.required(key)
        if type(value) is not int:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number", value)
        if not math.isfinite(value):
            raise self._wrong(key, "a finite number", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings."""
        value = self.required(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._wrong(key, "a list of texts", value)
        return value

    def integers(self, key: str) -> list[int]:
        """Return a list of whole numbers."""
        value = self.required(key)
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise self._wrong(key, "a list of whole numbers", value)
        return value

    def numbers(self, key: str) -> list[float]:
        """Return a list of numbers, which may be infinite but not NaN."""
        value = self.required(key)
        if not isinstance(value, list) or not all(_is_number(number) for number in value):
            raise self._wrong(key, "a list of numbers", value)
        return value

    def _value(self, key: str, default: object) -> Any:
        return self.required(key) if default is None else self.metadata.get(key, default)

    def _wrong(self, key: str, expected: str, value: object) -> BadModelFile:
        return BadModelFile(
            f"{self.path}: metadata field {key} must be {expected}, found {shown(value)}; fetch "
            "it again"
        )


def _is_whole(value: object, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value == value  # not NaN


def shown(value: object) -> str:
    """Shorten a value for an error message: it may be a list of 100,000 tokens."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
