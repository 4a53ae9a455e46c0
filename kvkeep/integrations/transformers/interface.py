"""What transformers calls in the place of its own attention and masks, while kvkeep attends.

Both functions are known to transformers by one name, which a model's config has during such a
forward and at no other time: a model that is called with another cache finds all that it had. Who
calls the same model from another thread at that very time gets an error, and no wrong result.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from kvkeep.errors import UnsupportedModel

NAME = "kvkeep"
# Where a config has the name: for one forward there is no other way to say it.
_IMPLEMENTATION = "_attn_implementation_internal"
# What models hand on to their attention that says nothing about it, or nothing that is not known.
_IGNORED = frozenset(
    (
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "return_dict",
        "logits_to_keep",
        "input_ids",
        "layer_idx",
        "num_key_value_groups",
    )
)

_ELSEWHERE = (
    f"the attention {NAME!r} works in a forward that kvkeep has opened: while one is under way, "
    "the same model cannot be called from another thread"
)

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]


@dataclass(frozen=True)
class Asked:
    """How a layer asks to attend. window: in tokens; None where it says nothing of one."""

    scale: float
    softcap: float
    window: int | None


class Attention(Protocol):
    """Who attends in a forward of a model of transformers.

    position: where each rotary embedding is to think that all tokens are.
    """

    position: int

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        asked: Asked,
        sinks: Tensor | None,
    ) -> Tensor:
        """One layer. q: `[batch, heads, n, head_dim]`; k, v: `[batch, kv_heads, n, head_dim]`.

        Returns `[batch, n, heads, head_dim]`.
        """

    def mask(self, function: MaskFunction, like: Tensor) -> Tensor | None:
        """What layers are handed of a mask; function: which query sees which cell of it."""


class _Here(threading.local):
    attention: Attention | None = None


_HERE = _Here()


def attending() -> Attention | None:
    """Who attends in this thread; None outside of `attended_by`."""
    return _HERE.attention


@contextmanager
def attended_by(attention: Attention, configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """A forward of the model with these configs, in which that attends."""
    before = [getattr(config, _IMPLEMENTATION) for config in configs]
    outer, _HERE.attention = _HERE.attention, attention
    try:
        for config in configs:
            setattr(config, _IMPLEMENTATION, NAME)
        yield
    finally:
        _HERE.attention = outer
        for config, name in zip(configs, before, strict=True):
            setattr(config, _IMPLEMENTATION, name)


def _attend(
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
    """As transformers calls an attention function."""
    attention = _HERE.attention
    if attention is None:
        raise RuntimeError(_ELSEWHERE)
    unknown = [
        name
        for name, given in others.items()
        if name not in _IGNORED and given is not None and given is not False
    ]
    if dropout:
        unknown.append("dropout (call model.eval())")
    if is_causal is False:
        unknown.append("is_causal=False")
    if unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which kvkeep does "
            "not know; use a cache of transformers with this model"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    asked = Asked(scale, float(softcap or 0), sliding_window)
    return attention.attend(module, query, key, value, attention_mask, asked, s_aux), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *given: Any,
    mask_function: MaskFunction,
    device: Any = None,
    **others: Any,
) -> Tensor | None:
    """As transformers calls a mask function. What is padding never comes this far."""
    attention = _HERE.attention
    if attention is None:
        raise RuntimeError(_ELSEWHERE)
    return attention.mask(mask_function, torch.empty(0, dtype=torch.float32, device=device))


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
