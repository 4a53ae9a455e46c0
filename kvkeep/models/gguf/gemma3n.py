"""What a GGUF file says of Gemma 3n alone, as `config.json` says it, and what it calls its tensors.

llama.cpp's converter writes norms as they are, and the matrices of all streams but the first as one
stack of three dimensions. It fills the table of each layer's embeddings up with zeros for tokens of
images and sound, which have those of token 0 in a folder; no text has any of these.
"""

import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.gguf.rope import shortest

LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_STACKS = {"altup_proj": "altup_projections", "altup_unembd_proj": "altup_unembed_projections"}
_STACK = re.compile(rf"({'|'.join(_STACKS)})\.weight")
# llama.cpp's, where a file says nothing.
_LAYERS_WITH_CELLS, _SPARSE_LAYERS, _SPARSITY = 20, 10, 0.95
_TABLE = "per_layer_token_embd.weight"


def gemma3n_config(file: GgufFile) -> dict[str, Any]:
    """Raises BadModelFile where fields are missing or cannot be."""
    rank = file.tensors.get("blk.0.laurel_l.weight")
    if rank is None or _TABLE not in file.tensors:
        raise BadModelFile(
            f"{file.path} lacks blk.0.laurel_l.weight or {_TABLE}, which every Gemma 3n has; fetch "
            "it again"
        )
    return {
        "intermediate_size": _widths(file),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": shortest(
            file.number("gemma3n.final_logit_softcapping", 30.0)  # llama.cpp's, where none is said
        ),
        "num_kv_shared_layers": file.whole(
            "gemma3n.attention.shared_kv_layers",
            max(0, file.layers("gemma3n") - _LAYERS_WITH_CELLS),
        ),
        "altup_num_inputs": file.count("gemma3n.altup.num_inputs", 4),
        "altup_active_idx": file.whole("gemma3n.altup.active_idx", 0),
        "laurel_rank": rank.shape[0],
        "activation_sparsity_pattern": _sparsity(file),
        "hidden_size_per_layer_input": file.count("gemma3n.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.tensors[_TABLE].shape[0],
    }


def streams_apart(tensors: Mapping[str, PackedTensor]) -> dict[str, PackedTensor]:
    """Tensors by their GGUF names, but the matrices of streams each by itself, by the name that it
    has in `weights.tensor_shapes`. Nothing is copied.
    """
    apart: dict[str, PackedTensor] = {}
    for name, tensor in tensors.items():
        stack = _STACK.fullmatch(name)
        if stack is None or len(tensor.shape) != 3:
            apart[name] = tensor
            continue
        for index, data in enumerate(tensor.data):
            one = PackedTensor(tensor.name, tensor.quantisation, tensor.shape[1:], data)
            apart[f"model.{_STACKS[stack.group(1)]}.{index}.weight"] = one
    return apart


def _widths(file: GgufFile) -> int | list[int]:
    """Of MLPs: one of all, or of each layer."""
    key = "gemma3n.feed_forward_length"
    if not isinstance(file.required(key), list):
        return file.count(key)
    each = file.integers(key)
    return each[0] if each and len(set(each)) == 1 else each


def _sparsity(file: GgufFile) -> list[float]:
    """Of each layer. The file has standard deviations in the place of shares, and minus infinity of
    layers that are not sparse. Where it says nothing, the first ten are sparse, as in llama.cpp.
    """
    key = "gemma3n.activation_sparsity_scale"
    if file.has(key):
        return [_share(each) for each in file.numbers(key)]
    layers = file.layers("gemma3n")
    return [_SPARSITY if layer < _SPARSE_LAYERS else 0.0 for layer in range(layers)]


def _share(deviations: float) -> float:
    """The share of a normal distribution that is below, by the shortest decimal that gives it."""
    share = NormalDist().cdf(deviations)
    for digits in range(1, 9):
        short = round(share, digits)
        if 0 < short < 1 and abs(NormalDist().inv_cdf(short) - deviations) < 1e-6:
            return short
    return share
