"""The packed and unpacked weights of a model, made once and kept on disk.

A converted model (from a GGUF file) has all tensors in one file in its folder, packed as GGUF had
them. For other models matrices are rounded and packed on request; for executors that cannot read
packed matrices, a converted model is unpacked. Both are kept under kvkeep's home.
"""

import contextlib
import hashlib
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from kvkeep.errors import BadModelFile, InvalidArgument, ModelError, StoreError
from kvkeep.models.hub.library import packed_folder, unpacked_folder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import EMBEDDING, LM_HEAD
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.state_layers import is_float32_weight
from kvkeep.models.weights.formats import FORMATS, Format
from kvkeep.models.weights.packed_file import (
    NewMatrix,
    checksum_of,
    read_checksum,
    read_packed,
    write_packed,
)
from kvkeep.models.weights.packing import (
    QUANTISED_FORMATS,
    Matrix,
    MatrixBits,
    as_tensor,
    is_packable,
    pack,
    quantise,
    row_chunks,
    row_ranges,
)
from kvkeep.models.weights.tensors import is_router, matrix_shapes
from kvkeep.storage.files.text import ENCODING

WEIGHT_FORMATS = ("bf16", "int8", "int4")  # values of the option `weights`


def quantised_formats(spec: ModelSpec, weight_format: str) -> dict[str, Format]:
    """Return the format to quantise each matrix to, 8 bits for the head. Raises InvalidArgument."""
    bits: MatrixBits = 4 if weight_format == "int4" else 8
    formats = {}
    for name, (rows, columns) in matrix_shapes(spec).items():
        if is_router(name):
            continue
        packed_format = FORMATS[QUANTISED_FORMATS[8 if name == LM_HEAD else bits]]
        if not is_packable(packed_format, rows, columns):
            raise InvalidArgument(
                f'weights="{weight_format}" packs groups of {packed_format.tile_width} columns, '
                f'and {name} has {columns}: use weights="bf16"'
            )
        formats[name] = packed_format
    return formats


def converted_path(folder: Path) -> Path:
    return folder / "packed.safetensors"


def converted_file(folder: Path) -> Path | None:
    """Return the file of a converted model's weights; None for any other model."""
    path = converted_path(folder)
    return path if path.exists() else None


def load_converted(path: Path, spec: ModelSpec) -> dict[str, Matrix]:
    """Return all tensors of a converted model, memory-mapped and verified. Raises BadModelFile."""
    loaded_matrices = read_packed(path, tensor_shapes(spec))
    if checksum_of(loaded_matrices) != read_checksum(path):
        raise BadModelFile(
            f"{path} is damaged: it differs from what was converted. Remove the folder "
            f"{path.parent}, and the model is fetched or converted again"
        )
    return loaded_matrices


def load_quantised(
    folder: Path, spec: ModelSpec, weight_format: str, tensors: Mapping[str, Tensor], progress: bool
) -> dict[str, Matrix]:
    """Return a model's matrices quantised and packed, memory-mapped and verified.

    They are packed from `tensors`, the decoder's, if no file has them, or if it is damaged; those
    of earlier states of the folder are removed then. Raises InvalidArgument, ModelError,
    BadModelFile.
    """
    formats, path = quantised_formats(spec, weight_format), _quantised_path(folder, weight_format)
    shapes = {name: shape for name, shape in matrix_shapes(spec).items() if name in formats}
    if stored := _read_verified(path, shapes, "packed again from the model's tensors"):
        return stored
    _remove_outdated(packed_folder(folder).glob("*"), path)

    def chunks(name: str) -> Iterator[Matrix]:
        source = tensors[EMBEDDING if name == LM_HEAD and spec.tied_head else name]
        for rows in row_ranges(*shapes[name]):
            yield pack(quantise(source[rows], 8 if formats[name].bits == 8 else 4))

    new_matrices = {
        name: NewMatrix(formats[name], shape, chunks(name)) for name, shape in shapes.items()
    }
    description = f"packing to {next(iter(formats.values())).name}"
    advice = ', or use weights="bf16"'
    return _write_and_map(path, new_matrices, description, progress, "packed", advice)


def load_unpacked(
    converted: Path, spec: ModelSpec, packed: dict[str, Matrix], dtype: torch.dtype, progress: bool
) -> dict[str, Tensor]:
    """Return all tensors of a converted model unpacked, memory-mapped and verified.

    They are unpacked into a file first if there is none, or if it is damaged: that takes seconds
    even for a small model, and processes share a mapped file. packed: read from the file
    `converted`. Raises ModelError, BadModelFile.
    """
    status, shapes = converted.stat(), tensor_shapes(spec)
    folder, dtype_name = unpacked_folder(converted.parent), str(dtype).removeprefix("torch.")
    path = folder / f"{status.st_size}-{status.st_mtime_ns}" / f"{dtype_name}.safetensors"
    if stored := _read_verified(path, shapes, f"unpacked again from {converted.name}"):
        return cast(dict[str, Tensor], stored)
    _remove_outdated(folder.glob("*"), path)

    def chunks(name: str) -> Iterator[Matrix]:
        return (as_tensor(rows, dtypes[name]) for rows in row_chunks(packed[name]))

    dtypes = {name: torch.float32 if is_float32_weight(name) else dtype for name in shapes}
    new_matrices = {
        name: NewMatrix(dtypes[name], shape, chunks(name)) for name, shape in shapes.items()
    }
    description = f"unpacking to {dtype_name}"
    unpacked = _write_and_map(path, new_matrices, description, progress, "unpacked")
    return cast(dict[str, Tensor], unpacked)


def _read_verified(
    path: Path, shapes: Mapping[str, tuple[int, ...]], remedy: str
) -> dict[str, Matrix] | None:
    """Return the matrices of a file of derived weights; None if there is no valid one.

    Warns of a damaged file. remedy: how it is replaced.
    """
    if not path.exists():
        return None
    with contextlib.suppress(BadModelFile):
        loaded_matrices = read_packed(path, shapes)
        if checksum_of(loaded_matrices) == read_checksum(path):
            return loaded_matrices
    if read_checksum(path):  # otherwise another version has written it
        warnings.warn(f"{path} is damaged and is {remedy}", RuntimeWarning, stacklevel=3)
    return None


def _write_and_map(
    path: Path,
    new_matrices: Mapping[str, NewMatrix],
    description: str,
    progress: bool,
    adjective: str,
    advice: str = "",
) -> dict[str, Matrix]:
    """Write a file of derived weights; return its matrices, memory-mapped and verified.

    adjective, advice: for the messages of ModelError and BadModelFile.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checksum = write_packed(path, new_matrices, description, progress)
    except (OSError, StoreError) as error:
        raise ModelError(
            f"cannot write {adjective} weights to {path.parent} ({error}); free some space, or set "
            f"KVKEEP_HOME to a writable folder{advice}"
        ) from error
    loaded_matrices = read_packed(path, {name: new.shape for name, new in new_matrices.items()})
    if checksum_of(loaded_matrices) != checksum:
        raise BadModelFile(
            f"{path} was damaged while it was written: the disk or memory is faulty. Set "
            f"KVKEEP_HOME to a folder elsewhere{advice}"
        )
    return loaded_matrices


def _quantised_path(folder: Path, weight_format: str) -> Path:
    """Return a path under kvkeep's home for the quantised weights of a folder in this state.

    config.json belongs to it, since the order of rows depends on its RoPE.
    """
    lines = [
        f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in sorted(folder.glob("*.safetensors"))
    ]
    lines += [path.read_text(encoding=ENCODING) for path in folder.glob("config.json")]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return packed_folder(folder) / digest / f"{weight_format}.safetensors"


def _remove_outdated(folders: Iterable[Path], path: Path) -> None:
    """Remove the folders of derived weights, except that of the file `path`."""
    for folder in folders:
        if folder != path.parent:
            shutil.rmtree(folder, ignore_errors=True)
