"""The parts of a transformers model that kvkeep uses, and the hooks on its rotary embeddings."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.interface import active_backend


def hook_rotary_embeddings(body: nn.Module) -> list[RemovableHandle]:
    """Let all rotary embeddings use the position of the active attention backend, if any."""
    return [
        module.register_forward_pre_hook(_RotaryHook(module), with_kwargs=True)
        for module in body.modules()
        if _is_rotary_embedding(module)
    ]


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


def _is_rotary_embedding(module: nn.Module) -> bool:
    names = [*module._buffers, *vars(module)]
    has_frequencies = any(name.endswith("inv_freq") for name in names)
    return has_frequencies and "position_ids" in inspect.signature(module.forward).parameters


class _RotaryHook:
    """A hook before a rotary embedding's forward that replaces its position ids."""

    def __init__(self, module: nn.Module):
        self._index = list(inspect.signature(module.forward).parameters).index("position_ids")

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        backend = active_backend()
        if backend is None:
            return None
        if len(args) > self._index:
            position_ids = torch.full_like(args[self._index], backend.position)
            return (*args[: self._index], position_ids, *args[self._index + 1 :]), kwargs
        position_ids = torch.full_like(kwargs["position_ids"], backend.position)
        return args, {**kwargs, "position_ids": position_ids}
