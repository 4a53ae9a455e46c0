"""`load_model`: loads a model by name, to be computed by kvkeep or by transformers."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.compiled.decoder import unsupported_reason
from kvkeep.compiled.products import products_reason, prompt_row_bits
from kvkeep.errors import InvalidArgument, ModelError
from kvkeep.executors import new_decoder, slow_path_message, warn_of_slow_path
from kvkeep.model import DTYPES, Model, resolve_device
from kvkeep.models.hub.names import split_prefix
from kvkeep.models.hub.source import DEFAULT_MODEL, resolve
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.spec.cells import group_layout
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.state_layers import is_float32_weight
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.checkpoint import decoder_shapes, decoder_tensors, is_text_part
from kvkeep.models.weights.packed import (
    WEIGHT_FORMATS,
    converted_file,
    load_converted,
    load_quantised,
    load_unpacked,
)
from kvkeep.models.weights.packing import Matrix, PackedMatrix
from kvkeep.models.weights.tensors import check_head, check_tensors, read_shapes, read_tensors
from kvkeep.runtime.cpu import limit_torch_threads
from kvkeep.runtime.memory import trim_memory
from kvkeep.types import DtypeName, WeightFormat

if TYPE_CHECKING:
    from kvkeep.integrations.transformers import TransformersModel


def load_model(
    model: str = DEFAULT_MODEL,
    *,
    dtype: DtypeName = "bfloat16",
    device: str = "cpu",
    weights: WeightFormat | None = None,
    progress: bool = False,
) -> Model:
    """Load a model, pulling or converting it first if that was not done before.

    Args:
        model: a known or added name, a GGUF file, a local Hugging Face folder, or a hub id; or
            "transformers:" and such a folder, for architectures that kvkeep does not compute.
        dtype: "bfloat16" or "float32", of weights and cells.
        device: any torch device.
        weights: the format in which a decode step reads them: "bf16", "int8" or "int4". Weights
            of another format are unpacked or rounded. None for that of the model's file: packed
            matrices of a GGUF file are then held in no other form. Prompts are multiplied by
            weights in `dtype`, or as integers where that is faster.
        progress: show progress bars on standard error.

    Warns with SlowPathWarning, once per process, if another processor, or kernels that were not
    built, would compute it faster; `Model.path` says how it is computed.

    Raises ModelNotFound, BadModelFile and UnsupportedModel, and InvalidArgument for an unknown
    dtype, a device that is not there, packed weights without compiled kernels for them, or a
    wrong value of an environment variable that selects kernels or the bits of prompts' rows.
    """
    name = str(validation.path("model", model))
    prompt_row_bits()  # a wrong value is refused before anything is fetched
    prefix, source = split_prefix(name)
    if prefix:
        if weights is not None:
            raise InvalidArgument(
                f"weights={weights!r} needs kvkeep's own executors, and {name} runs through "
                "transformers: leave weights out"
            )
        return _load_by_transformers(name, source, dtype, device, progress)
    dtype = validation.one_of("dtype", dtype, DTYPES)
    limit_torch_threads()
    torch_device, progress = resolve_device(device), validation.flag("progress", progress)
    folder = resolve(name, progress)
    spec = read_spec(folder)
    if weights is not None:
        weights = validation.one_of("weights", weights, WEIGHT_FORMATS)
    codec = TextCodec.open(folder)
    decoder = _load_decoder(folder, spec, DTYPES[dtype], torch_device, weights, progress)
    loaded_model = Model(name, folder, decoder, codec)
    _ = loaded_model.suppressed_tokens  # read while the folder is there
    warn_of_slow_path(slow_path_message(loaded_model.path))
    trim_memory()  # reading a tokenizer leaves as much free memory as it takes
    return loaded_model


def _load_by_transformers(
    name: str, source: str, dtype: DtypeName, device: str, progress: bool
) -> "TransformersModel":
    """Load "transformers:FOLDER". source: the folder. Raises ModelError without transformers."""
    try:
        from kvkeep.integrations.transformers.model import load_pretrained
    except ImportError as error:
        raise ModelError(
            f'{name} runs through transformers: pip install "kvkeep[transformers]" ({error})'
        ) from error
    return load_pretrained(name, source, dtype, device, progress)


def _load_decoder(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat | None,
    progress: bool,
) -> Decoder:
    """Load a model's weights: from its GGUF file as converted by `pull`, or from safetensors."""
    layout = group_layout(spec, spec.groups[0], dtype, device)
    has_kernels = not unsupported_reason(spec, layout)
    reads_packed = has_kernels or not products_reason(spec, layout)
    converted_path, packed = converted_file(folder), dict[str, Matrix]()
    if converted_path is None:
        tensors = _read_tensors(folder, spec, dtype, device, progress)
    else:
        stored_weights = load_converted(converted_path, spec)
        if weight_format or not reads_packed:
            unpacked = load_unpacked(converted_path, spec, stored_weights, dtype, progress)
            tensors = {name: tensor.to(device) for name, tensor in unpacked.items()}
        else:
            tensors, packed = _split_stored(stored_weights, dtype)
    if weight_format in ("int8", "int4"):
        if not has_kernels:
            raise InvalidArgument(
                f'weights="{weight_format}" needs compiled kernels, and there are none for this '
                'model, dtype, device and processor: use weights="bf16"'
            )
        packed = load_quantised(folder, spec, weight_format, tensors, progress)
    return new_decoder(spec, tensors, packed)


def _read_tensors(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: bool
) -> dict[str, Tensor]:
    """Read the tensors of the language model from safetensors files, checked against `spec`."""
    is_wanted = partial(is_text_part, spec)
    check_tensors(spec, decoder_shapes(spec, read_shapes(folder, is_wanted)), folder)
    all_tensors = read_tensors(folder, dtype, device, progress, is_wanted)
    tensors = decoder_tensors(spec, all_tensors)
    check_head(spec, tensors, folder)
    return tensors


def _split_stored(
    weights: dict[str, Matrix], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Matrix]]:
    """Split a converted model into tensors of the dtype, and matrices in other formats."""
    tensors, packed = dict[str, Tensor](), dict[str, Matrix]()
    for name, weight in weights.items():
        if isinstance(weight, PackedMatrix) or (weight.dim() == 2 and weight.dtype != dtype):
            packed[name] = weight
        else:
            tensors[name] = weight.to(torch.float32 if is_float32_weight(name) else dtype)
    return tensors, packed
