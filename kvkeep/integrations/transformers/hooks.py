"""What kvkeep hangs on a model of transformers: hooks, which do nothing unless kvkeep attends."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.interface import attending


def hold_rotary(body: nn.Module) -> list[RemovableHandle]:
    """Makes rotary embeddings think, while kvkeep attends, that all tokens are where it says."""
    return [
        module.register_forward_pre_hook(_Held(module), with_kwargs=True)
        for module in body.modules()
        if _is_rotary(module)
    ]


def body_name(model: PreTrainedModel) -> str:
    """Of the part of a model that is below its head. Raises UnsupportedModel where it has none."""
    for name in (model.base_model_prefix, "model"):
        if name in model._modules:
            return name
    raise UnsupportedModel(f"{type(model).__name__} has no head over layers that read text")


def body_of(model: PreTrainedModel) -> nn.Module:
    """That part."""
    return model.get_submodule(body_name(model))


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Those in which its parts look for their attention; that of its text first."""
    found = {id(config): config for config in _configs(model)}
    text = model.config.get_text_config(decoder=True)
    found.pop(id(text), None)
    return [text, *found.values()]


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            yield config


def _is_rotary(module: nn.Module) -> bool:
    names = [*module._buffers, *vars(module)]
    frequencies = any(name.endswith("inv_freq") for name in names)
    return frequencies and "position_ids" in inspect.signature(module.forward).parameters


class _Held:
    """A hook before a rotary embedding's forward."""

    def __init__(self, module: nn.Module):
        self._place = list(inspect.signature(module.forward).parameters).index("position_ids")

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        attention = attending()
        if attention is None:
            return None
        if len(args) > self._place:
            held = torch.full_like(args[self._place], attention.position)
            return (*args[: self._place], held, *args[self._place + 1 :]), kwargs
        held = torch.full_like(kwargs["position_ids"], attention.position)
        return args, {**kwargs, "position_ids": held}
