"""A basis: the components in which cells of one model are coded, measured by `kvkeep calibrate`.

Keys before rotation, and values, of some layers together are a few hundred correlated numbers. In
a basis of their principal components most of them are almost 0. Directions are weighted by how
much they change predictions, so that one step serves all components.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.cache.checks import require, require_finite, require_tensor
from kvkeep.errors import CorruptFile, InvalidArgument, StoreError
from kvkeep.models.hub.library import data_folders
from kvkeep.storage.files.atomic import make_folder
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.snapshots.container import read_container, write_container
from kvkeep.storage.snapshots.document import layout_of
from kvkeep.storage.snapshots.fingerprint import layout_fields
from kvkeep.storage.snapshots.header import read_document

LossyCodec = Literal["small", "smaller"]
LOSSY_CODECS: tuple[LossyCodec, ...] = get_args(LossyCodec)
BASIS_KIND, BASIS_FORMAT = "basis", 1
BASIS_SUFFIX = ".kvbasis"
_MAX_COMPONENTS = 2**20
_ADVICE = (
    "run `kvkeep calibrate FILE --basis-only` on a text of 9,000 tokens or more, or use exact or "
    "zstd"
)


@dataclass(frozen=True)
class GroupBasis:
    """The components of the keys or the values of some neighbouring layers.

    mean: `[width]` float32, for width = layers x kv_heads x head_dim of the group. decode:
    `[components, width]` float16; a vector is the mean plus its coefficients times `decode`.
    encode: `[width, components]` float16; the coefficients are (vector - mean) times `encode`.
    """

    mean: Tensor
    decode: Tensor
    encode: Tensor

    @property
    def components(self) -> int:
        return self.decode.shape[0]


@dataclass(frozen=True)
class CellBasis:
    """The components of the cells of a model's layers.

    fingerprint, model: of the model. layout: of its cells. layers: of a group. steps: of the
    coefficients, by codec. frequencies: `[layers, head_dim / 2]` float64, in radians per position;
    0 in layers without rotation. keys, values: by group, the first layers first.
    """

    fingerprint: Mapping[str, str]
    model: str
    layout: Layout
    layers: int
    steps: Mapping[str, float]
    frequencies: Tensor
    keys: tuple[GroupBasis, ...]
    values: tuple[GroupBasis, ...]

    @cached_property
    def digest(self) -> str:
        """A digest of all that decoding needs; files name their basis by it."""
        fields = (self.layers, sorted(self.steps.items()), sorted(self.fingerprint.items()))
        hasher = blake3(repr(fields).encode())
        for name, tensor in sorted(self._tensors().items()):
            if not name.endswith(".encode"):
                hasher.update(tensor_bytes(tensor))
        return hasher.hexdigest()[:32]

    @cached_property
    def matrices(self) -> Mapping[str, Sequence[tuple[Tensor, Tensor]]]:
        """`encode`, transposed, and `decode` of each group, in the dtype of products.

        bfloat16 where the processor multiplies it fast, for cells that have no more bits: what that
        rounds is small against a step.
        """
        is_fast = self.layout.dtype == torch.bfloat16 and _multiplies_bfloat16()
        dtype = torch.bfloat16 if is_fast else torch.float32
        groups = {"keys": self.keys, "values": self.values}
        return {
            name: [(g.encode.T.to(dtype).contiguous(), g.decode.to(dtype)) for g in members]
            for name, members in groups.items()
        }

    def layer_groups(self) -> list[slice]:
        """Return the layers of each group."""
        return layer_groups(self.layout.layers, self.layers)

    def save(self, path: Path) -> int:
        """Write the file atomically; return its size in bytes. Raises StoreError."""
        sizes = {name: getattr(self.layout, name) for name in ("layers", "kv_heads", "head_dim")}
        document = {
            "fingerprint": dict(self.fingerprint),
            "model": self.model,
            "layout": {**sizes, "dtype": str(self.layout.dtype).removeprefix("torch.")},
            "layers": self.layers,
            "steps": dict(self.steps),
        }
        return write_container(path, BASIS_KIND, BASIS_FORMAT, document, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"frequencies": self.frequencies}
        for name in ("keys", "values"):
            for index, group in enumerate(getattr(self, name)):
                tensors[f"{name}.{index}.mean"] = group.mean
                tensors[f"{name}.{index}.decode"] = group.decode
                tensors[f"{name}.{index}.encode"] = group.encode
        return tensors


def layer_groups(total: int, size: int) -> list[slice]:
    """Divide `total` layers into groups of `size`, of which the last may be smaller."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def load_basis(path: Path) -> CellBasis:
    """Read a basis and verify every byte of it. Raises StoreError and its kinds."""
    container = read_container(path, BASIS_KIND, BASIS_FORMAT)
    try:
        return _from_saved(container.document, container.tensors)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is corrupt: {error!r} while it was loaded") from error


def _from_saved(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CellBasis:
    layout, layers, steps = layout_of(document["layout"]), document["layers"], document["steps"]
    require(type(layers) is int and 1 <= layers <= layout.layers, f"groups of {layers!r} layers")
    fields, fingerprint = layout_fields(layout).items(), document["fingerprint"]
    require(fields <= fingerprint.items(), "the layout is not that of the model")
    for codec in LOSSY_CODECS:
        step = steps[codec]
        require(isinstance(step, float) and 0 < step < math.inf, f"a step of {step!r}")
    frequencies = tensors["frequencies"]
    shape = layout.layers, layout.head_dim // 2
    require_tensor("frequencies", frequencies, torch.float64, *shape)
    require_finite("frequencies", frequencies)
    groups: dict[str, list[GroupBasis]] = {"keys": [], "values": []}
    for name, members in groups.items():
        for index, group in enumerate(layer_groups(layout.layers, layers)):
            width = (group.stop - group.start) * layout.kv_heads * layout.head_dim
            members.append(_group(f"{name}.{index}", width, tensors))
    return CellBasis(
        fingerprint,
        document["model"],
        layout,
        layers,
        {codec: steps[codec] for codec in LOSSY_CODECS},
        frequencies,
        tuple(groups["keys"]),
        tuple(groups["values"]),
    )


def _group(name: str, width: int, tensors: Mapping[str, Tensor]) -> GroupBasis:
    parts = [tensors[f"{name}.{part}"] for part in ("mean", "decode", "encode")]
    components = parts[1].shape[0]
    require(components <= _MAX_COMPONENTS, f"{components} components")
    require_tensor(f"{name}.mean", parts[0], torch.float32, width)
    require_tensor(f"{name}.decode", parts[1], torch.float16, components, width)
    require_tensor(f"{name}.encode", parts[2], torch.float16, width, components)
    for part in parts:
        require_finite(name, part)
    return GroupBasis(*parts)


def add_basis(basis: CellBasis, is_newest: bool = True) -> Path:
    """Add a basis to those of this machine; return its file. Raises StoreError.

    Earlier ones of the model stay, since files that were coded with them need them. A damaged file
    of the same basis is replaced. is_newest: whether cells are written in it from now on; if not, a
    basis that is new here counts as older than all others.
    """
    path = _folders()[0] / f"{basis.digest}{BASIS_SUFFIX}"
    try:
        make_folder(path.parent)
        is_new = not _is_intact(path)
        if is_new:
            basis.save(path)
        if is_newest or is_new:
            os.utime(path, None if is_newest else (0, 0))
    except OSError as error:
        raise StoreError(f"{path.parent} cannot be written: {error.strerror}") from error
    return path


def newest_basis(fingerprint: Mapping[str, str]) -> CellBasis:
    """Return the newest basis of a model.

    fingerprint: of the model; prefill steps in it do not matter. Raises InvalidArgument without
    one, StoreError if it is damaged. Files whose headers are damaged may be of any model, and are
    skipped.
    """
    wanted = {name: value for name, value in fingerprint.items() if name != "steps"}
    skipped = ""
    for path in _newest_first():
        try:
            document = read_document(path, BASIS_KIND, BASIS_FORMAT)
        except StoreError as error:
            skipped = skipped or f" ({error})"
            continue
        if document.get("fingerprint") == wanted:
            try:
                return _load_cached(path)
            except StoreError as error:
                raise StoreError(f"{error}. For a new basis, {_ADVICE}") from error
    raise InvalidArgument(
        f"the codecs small and smaller need a basis of this model{skipped}; to make one, {_ADVICE}"
    )


def has_basis(fingerprint: Mapping[str, str]) -> bool:
    """Whether a model has a basis on this machine in which cells can be written."""
    try:
        newest_basis(fingerprint)
    except (InvalidArgument, StoreError):
        return False
    return True


def find_basis(digest: str) -> CellBasis:
    """Return the basis that a file names. Raises StoreError if this machine does not have it."""
    paths = [folder / f"{digest}{BASIS_SUFFIX}" for folder in _folders()]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise StoreError(
            f"the cells are coded with basis {digest[:12]}, which is not here: copy "
            f"{paths[0].name} from the folder of bases of the machine that wrote them to "
            f"{paths[0].parent}"
        )
    try:
        return _load_cached(path)
    except StoreError as error:
        raise StoreError(
            f"{error}. Cells are coded with this basis: replace it by a copy from another machine, "
            "or run `kvkeep calibrate --basis-only` on the text that it was made from"
        ) from error


def _multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def forget_cached() -> None:
    """Read bases anew when they are needed next."""
    _load_cached.cache_clear()


def _newest_first() -> list[Path]:
    """Return the files of this machine's bases."""
    dated = list[tuple[float, Path]]()
    for folder in _folders():
        for path in folder.glob(f"*{BASIS_SUFFIX}"):
            with suppress(FileNotFoundError):  # removed meanwhile
                dated.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


def _is_intact(path: Path) -> bool:
    """Whether a file is the basis that it is named after."""
    try:
        return load_basis(path).digest == path.stem
    except StoreError:
        return False


def _folders() -> list[Path]:
    return data_folders("bases")


@lru_cache(maxsize=2)
def _load_cached(path: Path) -> CellBasis:
    """Read a basis that has its digest as its name, by which files name it."""
    basis = load_basis(path)
    if basis.digest != path.stem:
        raise CorruptFile(f"{path} has the digest {basis.digest}, which differs from its name")
    return basis
