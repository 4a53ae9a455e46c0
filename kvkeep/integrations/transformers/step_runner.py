"""An attention backend that runs the forward of a transformers model over a step of kvkeep."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.cache import LayerAttention
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import LayerDispatch
from kvkeep.compiled.chunk import layer_attention
from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.adapter import AdaptedModel, AttentionCall
from kvkeep.integrations.transformers.interface import AttentionOptions, MaskFunction
from kvkeep.integrations.transformers.step_cache import (
    StepCache,
    load_states,
    new_cache_layers,
    read_states,
)
from kvkeep.models.layers.executor import AnyStep


class StepRunner:
    """Attends layer by layer over a step, in the order of calls that the probe recorded.

    The model's batch has either one row with all tokens of the step, or, in a step of a group, one
    token of each session in a row of its own.

    cache: for the model's forward, with the recurrent states of the step.
    """

    position = 0  # keys and queries stay unrotated: the step rotates them

    def __init__(self, adapted: AdaptedModel, step: AnyStep, config: PreTrainedConfig):
        self._adapted = adapted
        self._is_group = isinstance(step, GroupStep)
        self._steps = step.steps if isinstance(step, GroupStep) else [step]
        self._attention: LayerAttention = layer_attention(step)
        self._by_layer = isinstance(self._attention, LayerDispatch)
        self._calls_done = 0
        recurrent, length = adapted.spec.recurrent, max(0, *(s.times[0] for s in self._steps))
        layers = new_cache_layers(config) if recurrent else adapted.cache_layers
        self.cache = StepCache(layers, length)
        if recurrent:
            load_states([step.recurrent for step in self._steps], self.cache)

    def finish(self) -> None:
        """Take over the recurrent states after the forward.

        Raises UnsupportedModel if not every layer has attended.
        """
        if self._calls_done != len(self._adapted.calls):
            raise UnsupportedModel(
                f"{self._calls_done} of {len(self._adapted.calls)} layers attended; kvkeep has "
                "cells for all of them"
            )
        if self._adapted.spec.recurrent:
            all_states = read_states(self.cache, len(self._steps))
            for step, states in zip(self._steps, all_states, strict=True):
                step.recurrent = states

    def mask(self, function: MaskFunction, device: torch.device | None) -> Tensor | None:
        return None  # the step determines what each of its tokens sees

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
        call_index, call = self._calls_done, self._next_call(module, options)
        update = self.cache.updates.get(call.layer)
        if mask is not None or update is None or update[0] is not k or update[1] is not v:
            raise UnsupportedModel(
                f"{type(module).__name__} attended to other keys than those of its cache, or by a "
                "mask of its own, which it did not do when kvkeep probed it"
            )
        queries, keys = _to_cell_order(call, q), _to_cell_order(call, k)
        if call.query_factor != 1:
            queries = queries * call.query_factor
        rows = (self._as_rows(queries), self._as_rows(keys), self._as_rows(v))
        layer = call_index if self._by_layer else call.index
        if call.owns_keys:
            output = self._attention.attend(layer, *rows)
        else:
            output = self._attention.attend(layer, rows[0], None, None)
        batch, heads, n, width = q.shape
        return output.view(batch, n, heads, width).to(q.dtype)

    def _next_call(self, module: nn.Module, options: AttentionOptions) -> AttentionCall:
        """Return the next call that the probe recorded. Raises UnsupportedModel if it differs."""
        calls = self._adapted.calls
        call = calls[self._calls_done] if self._calls_done < len(calls) else None
        if call is None or call.module is not module or call.options != options:
            raise UnsupportedModel(
                f"{type(module).__name__} attended in another order, or in another way, than when "
                "kvkeep probed the model; use a cache of transformers with it"
            )
        self._calls_done += 1
        return call

    def _as_rows(self, x: Tensor) -> Tensor:
        """Convert `[batch, heads, n, head_dim]` to `[n, heads, head_dim]`, in the cells' dtype.

        Under torch.autocast layers compute in another dtype.
        """
        x = x.to(self._adapted.dtype)
        return x[:, :, 0] if self._is_group else x[0].transpose(0, 1)


def _to_cell_order(call: AttentionCall, x: Tensor) -> Tensor:
    """Reorder the components of heads so that the pairs of RoPE lie half a head apart."""
    return x if call.order is None else torch.index_select(x, -1, call.order)
