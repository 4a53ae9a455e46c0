"""The functions that transformers calls while kvkeep computes the attention, and parts of a model.

An attention and a mask function are registered with transformers under one name, which a model's
configs have during such a forward only: a model that is called with another cache attends as
before. Another thread that calls the same model during that forward gets an error, never a wrong
result. Hooks on rotary embeddings do nothing outside such a forward.
"""

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvkeep.errors import UnsupportedModel

NAME = "kvkeep"
# The config attribute that chooses the attention; transformers has no other way for one forward.
_IMPLEMENTATION = "_attn_implementation_internal"
# Arguments that models pass to their attention and that do not change its result.
_IGNORED_ARGUMENTS = {
    *("input_ids", "position_ids", "position_embeddings", "cache_position", "use_cache"),
    *("return_dict", "logits_to_keep", "layer_idx", "num_key_value_groups"),
}

_OTHER_THREAD = (
    f"the attention {NAME!r} works in a forward that kvkeep has opened: while one is under way, "
    "the same model cannot be called from another thread"
)

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a layer's attention. window: in tokens; None if the layer passes none."""

    scale: float
    softcap: float
    window: int | None


class AttentionBackend(Protocol):
    """The attention of one forward of a transformers model: a probe or a step of kvkeep's cache.

    position: the position that all rotary embeddings use for all tokens.
    """

    position: int

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend in one layer.

        q: `[batch, heads, n, head_dim]`; k, v: `[batch, kv_heads, n, head_dim]`. Returns
        `[batch, n, heads, head_dim]`.
        """

    def mask(self, function: MaskFunction, device: torch.device | None) -> Tensor | None:
        """Return the mask that layers are given; function: whether a query sees a cell."""


class _ThreadState(threading.local):
    backend: AttentionBackend | None = None


_STATE = _ThreadState()  # outside `use_backend` it has no backend


@contextmanager
def use_backend(backend: AttentionBackend, configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Let `backend` compute the attention of forwards of the model with these configs."""
    previous_names = [getattr(config, _IMPLEMENTATION) for config in configs]
    previous_backend, _STATE.backend = _STATE.backend, backend
    try:
        for config in configs:
            setattr(config, _IMPLEMENTATION, NAME)
        yield
    finally:
        _STATE.backend = previous_backend
        for config, name in zip(configs, previous_names, strict=True):
            setattr(config, _IMPLEMENTATION, name)


def _attend_by_backend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend; the signature is that of transformers' attention functions."""
    backend = _STATE.backend
    if backend is None:
        raise RuntimeError(_OTHER_THREAD)
    unsupported = [
        name
        for name, argument in others.items()
        if name not in _IGNORED_ARGUMENTS and argument is not None and argument is not False
    ]
    if dropout:
        unsupported.append("dropout (call model.eval())")
    if is_causal is False:
        unsupported.append("is_causal=False")
    if unsupported:
        raise UnsupportedModel(
            f"{type(module).__name__} asks attention for {', '.join(unsupported)}, which kvkeep "
            "does not know; use a cache of transformers with this model"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    options = AttentionOptions(scale, float(softcap or 0), sliding_window)
    return backend.attend(module, query, key, value, attention_mask, options, s_aux), None


def _mask_by_backend(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: MaskFunction,
    device: Any = None,
    **others: Any,
) -> Tensor | None:
    """Return a mask; the signature is that of transformers' mask functions.

    Padding needs no mask: the hooks before the layers remove it.
    """
    backend = _STATE.backend
    if backend is None:
        raise RuntimeError(_OTHER_THREAD)
    return backend.mask(mask_function, device)


AttentionInterface.register(NAME, _attend_by_backend)
AttentionMaskInterface.register(NAME, _mask_by_backend)


def hook_rotary_embeddings(body: nn.Module) -> list[RemovableHandle]:
    """Let all rotary embeddings use the position of the active attention backend, if any."""
    handles = []
    for module in body.modules():
        if not any(name.endswith("inv_freq") for name in (*module._buffers, *vars(module))):
            continue
        parameters = list(inspect.signature(module.forward).parameters)
        if "position_ids" in parameters:
            hook = partial(_replace_position_ids, parameters.index("position_ids"))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def _replace_position_ids(
    index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace position ids before a module's forward. index: of their parameter."""
    backend = _STATE.backend
    if backend is None:
        return None
    if len(args) > index:
        position_ids = torch.full_like(args[index], backend.position)
        return (*args[:index], position_ids, *args[index + 1 :]), kwargs
    position_ids = torch.full_like(kwargs["position_ids"], backend.position)
    return args, {**kwargs, "position_ids": position_ids}


def body_name(model: PreTrainedModel) -> str:
    """Return the name of the submodule below the head. Raises UnsupportedModel if it has none."""
    for name in (model.base_model_prefix, "model"):
        if name in model._modules:
            return name
    raise UnsupportedModel(f"{type(model).__name__} has no head over layers that read text")


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the submodule below the head: embeddings, layers and final norm."""
    return model.get_submodule(body_name(model))


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return all configs that choose the attention of a part of the model; the text's is first."""
    text_config = model.config.get_text_config(decoder=True)
    configs = {id(text_config): text_config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    return list(configs.values())
