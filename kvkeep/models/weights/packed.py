"""Which packed matrices a model decodes with: its own file's, or its tensors rounded once."""

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import BadModelFile, InvalidArgument, ModelError, StoreError
from kvkeep.models.hub.library import home
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.checksum import checksum_of, read_checksum, remove_checksum
from kvkeep.models.weights.formats import FORMATS, Format
from kvkeep.models.weights.packed_file import Stored, read_packed, write_packed
from kvkeep.models.weights.packing import ROUNDED, Matrix, MatrixBits, packable, packed, quantise
from kvkeep.models.weights.tensors import EMBEDDING, HEAD, is_router, matrices, tensor_shapes

WEIGHTS = ("bf16", "int8", "int4")  # that can be asked for


def rounded_formats(spec: ModelSpec, weights: str) -> dict[str, Format]:
    """What each matrix is rounded to; the head to 8 bits in any case, and routers to none.

    weights: "int8" or "int4". Raises InvalidArgument for a model whose rows are not whole groups.
    """
    bits: MatrixBits = 4 if weights == "int4" else 8
    found = {}
    for name, (rows, columns) in matrices(spec).items():
        if is_router(name):
            continue
        kind = FORMATS[ROUNDED[8 if name == HEAD else bits]]
        if not packable(kind, rows, columns):
            raise InvalidArgument(
                f'weights="{weights}" packs groups of {kind.span} columns, and {name} has '
                f'{columns}: use weights="bf16"'
            )
        found[name] = kind
    return found


def own_file(folder: Path) -> Path | None:
    """Where all tensors of a converted model lie, as its GGUF file had them."""
    path = own_path(folder)
    return path if path.exists() else None


def own_path(folder: Path) -> Path:
    """Where they are to lie."""
    return folder / "packed.safetensors"


def find_own(path: Path, spec: ModelSpec) -> dict[str, Matrix]:
    """All tensors of a converted model, mapped and verified.

    Raises BadModelFile.
    """
    found = read_packed(path, tensor_shapes(spec))
    if checksum_of(found) != read_checksum(path):
        raise BadModelFile(
            f"{path} is damaged: it is not what was written when the model was converted. Remove "
            f"the folder {path.parent}, and the model is fetched or converted again"
        )
    return found


def find_rounded(
    folder: Path,
    spec: ModelSpec,
    weights: str,
    tensors: Mapping[str, Tensor],
    progress: bool,
) -> dict[str, Matrix]:
    """The matrices of a model, rounded and packed first where that was not done before.

    They are verified, and made anew where they are damaged.

    tensors: the model's, to pack. Raises InvalidArgument, ModelError, BadModelFile.
    """
    formats, path = rounded_formats(spec, weights), _elsewhere(folder, weights)
    shapes = {name: shape for name, shape in matrices(spec).items() if name in formats}
    if path.exists():
        with contextlib.suppress(BadModelFile):
            found = read_packed(path, shapes)
            if checksum_of(found) == read_checksum(path):
                return found
        if read_checksum(path):  # else another version has packed it
            message = f"{path} is damaged: it is packed anew from the model's tensors"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    checksum = _pack(path, spec, formats, tensors, progress)
    found = read_packed(path, shapes)
    if checksum_of(found) != checksum:
        raise BadModelFile(
            f"{path} was written and is not what was written: the disk or memory fails. Set "
            'KVKEEP_HOME to a folder elsewhere, or use weights="bf16"'
        )
    return found


def _pack(
    path: Path,
    spec: ModelSpec,
    formats: Mapping[str, Format],
    tensors: Mapping[str, Tensor],
    progress: bool,
) -> str:
    """Returns the checksum of what was written. Raises ModelError."""
    shapes = matrices(spec)
    stored = {name: Stored(kind, shapes[name]) for name, kind in formats.items()}
    bar = tqdm(
        total=len(stored),
        desc=f"packing to {next(iter(formats.values())).name}",
        disable=None if progress else True,
    )

    def one(name: str) -> Iterator[Matrix]:
        source = EMBEDDING if name == HEAD and spec.tied_head else name
        yield packed(quantise(tensors[source], 8 if formats[name].bits == 8 else 4))
        bar.update()

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_checksum(path)
        with bar:
            return write_packed(path, stored, {name: one(name) for name in stored})
    except (OSError, StoreError) as error:
        raise ModelError(
            f"cannot write packed weights to {path.parent} ({error}); free some space, set "
            'KVKEEP_HOME to a folder that can be written, or use weights="bf16"'
        ) from error


def _elsewhere(folder: Path, weights: str) -> Path:
    """For a folder that may not be ours to write to: under kvkeep's home, for this state of it."""
    files = sorted(folder.glob("*.safetensors"))
    state = [f"{folder.resolve()}"] + [
        f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files
    ]
    digest = hashlib.sha256("\n".join(state).encode()).hexdigest()[:16]
    return home() / "packed" / f"{folder.name}-{digest}" / f"{weights}.safetensors"
