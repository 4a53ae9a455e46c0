"""GGUF files: checked metadata, and memory-mapped tensors in their quantised formats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.header import TensorLocation, map_file, read_header
from kvkeep.models.gguf.parts import part_paths

_T = TypeVar("_T")
# Unquantised formats; tensors of all others are bytes.
_NUMPY_DTYPES = {
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in the format in which the file stores it.

    data: memory-mapped, with one entry for each row (of a quantised matrix, the bytes of its
        blocks). Blocks never cross a row, so rows can be reordered without unpacking them.
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

    Accessors return the value of a metadata key, such as "{arch}.block_count", or the default. They
    raise BadModelFile for a value of another type than they return, and for a missing key without a
    default. "{arch}" at the start of a key stands for `arch`, as in gguf-py's constants.
    """

    path: Path  # of the first part
    metadata: Mapping[str, Any]  # by GGUF key
    tensors: Mapping[str, PackedTensor]  # by GGUF name, in file order

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file, or all parts of a split model. Raises BadModelFile, UnsupportedModel."""
        parts = [cls._open_part(part_path) for part_path in part_paths(path)]
        for index, part in enumerate(parts):
            part._check_part_index(index, len(parts))
        first, *later_parts = parts
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
        data = map_file(path)  # once: the file may be replaced
        header, content = read_header(path, data), np.frombuffer(data, dtype=np.uint8)
        try:
            tensors = {location.name: _map_tensor(content, location) for location in header.tensors}
        except ValueError as error:
            raise BadModelFile(
                f"{path} is a truncated or corrupt GGUF file ({error}); fetch it again"
            ) from error
        return cls(path, header.metadata, tensors)

    def _check_part_index(self, index: int, part_count: int) -> None:
        """Raise BadModelFile unless the metadata say part `index` (from 0) of `part_count`."""
        stated_count = self.metadata.get("split.count", 1) or 1
        stated_index = self.metadata.get("split.no", 0)
        if (stated_count, stated_index) == (part_count, index):
            return
        stated = f"part {short_repr(stated_index)} (from 0) of {short_repr(stated_count)}"
        if part_count == 1:
            raise BadModelFile(
                f"{self.path} is {stated} of a split model, but its name does not say so: name the "
                "parts NAME-00001-of-00003.gguf and so on, put them in one folder, and pass the "
                "first"
            )
        raise BadModelFile(
            f"{self.path} is {stated}, not part {index} of {part_count}: restore the original file "
            "names"
        )

    @property
    def arch(self) -> str:
        return self.string("general.architecture")

    def has(self, key: str) -> bool:
        return self.full_key(key) in self.metadata

    def value(self, key: str) -> Any:
        return self._checked_value(key, None, "a value", lambda value: True)

    def positive_int(self, key: str, default: int | None = None) -> int:
        return self._integer_from(1, key, default)

    def non_negative_int(self, key: str, default: int | None = None) -> int:
        return self._integer_from(0, key, default)

    def uniform_int(self, key: str, default: int | None = None) -> int:
        """Return a number stated once or per layer. Raises UnsupportedModel if layers differ."""
        numbers: list[int] | None = self.metadata.get(self.full_key(key))
        if not isinstance(numbers, list):
            return self.positive_int(key, default)
        if not any(numbers) or not all(_is_integer_from(0, number) for number in numbers):
            raise self.invalid_error(key, "a whole number of at least 1, or a list of them")
        if len(set(numbers)) > 1:
            feature = f"has a different {self.full_key(key)} in each layer ({short_repr(numbers)})"
            raise self.unsupported_error(feature)
        return numbers[0]

    def predicting_layer_count(self) -> int:
        """Return how many of the last layers predict several tokens (MTP)."""
        return self.non_negative_int("{arch}.nextn_predict_layers", 0)

    def layer_count(self) -> int:
        """Return the number of layers, without those that predict several tokens."""
        num_layers = self.positive_int("{arch}.block_count") - self.predicting_layer_count()
        if num_layers < 1:
            raise self.invalid_error("{arch}.nextn_predict_layers", "less than the block count")
        if num_layers > len(self.tensors):  # before anything is allocated for each layer
            raise BadModelFile(
                f"{self.path} has {num_layers} layers ({self.arch}.block_count) but only "
                f"{len(self.tensors)} tensors; fetch it again"
            )
        return num_layers

    def ints_per_layer(self, key: str, num_layers: int) -> list[int]:
        """Return a number of at least 1 for each layer, stated once or as a list."""
        value = self.value(key)
        numbers = value if isinstance(value, list) else [value] * num_layers
        if len(numbers) != num_layers or not all(_is_integer_from(1, x) for x in numbers):
            one_each = f"a whole number of at least 1 for each of {num_layers} layers"
            raise self.invalid_error(key, one_each)
        return numbers

    def integer(self, key: str) -> int:
        return self._checked_value(key, None, "a whole number", lambda value: type(value) is int)

    def number(self, key: str, default: float | None = None) -> float:
        return self._checked_value(
            key, default, "a finite number", lambda value: _is_number(value) and abs(value) < inf
        )

    def rounded_number(self, key: str, default: float | None = None) -> float:
        """Return a finite number, rounded to the decimal that its float32 stands for."""
        return shortest_decimal(self.number(key, default))

    def boolean(self, key: str, default: bool) -> bool:
        return self._checked_value(key, default, "true or false", lambda value: type(value) is bool)

    def string(self, key: str, default: str | None = None) -> str:
        return self._checked_value(key, default, "text", lambda value: type(value) is str)

    def strings(self, key: str) -> list[str]:
        return self._checked_list(key, "a list of texts", lambda text: type(text) is str)

    def integers(self, key: str) -> list[int]:
        return self._checked_list(key, "a list of whole numbers", lambda item: type(item) is int)

    def numbers(self, key: str) -> list[float]:
        return self._checked_list(key, "a list of numbers", _is_number)

    def full_key(self, key: str) -> str:
        """Return a key with the architecture's name in the place of "{arch}"."""
        return key.replace("{arch}", self.arch) if key.startswith("{arch}") else key

    def _integer_from(self, minimum: int, key: str, default: int | None) -> int:
        expected = f"a whole number of at least {minimum}"
        return self._checked_value(key, default, expected, partial(_is_integer_from, minimum))

    def _checked_list(self, key: str, expected: str, is_valid: Callable[[Any], bool]) -> list[Any]:
        return self._checked_value(
            key, None, expected, lambda value: type(value) is list and all(map(is_valid, value))
        )

    def _checked_value(
        self, key: str, default: _T | None, expected: str, is_valid: Callable[[Any], bool]
    ) -> _T:
        """Return the value of a key or the default. expected: what is valid, for the message."""
        value: _T | None = self.metadata.get(self.full_key(key), default)
        if value is None:
            raise BadModelFile(
                f"{self.path} has no metadata field {self.full_key(key)}, so the model is "
                "incomplete; fetch it again, or convert the model to GGUF again"
            )
        if not is_valid(value):
            raise self.invalid_error(key, expected)
        return value

    def invalid_error(self, key: str, expected: str) -> BadModelFile:
        """Return the error for the value of a key. expected: what would be valid."""
        value = self.metadata.get(self.full_key(key))
        return BadModelFile(
            f"{self.path}: metadata field {self.full_key(key)} must be {expected}, found "
            f"{short_repr(value)}; fetch it again"
        )

    def unsupported_error(self, feature: str) -> UnsupportedModel:
        """Return the error for a feature that kvkeep does not run: "is bidirectional"."""
        return UnsupportedModel(
            f"{self.path} {feature}, which is not supported in GGUF files; use a safetensors "
            "folder of the model"
        )


def _map_tensor(content: NDArray[np.uint8], location: TensorLocation) -> PackedTensor:
    """Return a tensor that is a view of a file's content. Raises ValueError."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    ggml_type = GGMLQuantizationType(location.type_number)
    *leading, columns = location.shape
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if columns % block_size:
        raise ValueError(
            f"tensor {location.name!r} has rows of {columns} weights, which are no multiple of "
            f"{ggml_type.name}'s block of {block_size}"
        )
    shape = (*leading, columns // block_size * block_bytes)
    end = location.offset + prod(shape)
    if end > len(content):
        raise ValueError(f"tensor {location.name!r} would extend past its end")
    data = content[location.offset : end].reshape(shape)
    if dtype := _NUMPY_DTYPES.get(ggml_type.name):
        data = data.view(dtype)
    return PackedTensor(location.name, ggml_type.name, location.shape, data)


def _is_integer_from(minimum: int, value: object) -> bool:
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
