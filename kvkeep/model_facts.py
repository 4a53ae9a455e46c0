"""Facts about a model from its files: architecture, compute path on this machine, memory."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.compiled.chunk import supports_attention
from kvkeep.compiled.decoder import unsupported_reason
from kvkeep.compiled.products import products_reason, prompt_products
from kvkeep.errors import InvalidArgument, ModelNotFound
from kvkeep.executors import compute_path_of
from kvkeep.model import DTYPES
from kvkeep.models.hub.names import split_prefix
from kvkeep.models.hub.source import local_folder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import EMBEDDING, LM_HEAD
from kvkeep.models.spec.cells import UNDO_TOKENS, group_layout
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import LayerGroup, ModelSpec
from kvkeep.models.weights.checkpoint import decoder_shapes, is_text_part
from kvkeep.models.weights.packed import WEIGHT_FORMATS, converted_file, quantised_formats
from kvkeep.models.weights.packed_file import read_packed
from kvkeep.models.weights.packing import PackedMatrix, format_name, packed_shapes
from kvkeep.models.weights.tensors import check_tensors, matrix_shapes, read_shapes, step_matrices

CELL_BITS = (None, "8", "8/4", "4")  # of keys and values; None for those of the dtype


@dataclass(frozen=True)
class GroupFacts:
    """A group of layers that attend alike."""

    layers: int
    unrotated: int  # layers without RoPE
    shared: int  # layers that attend to another layer's cells and have none
    kv_heads: int
    head_dim: int
    window: int | None  # tokens that each layer sees; None for all
    cell_bytes: int  # bytes of one token in all of the layers, unquantised


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model on this machine: the JSON keys of `kvkeep models show --json`."""

    name: str
    folder: str
    architecture: str
    layers: int
    heads: int  # query heads of a layer
    kv_heads: int  # of the first group, as is head_dim
    head_dim: int
    hidden_size: int
    vocabulary: int  # tokens
    groups: tuple[GroupFacts, ...]  # layers that see everything first
    state_layers: int  # layers that keep a state instead of cells
    mlp_layers: int  # layers with an MLP, or experts, and nothing else
    state_bytes: int  # bytes of a session's states
    checkpoint_bytes: int  # bytes of one checkpoint: of states, and of full windows
    trained: int  # the context length, in tokens
    rope: str  # the kind of its scaling, such as "llama3"
    dtype: str  # of weights and cells
    parameters: int
    parameters_per_token: int  # parameters that one token is computed with
    experts: int  # of each of the `sparse_layers`
    experts_per_token: int  # experts that a token goes through in each of them
    sparse_layers: int
    weight_bytes: int  # bytes of all parameters in `dtype`
    weight_bytes_held: int  # bytes of all weights as held, memory-mapped and packed ones included
    formats: dict[str, int]  # count of matrices that a decode step reads, by format
    bytes_per_token: int  # bytes of weights that a decode step reads
    decode: str  # how a decode step is computed
    prefill: str  # how the matrix products of a prompt are computed
    attention: str  # how the attention of a prompt is computed
    thousand_cells: dict[str, int]  # bytes of 1,000 cells of the first group, by bits
    full_cells: int  # bytes of the cells of `trained` tokens


def model_facts(name: str, dtype: str = "bfloat16", weights: str | None = None) -> ModelFacts:
    """Return facts about a model from its config and the headers of its files.

    name, dtype, weights: as for `load_model`. Raises ModelNotFound if the model is not on this
    machine, BadModelFile, UnsupportedModel, and InvalidArgument without kernels for packed weights.
    """
    dtype = validation.one_of("dtype", dtype, DTYPES)
    folder = _find_folder(name)
    spec, converted_path = read_spec(folder), converted_file(folder)
    if converted_path is None:
        shapes_read = read_shapes(folder, partial(is_text_part, spec))
        check_tensors(spec, decoder_shapes(spec, shapes_read), folder)
    layout = group_layout(spec, spec.groups[0], DTYPES[dtype], torch.device("cpu"))
    groups = tuple(_group_facts(spec, group, DTYPES[dtype]) for group in spec.groups)
    limitation, itemsize = unsupported_reason(spec, layout), layout.dtype.itemsize
    uses_kernels = not limitation or not products_reason(spec, layout)
    layouts = [group_layout(spec, group, DTYPES[dtype], layout.device) for group in spec.groups]
    attends_by_kernels = uses_kernels and all(map(supports_attention, layouts))
    if weights is not None:
        weights = validation.one_of("weights", weights, WEIGHT_FORMATS)
        if weights != "bf16" and limitation:
            raise InvalidArgument(f'weights="{weights}" needs compiled kernels, which {limitation}')
    products_text = str(prompt_products()) if uses_kernels else dtype
    parameters = sum(map(prod, tensor_shapes(spec).values()))
    state_bytes = spec.states.nbytes(layout.dtype) if spec.states else 0
    sparse_layers = sum(map(spec.has_experts, range(spec.layers)))
    names_read, shapes = step_matrices(spec), matrix_shapes(spec)
    reads_file_format = not weights and uses_kernels
    bytes_held, formats_and_bytes = _held_bytes_and_formats(
        spec, layout.dtype, weights, converted_path if reads_file_format else None
    )
    matrices_read = [formats_and_bytes[name] for name in names_read]
    unread_names = set(shapes) - set(names_read)
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
        state_layers=len(spec.states.layers) if spec.states else 0,
        mlp_layers=len(spec.mlp_layers or ()),
        state_bytes=state_bytes,
        checkpoint_bytes=state_bytes
        + sum(x.cell_bytes * (x.window + UNDO_TOKENS) for x in groups if x.window is not None),
        trained=spec.max_positions,
        rope=spec.rope.kind,
        dtype=dtype,
        parameters=parameters,
        parameters_per_token=parameters - sum(prod(shapes[name]) for name in unread_names),
        experts=spec.experts if sparse_layers else 0,
        experts_per_token=spec.experts_per_token if sparse_layers else 0,
        sparse_layers=sparse_layers,
        weight_bytes=itemsize * parameters,
        weight_bytes_held=bytes_held,
        formats=dict(sorted(Counter(matrix_format for matrix_format, _ in matrices_read).items())),
        bytes_per_token=sum(nbytes for _, nbytes in matrices_read),
        decode=str(compute_path_of(spec, layout)),
        prefill=f"torch in {products_text}",
        attention="compiled kernels" if attends_by_kernels else "torch",
        thousand_cells={
            f"{bits or 8 * itemsize} bits": 1000 * Bits(bits).layouts(layout)[0].cell_bytes
            for bits in CELL_BITS
        },
        full_cells=sum(  # layers with a window keep a few cells more, for rewinds
            group.cell_bytes
            * min(spec.max_positions, (group.window or spec.max_positions) + UNDO_TOKENS)
            for group in groups
        ),
    )


def _find_folder(name: str) -> Path:
    """Return the folder of a model on this machine. Raises ModelNotFound, InvalidArgument."""
    if split_prefix(name)[0]:
        raise InvalidArgument(
            f"{name} runs through transformers: its facts are known only after it is loaded, not "
            "from its files"
        )
    folder = local_folder(name)
    if folder is None and Path(name).expanduser().is_file():
        raise ModelNotFound(f"{name!r} is not converted yet: convert it with `kvkeep pull {name}`")
    if folder is None:
        raise ModelNotFound(
            f"{name!r} is not among the models on this machine (`kvkeep models` lists them): fetch "
            f"it with `kvkeep pull {name}`"
        )
    return folder


def _group_facts(spec: ModelSpec, group: LayerGroup, dtype: torch.dtype) -> GroupFacts:
    layout = group_layout(spec, group, dtype, torch.device("cpu"))
    return GroupFacts(
        layers=len(group.layers),
        unrotated=len(set(group.layers) & set(spec.unrotated_layers)),
        shared=len(group.layers) - layout.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        window=group.window,
        cell_bytes=layout.cell_bytes,
    )


def _held_bytes_and_formats(
    spec: ModelSpec, dtype: torch.dtype, weight_format: str | None, converted_path: Path | None
) -> tuple[int, dict[str, tuple[str, int]]]:
    """Return the bytes of all weights held, and the format and bytes of each matrix.

    weight_format: "int8" and "int4" add packed copies of matrices; the routers of experts stay in
    `dtype`. converted_path: of a model whose matrices are read as they are; norms become bfloat16.
    """
    shapes = matrix_shapes(spec)
    if converted_path is not None:
        stored = read_packed(converted_path, tensor_shapes(spec))
        bytes_held = sum(
            weight.nbytes
            if isinstance(weight, PackedMatrix) or weight.dim() > 1
            else 2 * len(weight)
            for weight in stored.values()
        )
        if spec.tied_head:
            stored[LM_HEAD] = stored[EMBEDDING]
        stored_matrices = [(name, stored[name]) for name in shapes]
        return bytes_held, {name: (format_name(x), x.nbytes) for name, x in stored_matrices}
    bytes_held = dtype.itemsize * sum(map(prod, tensor_shapes(spec).values()))
    plain_format = str(dtype).removeprefix("torch.")
    sizes = {name: (plain_format, dtype.itemsize * prod(shape)) for name, shape in shapes.items()}
    if weight_format in ("int8", "int4"):
        quantised = {
            name: (packing.name, sum(map(prod, packed_shapes(packing, *shapes[name]))))
            for name, packing in quantised_formats(spec, weight_format).items()
        }
        bytes_held += sum(nbytes for _, nbytes in quantised.values())
        sizes |= quantised
    return bytes_held, sizes
