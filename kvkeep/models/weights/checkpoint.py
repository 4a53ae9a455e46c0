"""From a checkpoint's tensors to those that the decoder computes with: names, parts and rows."""

import re
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.fused import part_of, separated, separated_shapes
from kvkeep.models.weights.rows import arranged
from kvkeep.models.weights.stored_experts import (
    expert_name,
    stored_expert_name,
    unstacked,
    unstacked_shapes,
)
from kvkeep.models.weights.tensors import tensor_shapes

_T = TypeVar("_T")
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)(\.(?:weight|bias))")
# Of a model that reads images, too: its language model where that is told apart by name, and what
# makes its images embeddings.
_LANGUAGE_MODEL = r"(model\.language_model|language_model\.model)\."
_HEAD = r"language_model\.lm_head\."
_IMAGES = re.compile(
    r"(model\.)?(visual|vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio)\..*"
)
_CELLS = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight")


def decoder_shapes(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Name and shape of what `decoder_tensors` makes of tensors of these shapes."""
    return separated_shapes(spec, unstacked_shapes(spec, _named(spec, shapes)))


def decoder_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors by the names that `weights.tensor_shapes` has, their shapes checked.

    Nothing is copied but rows that come in another order.
    """
    return arranged(spec, separated(spec, unstacked(spec, _named(spec, tensors))))


def stored_parts(spec: ModelSpec) -> dict[str, list[str]]:
    """Which of the decoder's tensors each of a checkpoint's is: one, or several in their order."""
    theirs = {ours: name for name, ours in FAMILIES[spec.architecture].renamed.items()}
    found: dict[str, list[str]] = {}
    for name in tensor_shapes(spec):
        part, layer = part_of(spec, name), _LAYER.fullmatch(name)
        if part:
            stored = part[0]
        elif layer and layer.group(2) in theirs:
            stored = f"{layer.group(1)}{theirs[layer.group(2)]}{layer.group(3)}"
        else:
            stored = stored_expert_name(spec, name)
        found.setdefault(stored, []).append(name)
    return found


def is_text(spec: ModelSpec, name: str) -> bool:
    """Whether a checkpoint's tensor is of the language model."""
    return not (FAMILIES[spec.architecture].text_part and _IMAGES.fullmatch(name))


def decoder_name(spec: ModelSpec, name: str) -> str:
    """The name that a checkpoint's tensor has here, if it is one and not of several."""
    family = FAMILIES[spec.architecture]
    if family.text_part:
        name = re.sub(f"^{_LANGUAGE_MODEL}", "model.", re.sub(f"^{_HEAD}", "lm_head.", name))
    name = expert_name(spec, name)
    layer = _LAYER.fullmatch(name)
    if layer is None or layer.group(2) not in family.renamed:
        return name
    return f"{layer.group(1)}{family.renamed[layer.group(2)]}{layer.group(3)}"


def is_unused(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor, by its name here, makes cells of a layer that looks at another's: files
    have such, and no model reads them.
    """
    found = _CELLS.fullmatch(name)
    if found is None or int(found.group(1)) >= spec.layers:
        return False
    return spec.source_of(int(found.group(1))) != int(found.group(1))


def _named(spec: ModelSpec, tensors: Mapping[str, _T]) -> dict[str, _T]:
    named = {decoder_name(spec, name): x for name, x in tensors.items() if is_text(spec, name)}
    return {name: x for name, x in named.items() if not is_unused(spec, name)}
