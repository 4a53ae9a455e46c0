"""A GGUF file taken over once, matrix by matrix as it packs them; later starts only map a file."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from kvkeep.models.gguf.config import config_from_gguf, eos_token_ids
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.gguf.names import weights_of
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.gguf.vocabulary import special_token
from kvkeep.models.spec.config import spec_from_config
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.checkpoint import (
    decoder_name,
    decoder_shapes,
    fused_part,
    rope_row_order,
)
from kvkeep.models.weights.formats import FORMATS, Format
from kvkeep.models.weights.packed import converted_path
from kvkeep.models.weights.packed_file import StoredMatrix, write_packed
from kvkeep.models.weights.packing import BLOCK, Matrix, from_gguf, pack, packable
from kvkeep.models.weights.tensors import check_tensors, tensor_shapes
from kvkeep.storage.files.atomic import write_atomic

_AT_ONCE = 1 << 24  # weights that are taken over at a time
_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def convert(gguf: Path, folder: Path, progress: bool) -> None:
    """Write the model in a GGUF file to `folder`: its tensors, config, tokenizer, template.

    Everything is checked before `folder` is made. Memory: one chunk of rows, not the model. Warns
    of a format that there are no kernels for: its matrices are unpacked to bfloat16.

    Raises BadModelFile, UnsupportedModel.
    """
    file = GgufFile.open(gguf)
    config = config_from_gguf(file)
    spec = spec_from_config(config, {}, gguf)
    tensors = weights_of(file, spec.architecture)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(spec, decoder_shapes(spec, shapes), gguf)
    tokenizer = build_tokenizer(file)
    template = file.text("tokenizer.chat_template", "")

    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(converted_path(folder), tensors, spec, progress)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(file))
    eos = eos_token_ids(file)
    if eos:
        _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    if template:
        write_atomic(folder / "chat_template.jinja", template.encode())
    _write_json(folder / "config.json", config)


def row_order(name: str, tensor: PackedTensor, spec: ModelSpec) -> NDArray[np.int64] | slice:
    """Which stored row each row of the Hugging Face tensor is.

    For Llama, Mistral, Mixtral, Granite and SmolLM3, GGUF lays the two halves of each rotated pair
    side by side; Hugging Face keeps all first halves, then all second ones. Other families are
    stored as they are: GLM-4's pairs lie side by side in both.
    """
    rotated = re.search(r"self_attn\.([qk])_proj\.", name)
    if rotated is None or spec.architecture not in _SIDE_BY_SIDE:
        return slice(None)
    heads = spec.heads if rotated.group(1) == "q" else spec.kv_heads
    pairs = np.arange(tensor.shape[0], dtype=np.int64).reshape(heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


_SIDE_BY_SIDE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "GraniteForCausalLM",
    "MixtralForCausalLM",
    "GraniteMoeForCausalLM",
    "SmolLM3ForCausalLM",
)


def _write_weights(
    path: Path, tensors: Mapping[str, PackedTensor], spec: ModelSpec, progress: bool
) -> None:
    """All tensors in the formats that they have, as far as there are kernels for them."""
    sources, shapes = _sources(tensors, spec), tensor_shapes(spec)
    stored = {name: StoredMatrix(_kind(of), shapes[name]) for name, (of, _) in sources.items()}
    unpacked = {
        sources[name][0].quantisation
        for name, one in stored.items()
        if one.kind is torch.bfloat16 and sources[name][0].quantisation != "BF16"
    }
    if unpacked:
        warnings.warn(
            f"there are no kernels for {', '.join(sorted(unpacked))}: matrices of the model in "
            "such a format are unpacked to bfloat16 and take more memory and time; a Q4_K_M, "
            "Q5_K_M, Q6_K or Q8_0 file of the model is read as it is",
            RuntimeWarning,
            stacklevel=2,
        )
    bar = tqdm(
        total=sum(tensor.data.nbytes for tensor in tensors.values()),
        desc="taking the model over",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    )

    def taken(name: str) -> Iterator[Matrix]:
        tensor, rows = sources[name]
        for some in _some_of(rows, tensor):
            yield _taken(tensor, stored[name].kind, some, _added(spec, name))
            bar.update(tensor.data.nbytes * len(some) // tensor.shape[0])

    with bar:
        write_packed(path, stored, {name: taken(name) for name in stored})


def _kind(tensor: PackedTensor) -> Format | torch.dtype:
    """What a tensor is stored as."""
    kind = FORMATS.get(tensor.quantisation)
    if kind and len(tensor.shape) == 2 and packable(kind, *tensor.shape):
        return kind
    return _PLAIN.get(tensor.quantisation, torch.bfloat16)


def _some_of(rows: NDArray[np.int64], tensor: PackedTensor) -> Iterator[NDArray[np.int64]]:
    """Which stored rows come next, whole blocks of them."""
    of_one = max(1, int(np.prod(tensor.shape[1:])))
    step = max(BLOCK, _AT_ONCE // of_one // BLOCK * BLOCK)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _sources(
    tensors: Mapping[str, PackedTensor], spec: ModelSpec
) -> dict[str, tuple[PackedTensor, NDArray[np.int64]]]:
    """Of each of the decoder's tensors the one that it is or is in, and which of its rows."""
    named = {decoder_name(spec, name): tensor for name, tensor in tensors.items()}
    found = {}
    for name in tensor_shapes(spec):
        part = None if name in named else fused_part(spec, name)
        source = part[0] if part else name
        if source in named:
            order = row_order(source, named[source], spec)
            rows = np.arange(named[source].shape[0], dtype=np.int64)[order]
            rows = rows[part[1]] if part else rows
            half = rope_row_order(spec, name, len(rows))
            found[name] = named[source], rows if half is None else rows[half.numpy()]
    return found


def _taken(
    tensor: PackedTensor, kind: Format | torch.dtype, rows: NDArray[np.int64], added: float
) -> Matrix:
    """added: what the file has too much."""
    if isinstance(kind, Format):
        return pack(from_gguf(kind, torch.from_numpy(tensor.data[rows])))
    unpacked = torch.from_numpy(tensor.unpack(rows))
    return (unpacked - added if added else unpacked).to(kind)


def _added(spec: ModelSpec, name: str) -> float:
    """GGUF has norms as they are multiplied by: in float32 nothing is lost by taking 1 off."""
    return 1.0 if spec.unit_norms and name.endswith("norm.weight") else 0.0


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    roles |= {"eot": "eot_token", "eom": "eom_token"}
    tokens = {key: special_token(file, role) for role, key in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{key: token for key, token in tokens.items() if token is not None},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode())
