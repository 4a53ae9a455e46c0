"""The interface to transformers: attention by kvkeep, rotary embeddings, and parts of a model.

kvkeep registers an attention and a mask function with transformers under one name. A model's
configs choose that name only while `use_backend` is active, so forwards with other caches attend
as before. Another thread that calls the same model meanwhile gets an error, never a wrong result.
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

_ATTENTION_NAME = "kvkeep"
# The config attribute that chooses the attention; transformers has no other way for one forward.
_ATTENTION_ATTRIBUTE = "_attn_implementation_internal"
# Arguments that models pass to their attention and that do not change its result.
_IGNORED_ARGUMENTS = {
    *("input_ids", "position_ids", "position_embeddings", "cache_position", "use_cache"),
    *("return_dict", "logits_to_keep", "layer_idx", "num_key_value_groups"),
}

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a layer's attention. softcap: 0 for none. window: in tokens; None for none."""

    scale: float
    softcap: float
    window: int | None


@dataclass(frozen=True)
class AttentionInputs:
    """The arguments with which a layer calls attention.

    q: `[batch, heads, n, head_dim]`; k, v: `[batch, kv_heads, n, head_dim]`; sinks: `[heads]`.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    options: AttentionOptions
    sinks: Tensor | None


class AttentionBackend(Protocol):
    """The attention of one forward of a transformers model: a probe or a step of kvkeep's cache.

    rotary_position: the position that all rotary embeddings use for all tokens.
    """

    rotary_position: int

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Attend in one layer, `[batch, n, heads, head_dim]`."""

    def make_mask(self, mask_function: MaskFunction, device: torch.device | None) -> Tensor | None:
        """Return the mask to pass to layers.

        mask_function: transformers', of batch row, head, query and key index; True where visible.
        """


class _ThreadState(threading.local):
    backend: AttentionBackend | None = None


_thread_state = _ThreadState()  # has a backend within `use_backend` only


@contextmanager
def use_backend(backend: AttentionBackend, configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Let `backend` compute the attention of forwards of the model with these configs."""
    previous_names = [getattr(config, _ATTENTION_ATTRIBUTE) for config in configs]
    previous_backend, _thread_state.backend = _thread_state.backend, backend
    try:
        for config in configs:
            setattr(config, _ATTENTION_ATTRIBUTE, _ATTENTION_NAME)
        yield
    finally:
        _thread_state.backend = previous_backend
        for config, name in zip(configs, previous_names, strict=True):
            setattr(config, _ATTENTION_ATTRIBUTE, name)


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
    """Attend by the active backend, as an attention function of transformers."""
    backend = _active_backend()
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
            f"{type(module).__name__} passes {', '.join(unsupported)} to attention, which kvkeep "
            "does not support; use a cache of transformers with this model"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    options = AttentionOptions(scale, float(softcap or 0), sliding_window)
    inputs = AttentionInputs(module, query, key, value, attention_mask, options, s_aux)
    return backend.attend(inputs), None


def _mask_by_backend(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: MaskFunction,
    device: Any = None,
    **others: Any,
) -> Tensor | None:
    """Return a mask, as a mask function of transformers. Hooks have removed padding before."""
    return _active_backend().make_mask(mask_function, device)


def _active_backend() -> AttentionBackend:
    if _thread_state.backend is None:
        raise RuntimeError(
            f"the attention {_ATTENTION_NAME!r} runs only in a forward that kvkeep has started: do "
            "not call the same model from two threads at once"
        )
    return _thread_state.backend


AttentionInterface.register(_ATTENTION_NAME, _attend_by_backend)
AttentionMaskInterface.register(_ATTENTION_NAME, _mask_by_backend)


def hook_rotary_embeddings(body: nn.Module) -> list[RemovableHandle]:
    """Let all rotary embeddings use the active backend's position, if there is a backend.

    One position for all tokens: the backend rotates each query and key from there to its own. A
    rotary embedding is known by its `inv_freq`.
    """
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
    """Replace position ids before a module's forward. index: of the parameter `position_ids`."""
    backend = _thread_state.backend
    if backend is None:
        return None
    if len(args) > index:
        position_ids = torch.full_like(args[index], backend.rotary_position)
        return (*args[:index], position_ids, *args[index + 1 :]), kwargs
    position_ids = torch.full_like(kwargs["position_ids"], backend.rotary_position)
    return args, {**kwargs, "position_ids": position_ids}


def body_name(model: PreTrainedModel) -> str:
    """Return the name of the submodule below the head. Raises UnsupportedModel without one."""
    for name in (model.base_model_prefix, "model"):
        if name in model._modules:
            return name
    raise UnsupportedModel(f"{type(model).__name__} has no output head over its text layers")


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the submodule below the head: embeddings, layers and final norm."""
    return model.get_submodule(body_name(model))


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configs of all parts of the model, the text's first."""
    text_config = model.config.get_text_config(decoder=True)
    configs = {id(text_config): text_config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs[id(config)] = config
    return list(configs.values())
