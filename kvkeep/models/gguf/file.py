"""GGUF files: checked metadata, and memory-mapped tensors in their quantised formats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.header import check_header, parts_of

_T = TypeVar("_T")


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as the file stores it.

    data: memory-mapped, with one entry for each row (for a matrix, its packed blocks). Blocks never
        cross a row, so rows can be reordered, chunked or repacked without unpacking them.
    """

    name: str
    ggml_type: str  # GGML's name of the format, such as "Q4_1", "F16"
    shape: tuple[int, ...]  # in torch's order, `[rows, columns]` or `[rows]`
    data: NDArray[Any]

    def unpack(self, rows: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float32]:
        """Dequantise rows to `[len(rows), *shape[1:]]`. Raises UnsupportedModel."""
        from gguf import GGMLQuantizationType, dequantize

        packed = np.ascontiguousarray(self.data[rows])
        try:
            unpacked = dequantize(packed, GGMLQuantizationType[self.ggml_type])
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"tensor {self.name} is stored as {self.ggml_type}, which is not supported; use a "
                "Q4_0, Q4_1, Q8_0, K-quant, F16, BF16 or F32 file of the model"
            ) from error
        return np.asarray(unpacked, dtype=np.float32)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF model, of one file or several parts.

    The accessors of metadata raise BadModelFile for a value of another type than they return, and
    for a missing key without a default. "{arch}" at the start of a key stands for `architecture`,
    as in gguf-py's constants.
    """

    path: Path  # of the first part
    metadata: Mapping[str, Any]  # by GGUF key
    tensors: Mapping[str, PackedTensor]  # by GGUF name, in file order

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file, or all parts of a split model.

        Raises BadModelFile if a file is missing, empty, truncated, corrupt, or not GGUF, and
        UnsupportedModel if it is newer than gguf-py.
        """
        first, *later_parts = parts = [cls._open_part(part) for part in parts_of(path)]
        for index, part in enumerate(parts):
            part._check_part_index(index, len(parts))
        tensors = dict(first.tensors)
        for part in later_parts:
            if duplicates := tensors.keys() & part.tensors:
                raise BadModelFile(
                    f"{part.path} has {min(duplicates)}, which another part of the model has too"
                )
            tensors |= part.tensors
        stated_count = first.metadata.get("split.tensors.count", len(tensors))
        if stated_count != len(tensors):
            raise BadModelFile(
                f"the parts of {first.path} have {len(tensors)} tensors, but the first states "
                f"{short_repr(stated_count)}: they belong to different models; fetch them again"
            )
        return cls(first.path, first.metadata, tensors)

    @classmethod
    def _open_part(cls, path: Path) -> Self:
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
                    ggml_type=tensor.tensor_type.name,
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

    def _check_part_index(self, index: int, count: int) -> None:
        """Raise BadModelFile unless the metadata say part `index` (from 0) of `count`."""
        stated_count = self.metadata.get("split.count", 1) or 1
        stated_index = self.metadata.get("split.no", 0)
        if (stated_count, stated_index) == (count, index):
            return
        stated = f"part {short_repr(stated_index)} (from 0) of {short_repr(stated_count)}"
        if count == 1:
            raise BadModelFile(
                f"{self.path} is {stated} of a split model, but its name does not say so: name the "
                "parts NAME-00001-of-00003.gguf and so on, put them in one folder, and pass the "
                "first"
            )
        raise BadModelFile(
            f"{self.path} is {stated}, not part {index} of {count}: restore the original file names"
        )

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def has(self, key: str) -> bool:
        return self.full_key(key) in self.metadata

    def required(self, key: str) -> Any:
        return self._checked_value(key, None, "a value", lambda value: True)

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        expected = f"a whole number of at least {minimum}"
        return self._checked_value(key, default, expected, lambda value: _is_whole(value, minimum))

    def non_negative(self, key: str, default: int | None = None) -> int:
        return self.count(key, default, minimum=0)

    def uniform_count(self, key: str, default: int | None = None) -> int:
        """Return a count stated once or per layer. Raises UnsupportedModel if layers differ."""
        if not isinstance(self.metadata.get(self.full_key(key)), list):
            return self.count(key, default)
        counts: list[int] = self._checked_value(
            key,
            None,
            "a whole number of at least 1, or a list of them",
            lambda values: any(values) and all(_is_whole(count, 0) for count in values),
        )
        if len(set(counts)) > 1:
            key = self.full_key(key)
            raise self.unsupported(f"has a different {key} in each layer ({short_repr(counts)})")
        return counts[0]

    def layer_count(self) -> int:
        layers = self.count("{arch}.block_count")
        if layers > len(self.tensors):
            raise BadModelFile(
                f"{self.path} has {layers} layers ({self.architecture}.block_count) but only "
                f"{len(self.tensors)} tensors; fetch it again"
            )
        return layers

    def counts_per_layer(self, key: str, layers: int) -> list[int]:
        """Return a count for each layer, stated once or as a list."""
        value = self.required(key)
        counts = value if isinstance(value, list) else [value] * layers
        if len(counts) != layers or not all(_is_whole(count, 1) for count in counts):
            raise self.invalid(key, f"a whole number of at least 1 for each of {layers} layers")
        return counts

    def integer(self, key: str) -> int:
        return self._checked_value(key, None, "a whole number", lambda value: type(value) is int)

    def number(self, key: str, default: float | None = None) -> float:
        return self._checked_value(
            key, default, "a finite number", lambda value: _is_number(value) and abs(value) < inf
        )

    def decimal(self, key: str, default: float | None = None) -> float:
        """Return a finite number as the short decimal that its float32 stands for."""
        return shortest_decimal(self.number(key, default))

    def flag(self, key: str, default: bool) -> bool:
        return self._checked_value(key, default, "true or false", lambda value: type(value) is bool)

    def text(self, key: str, default: str | None = None) -> str:
        return self._checked_value(key, default, "text", lambda value: type(value) is str)

    def texts(self, key: str) -> list[str]:
        return self._list_of(key, "a list of texts", lambda text: type(text) is str)

    def integers(self, key: str) -> list[int]:
        return self._list_of(key, "a list of whole numbers", lambda number: type(number) is int)

    def numbers(self, key: str) -> list[float]:
        return self._list_of(key, "a list of numbers", _is_number)

    def full_key(self, key: str) -> str:
        """Return a key with the architecture's name in the place of "{arch}"."""
        return key.replace("{arch}", self.architecture) if key.startswith("{arch}") else key

    def _list_of(self, key: str, expected: str, is_item: Callable[[Any], bool]) -> list[Any]:
        return self._checked_value(
            key, None, expected, lambda value: type(value) is list and all(map(is_item, value))
        )

    def _checked_value(
        self, key: str, default: _T | None, expected: str, is_valid: Callable[[Any], bool]
    ) -> _T:
        value: _T | None = self.metadata.get(self.full_key(key), default)
        if value is None:
            raise BadModelFile(
                f"{self.path} has no metadata field {self.full_key(key)}, so the model is "
                "incomplete; fetch it again, or convert the model to GGUF again"
            )
        if not is_valid(value):
            raise self.invalid(key, expected)
        return value

    def invalid(self, key: str, expected: str) -> BadModelFile:
        """Return the error for the value of a key."""
        value = self.metadata.get(self.full_key(key))
        return BadModelFile(
            f"{self.path}: metadata field {self.full_key(key)} must be {expected}, found "
            f"{short_repr(value)}; fetch it again"
        )

    def unsupported(self, reason: str) -> UnsupportedModel:
        """Return the error for a feature that kvkeep does not run from a GGUF file."""
        return UnsupportedModel(
            f"{self.path} {reason}, which is not supported in GGUF files; use a safetensors folder "
            "of the model"
        )


def _is_whole(value: object, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and value == value  # not NaN


def shortest_decimal(value: float) -> float:
    """Return the short decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def short_repr(value: object) -> str:
    """Return a short repr for an error message: the value may be a list of 100,000 tokens."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
