"""A converted model's weights unpacked, for where no kernels read packed ones: kept on disk.

Unpacking takes seconds for each start of a small model; a file is mapped, and processes share it.
"""

import re
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import BadModelFile, ModelError, StoreError
from kvkeep.models.hub.library import home
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packed_file import Stored, read_packed, write_packed
from kvkeep.models.weights.packing import Matrix, as_tensor, some_rows
from kvkeep.models.weights.tensors import tensor_shapes


def find_unpacked(
    own: Path, spec: ModelSpec, found: dict[str, Matrix], dtype: torch.dtype, progress: bool
) -> dict[str, Tensor]:
    """All tensors, mapped; they are unpacked first where that was not done before.

    own: the file that `found` was read from, and verified. Raises ModelError, BadModelFile.
    """
    state, shapes = own.stat(), tensor_shapes(spec)
    of = f"{own.parent.name}-{state.st_size}-{state.st_mtime_ns}"
    path = home() / "unpacked" / of / f"{str(dtype).removeprefix('torch.')}.safetensors"
    if not path.exists():
        _sweep(path.parent, own.parent.name)
        _unpack(path, shapes, found, dtype, progress)
    try:
        read = read_packed(path, shapes)
    except BadModelFile:  # cut short, or of another version
        _unpack(path, shapes, found, dtype, progress)
        read = read_packed(path, shapes)
    return {name: tensor for name, tensor in read.items() if isinstance(tensor, Tensor)}


def _sweep(folder: Path, name: str) -> None:
    """Removes what earlier states of the same model were unpacked to."""
    for other in folder.parent.glob(f"{name}-*"):
        if other != folder and re.fullmatch(rf"{re.escape(name)}-\d+-\d+", other.name):
            shutil.rmtree(other, ignore_errors=True)


def _unpack(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    found: dict[str, Matrix],
    dtype: torch.dtype,
    progress: bool,
) -> None:
    bar = tqdm(
        total=sum(map(prod, shapes.values())) * dtype.itemsize,
        desc=f"unpacking to {str(dtype).removeprefix('torch.')}",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    )

    def rows_of(name: str) -> Iterator[Matrix]:
        for rows in some_rows(found[name]):
            piece = as_tensor(rows, dtype)
            yield piece
            bar.update(piece.nbytes)

    stored = {name: Stored(dtype, shape) for name, shape in shapes.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with bar:
            write_packed(path, stored, {name: rows_of(name) for name in shapes})
    except (OSError, StoreError) as error:
        raise ModelError(
            f"cannot write unpacked weights to {path.parent} ({error}); free some space, or set "
            "KVKEEP_HOME to a folder that can be written"
        ) from error
