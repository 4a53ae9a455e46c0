"""Checkpoint tensors to decoder tensors: names, stacks and the row order of RoPE.

The cache rotates element i of a head with element i + head_dim / 2, for all i (the half layout).
Where a family pairs elements in another way, or rotates a part of each head only, the rows of its
query and key are put in that order:

    stored     0 1 2 3 4 5 6 7    of which 0 1 2 3 are rotated, in adjacent pairs (interleaved)
    decoder    0 2 4 5 1 3 6 7    0 with 1, 2 with 3; 4 with 6 and 5 with 7 at frequency 0

Queries and keys have the same order, so that their dot products do not change. Values keep the
stored order.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import EMBEDDING, FINAL_NORM
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.stacks import (
    expert_name,
    find_stack,
    fused_modules,
    renamed_modules,
    stored_expert_name,
)
from kvkeep.models.weights.value_heads import fused_row_order

_T = TypeVar("_T")  # a tensor, or its shape
_LAYER_TENSOR = re.compile(r"(model\.layers\.\d+\.)(.+)")
# Prefixes of the language model in checkpoints of models that read images, too, and their tensors
# that are not the language model's.
_LANGUAGE_MODEL = r"(model\.language_model|language_model\.model)\."
_LANGUAGE_MODEL_HEAD = r"language_model\.lm_head\."
_OTHER_MODALITIES = re.compile(
    r"(model\.)?(visual|vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio)\..*"
)
# Names in checkpoints of models without a head, such as embedding models.
_WITHOUT_HEAD = re.compile(
    r"(embed_tokens|embeddings|layers|norm|norm_f|embedding_norm|final_layernorm)\..*"
)
_KEY_OR_VALUE = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight")
_GATED_QUERY = re.compile(r"model\.layers\.\d+\.self_attn\.q_proj\.(?:weight|bias)")
_QUERY_OR_KEY = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_(?:proj|norm)\.(?:weight|bias)")


def decoder_shapes(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the result of `decoder_tensors` for tensors of these shapes.

    A stack of another shape than the spec's stays whole, under a name that no decoder has.
    """
    renamed = _with_decoder_names(spec, shapes)
    result: dict[str, tuple[int, ...]] = {}
    used_scales = set()
    for name, shape in renamed.items():
        stack = find_stack(spec, name, shape[1:])
        if (
            stack
            and stack.shape == shape
            and (not stack.scales or renamed.get(stack.scales) == shape[:-1])
        ):
            result |= stack.part_shapes()
            used_scales.add(stack.scales)
        else:
            result[name] = shape
    return {name: shape for name, shape in result.items() if name not in used_scales}


def decoder_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the decoder's names. Only those whose rows change order are copied."""
    renamed = _with_decoder_names(spec, tensors)
    result: dict[str, Tensor] = {}
    for name, tensor in renamed.items():
        if stack := find_stack(spec, name):
            rows = fused_row_order(spec.states, name)
            source = renamed if rows is None else {name: tensor[torch.from_numpy(rows)]}
            result |= stack.split(source, name)
        elif not (spec.clamped_experts and name.endswith("_scales")):
            result[name] = tensor
    for name, tensor in result.items():
        if (order := rope_row_order(spec, name, len(tensor))) is not None:
            result[name] = tensor[order]
    return result


def decoder_names_by_stored_name(spec: ModelSpec) -> dict[str, list[str]]:
    """Return the names of the decoder's tensors that each checkpoint tensor holds, in order."""
    family = FAMILIES[spec.architecture]
    stored_modules = {module: stored for stored, module in renamed_modules(spec).items()}
    for fused_module, modules in fused_modules(spec).items():
        stored_modules |= dict.fromkeys(modules, fused_module)
    decoder_names: dict[str, list[str]] = {}
    for name in tensor_shapes(spec):
        stored_name = _renamed(name, stored_modules)
        if name in (FINAL_NORM, EMBEDDING):
            stored_name = f"{family.final_norm if name == FINAL_NORM else family.embedding}.weight"
        elif stored_name == name:
            stored_name = stored_expert_name(spec, name)
        stored_name = re.sub(r"^model\.", f"{family.base_module}.", stored_name)
        decoder_names.setdefault(stored_name, []).append(name)
    return decoder_names


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return the name of a layer's tensor with its first parts renamed, as many as `names` has."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return name
    parts = match.group(2).split(".")
    for count in range(len(parts), 0, -1):
        if (new := names.get(".".join(parts[:count]))) is not None:
            return match.group(1) + ".".join((new, *parts[count:]))
    return name


def is_text_part(spec: ModelSpec, name: str) -> bool:
    """Whether a checkpoint tensor is the language model's, not for images or audio, nor ignored."""
    family = FAMILIES[spec.architecture]
    if family.ignored_tensors and re.fullmatch(family.ignored_tensors, name):
        return False
    return not (family.multimodal and _OTHER_MODALITIES.fullmatch(name))


def decoder_name(spec: ModelSpec, name: str) -> str:
    """Return the decoder's name of a checkpoint tensor that is neither fused nor a stack."""
    family = FAMILIES[spec.architecture]
    if family.multimodal:
        name = re.sub(f"^{_LANGUAGE_MODEL_HEAD}", "lm_head.", name)
        name = re.sub(f"^{_LANGUAGE_MODEL}", "model.", name)
    if _WITHOUT_HEAD.fullmatch(name):
        name = f"model.{name}"
    name = re.sub(rf"^{family.base_module}\.", "model.", name)
    if name == f"{family.final_norm}.weight":
        return FINAL_NORM
    if name == f"{family.embedding}.weight":
        return EMBEDDING
    return _renamed(expert_name(spec, name), renamed_modules(spec))


def is_unused_kv(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor is for keys or values of a layer that attends to those of an earlier one."""
    match = _KEY_OR_VALUE.fullmatch(name)
    if match is None or int(match.group(1)) >= spec.layers:
        return False
    return spec.kv_source(int(match.group(1))) != int(match.group(1))


def rope_row_order(spec: ModelSpec, name: str, rows: int) -> Tensor | None:
    """Return the stored row of each row of a decoder tensor, `[rows]`; None for the same order."""
    if spec.rope.kind == "proportional":  # stored in the half layout, unrotated pairs as well
        return None
    element_order = _element_order(spec)
    if spec.gated_attention and _GATED_QUERY.fullmatch(name):
        # Stored head by head, each its query's rows and then its gate's.
        stored_rows = torch.arange(rows, dtype=torch.int64, device="cpu")
        queries, gates = stored_rows.view(-1, 2, spec.head_dim).unbind(1)
        return torch.cat((queries[:, element_order], gates)).flatten()
    if not _QUERY_OR_KEY.fullmatch(name) or element_order == list(range(spec.head_dim)):
        return None
    rows_by_head = torch.arange(rows, dtype=torch.int64, device="cpu").view(-1, spec.head_dim)
    return rows_by_head[:, element_order].flatten()


def _element_order(spec: ModelSpec) -> list[int]:
    """Return the stored element of each element of a head in the half layout."""
    # Pairs with frequency 0 are not rotated.
    half, pair_count = spec.head_dim // 2, sum(map(bool, spec.rope.inverse_frequencies))
    rotated, unrotated = list(range(2 * pair_count)), list(range(2 * pair_count, spec.head_dim))
    if FAMILIES[spec.architecture].interleaved_rope:
        first, second = rotated[::2], rotated[1::2]
    else:
        first, second = rotated[:pair_count], rotated[pair_count:]
    return [*first, *unrotated[: half - pair_count], *second, *unrotated[half - pair_count :]]


def _with_decoder_names(spec: ModelSpec, tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Return the language model's tensors by the decoder's names, without unused ones."""
    named = {decoder_name(spec, name): x for name, x in tensors.items() if is_text_part(spec, name)}
    return {name: x for name, x in named.items() if not is_unused_kv(spec, name)}
