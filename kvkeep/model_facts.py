"""What a model is, how it is computed on this machine, and the memory that it takes."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from kvkeep import arguments
from kvkeep.cache import Bits, Layout
from kvkeep.compiled.decoder import obstacle
from kvkeep.errors import InvalidArgument, ModelNotFound
from kvkeep.model import DTYPES
from kvkeep.models.checkpoint import decoder_shapes
from kvkeep.models.config import read_spec
from kvkeep.models.packed import WEIGHTS, matrices, packed_path, read_packed, stored
from kvkeep.models.packing import MatrixBits, packed_shapes
from kvkeep.models.source import here
from kvkeep.models.spec import ModelSpec
from kvkeep.models.weights import HEAD, check_tensors, read_shapes, tensor_shapes

KINDS = (None, "8", "8/4", "4")  # of cells


@dataclass(frozen=True)
class ModelFacts:
    """layers ... trained: as in `ModelSpec`. dtype: of weights and cells.

    formats: how many matrices a written token reads in each format. bytes_per_token: all of them.
    decode, prefill, attention: who computes a written token; the products, and the attention, of a
    prompt. weight_bytes_held: mapped, packed ones included. thousand_cells: bytes, by the number of
    bits. full_cells: bytes of as many cells as the model was trained for.
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
    trained: int
    rope: str
    dtype: str
    parameters: int
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
    dtype = arguments.one_of("dtype", dtype, DTYPES)
    folder = here(name)
    if folder is None:
        raise ModelNotFound(
            f"{name!r} is none of the models that were fetched or converted here (`kvkeep models` "
            f"lists them): `kvkeep pull {name}` does that, if it is one"
        )
    spec = read_spec(folder)
    check_tensors(spec, decoder_shapes(spec, read_shapes(folder)), folder)
    cpu = torch.device("cpu")
    layout = Layout(spec.layers, spec.kv_heads, spec.head_dim, DTYPES[dtype], cpu)
    against, size = obstacle(spec, layout), layout.dtype.itemsize
    shapes = tensor_shapes(spec).values()
    parameters = sum(prod(shape) for shape in shapes)
    formats, read, packed = _formats(folder, spec, weights, dtype, against)
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
        trained=spec.max_positions,
        rope=spec.rope.kind,
        dtype=dtype,
        parameters=parameters,
        weight_bytes=size * parameters,
        weight_bytes_held=size * parameters + packed,
        formats=formats,
        bytes_per_token=read,
        decode=f"torch: the compiled kernels {against}" if against else "compiled kernels",
        prefill=f"torch in {dtype}",
        attention="torch" if against else "compiled kernels",
        thousand_cells=cells,
        full_cells=spec.max_positions * layout.cell_bytes,
    )


def _formats(
    folder: Path, spec: ModelSpec, weights: str | None, dtype: str, against: str
) -> tuple[dict[str, int], int, int]:
    """How many matrices a token reads in each format, and the bytes: of all, and of packed ones."""
    chosen = stored(folder) if weights is None else arguments.one_of("weights", weights, WEIGHTS)
    names = matrices(spec)
    if chosen == "bf16" or against:
        if chosen != "bf16" and weights is not None:
            raise InvalidArgument(
                f'weights="{weights}" is read by compiled kernels, which {against}'
            )
        numbers = sum(rows * columns for rows, columns in names.values())
        return {dtype: len(names)}, numbers * DTYPES[dtype].itemsize, 0
    bits: dict[str, MatrixBits] = dict.fromkeys(names, 4 if chosen == "int4" else 8)
    bits[HEAD] = 8
    if packed_path(folder, chosen).exists():  # as the model's own file has it
        found = read_packed(packed_path(folder, chosen), spec)
        bits = {name: matrix.bits for name, matrix in found.items()}
    sizes = [packed_shapes(bits[name], *shape) for name, shape in names.items()]
    total = sum(prod(data) + 2 * prod(scales) for data, scales in sizes)
    count = Counter(f"int{number}" for number in bits.values())
    return dict(sorted(count.items())), total, total
