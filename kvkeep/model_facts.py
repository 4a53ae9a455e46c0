"""What a model is, how it is computed on this machine, and the memory that it takes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.compiled.decoder import obstacle, prompts_in
from kvkeep.compute_path import path_of
from kvkeep.errors import InvalidArgument, ModelNotFound
from kvkeep.loader import BY_TRANSFORMERS
from kvkeep.model import DTYPES
from kvkeep.models.hub.source import here
from kvkeep.models.spec.cells import UNDO, layout_of
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import LayerGroup, ModelSpec
from kvkeep.models.weights.checkpoint import decoder_shapes
from kvkeep.models.weights.packed import WEIGHTS, converted_file, rounded_formats
from kvkeep.models.weights.packed_file import read_packed
from kvkeep.models.weights.packing import PackedMatrix, format_name, packed_shapes
from kvkeep.models.weights.tensors import (
    EMBEDDING,
    HEAD,
    check_tensors,
    matrices,
    matrices_per_token,
    read_shapes,
    tensor_shapes,
)

KINDS = (None, "8", "8/4", "4")  # of cells


@dataclass(frozen=True)
class GroupFacts:
    """Layers that attend alike.

    layers: how many. unrotated: of them, without RoPE. shared: of them, that look at another's
    cells and keep none. window: tokens that each sees; None for all. cell_bytes: of one token in
    all of them, as it is evaluated.
    """

    layers: int
    unrotated: int
    shared: int
    kv_heads: int
    head_dim: int
    window: int | None
    cell_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """layers ... trained: as in `ModelSpec`. dtype: of weights and cells.

    groups: of the layers, those that see everything first; head_dim and kv_heads are theirs.

    sparse_layers: how many have experts, of which a token goes through experts_per_token.
    parameters_per_token: those that it is computed with. formats: how many matrices a written token
    reads in each format. bytes_per_token: all of them.
    decode, prefill, attention: who computes a written token; the products, and the attention, of a
    prompt. weight_bytes_held: mapped, packed ones included. thousand_cells: bytes of so many in the
    layers that see everything, by the number of bits. full_cells: bytes of as many tokens as the
    model was trained for, of which local layers keep their window and a little more.
    """

    name: str
    folder: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocabulary: int
    groups: tuple[GroupFacts, ...]
    trained: int
    rope: str
    dtype: str
    parameters: int
    parameters_per_token: int
    experts: int
    experts_per_token: int
    sparse_layers: int
    weight_bytes: int
    weight_bytes_held: int
    formats: dict[str, int]
    bytes_per_token: int
    decode: str
    prefill: str
    attention: str
    thousand_cells: dict[str, int]
    full_cells: int


def model_facts(name: str, dtype: str = "bfloat16", weights: str | None = None) -> ModelFacts:
    """What is known of a model on this machine, from its config and the headers of its files.

    weights: as of `load_model`. Raises ModelNotFound for a model that is not here, BadModelFile and
    UnsupportedModel as `load_model`, InvalidArgument for packed weights that nothing here reads.
    """
    dtype = validation.one_of("dtype", dtype, DTYPES)
    if name.startswith(BY_TRANSFORMERS):
        raise InvalidArgument(
            f"{name} is computed by transformers: kvkeep knows of it once it is loaded, and not "
            "from its files"
        )
    folder = here(name)
    if folder is None:
        raise ModelNotFound(
            f"{name!r} is none of the models that were fetched or converted here (`kvkeep models` "
            f"lists them): `kvkeep pull {name}` does that, if it is one"
        )
    spec = read_spec(folder)
    own = converted_file(folder)
    if own is None:
        check_tensors(spec, decoder_shapes(spec, read_shapes(folder)), folder)
    cpu = torch.device("cpu")
    layout = layout_of(spec, spec.groups[0], DTYPES[dtype], cpu)
    groups = tuple(_group(spec, group, DTYPES[dtype]) for group in spec.groups)
    against, size = obstacle(spec, layout), layout.dtype.itemsize
    parameters = sum(prod(shape) for shape in tensor_shapes(spec).values())
    sparse_layers = sum(map(spec.is_sparse, range(spec.layers)))
    if weights is not None:
        weights = validation.one_of("weights", weights, WEIGHTS)
        if weights != "bf16" and against:
            raise InvalidArgument(
                f'weights="{weights}" is read by compiled kernels, which {against}'
            )
    names, by_a_token = matrices_per_token(spec), size * _numbers(spec, matrices_per_token(spec))
    read = _Read(dict.fromkeys(names, dtype), size * parameters, by_a_token)
    if weights in ("int8", "int4"):
        read = _rounded(spec, weights, read)
    elif own is not None and not weights and not against:
        read = _as_in_the_file(spec, own)
    plain = f"{8 * size} bits"
    cells = {
        plain if kind is None else f"{kind} bits": 1000 * Bits(kind).layouts(layout)[0].cell_bytes
        for kind in KINDS
    }
    return ModelFacts(
        name=name,
        folder=str(folder),
        architecture=spec.architecture,
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        vocabulary=spec.vocab_size,
        groups=groups,
        trained=spec.max_positions,
        rope=spec.rope.kind,
        dtype=dtype,
        parameters=parameters,
        parameters_per_token=parameters - _numbers(spec, set(matrices(spec)) - set(names)),
        experts=spec.experts if sparse_layers else 0,
        experts_per_token=spec.experts_per_token if sparse_layers else 0,
        sparse_layers=sparse_layers,
        weight_bytes=size * parameters,
        weight_bytes_held=read.held,
        formats=dict(sorted(Counter(read.formats.values()).items())),
        bytes_per_token=read.by_a_token,
        decode=str(path_of(spec, layout)),
        prefill=f"torch in {dtype if against else str(prompts_in()).removeprefix('torch.')}",
        attention="torch" if against else "compiled kernels",
        thousand_cells=cells,
        full_cells=sum(
            each.cell_bytes * min(spec.max_positions, (each.window or spec.max_positions) + UNDO)
            for each in groups
        ),
    )


def _group(spec: ModelSpec, group: LayerGroup, dtype: torch.dtype) -> GroupFacts:
    layout = layout_of(spec, group, dtype, torch.device("cpu"))
    return GroupFacts(
        layers=len(group.layers),
        unrotated=len(set(group.layers) & set(spec.unrotated_layers)),
        shared=len(group.layers) - layout.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        window=group.window,
        cell_bytes=layout.cell_bytes,
    )


@dataclass(frozen=True)
class _Read:
    """formats: of each matrix that a token reads. held, by_a_token: bytes in memory, and read."""

    formats: dict[str, str]
    held: int
    by_a_token: int


def _numbers(spec: ModelSpec, names: Iterable[str]) -> int:
    shapes = matrices(spec)
    return sum(prod(shapes[name]) for name in names)


def _rounded(spec: ModelSpec, weights: str, plain: _Read) -> _Read:
    """Beside what is held plain; routers are read from there."""
    formats, shapes = rounded_formats(spec, weights), matrices(spec)
    sizes = {
        name: sum(map(prod, packed_shapes(kind, *shapes[name]))) for name, kind in formats.items()
    }
    size = plain.held // sum(map(prod, tensor_shapes(spec).values()))
    read = {
        name: sizes[name] if name in sizes else size * prod(shapes[name]) for name in plain.formats
    }
    kinds = {name: formats[name].name if name in formats else plain.formats[name] for name in read}
    return _Read(kinds, plain.held + sum(sizes.values()), sum(read.values()))


def _as_in_the_file(spec: ModelSpec, own: Path) -> _Read:
    found = read_packed(own, tensor_shapes(spec))
    held = sum(
        matrix.nbytes if isinstance(matrix, PackedMatrix) or matrix.dim() > 1 else 2 * len(matrix)
        for matrix in found.values()
    )
    by_name = {
        name: found[EMBEDDING if name == HEAD and spec.tied_head else name]
        for name in matrices_per_token(spec)
    }
    names = {name: format_name(matrix) for name, matrix in by_name.items()}
    return _Read(names, held, sum(matrix.nbytes for matrix in by_name.values()))
