"""An attention backend that runs the forward of a transformers model over a step of kvkeep."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep.cache import LayerAttention
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import LayerDispatch
from kvkeep.compiled.chunk import layer_attention
from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.adapter import AttentionCall, AttentionFacts
from kvkeep.integrations.transformers.interface import AttentionInputs, MaskFunction
from kvkeep.integrations.transformers.step_cache import (
    StepCache,
    load_states,
    new_cache_layers,
    read_states,
)
from kvkeep.models.layers.executor import AnyStep


class StepRunner:
    """Attends over a step in each layer, in the order of calls that the probe recorded.

    The model's batch has one row with all tokens of the step. A group step has one row with one
    token for each session.

    cache: passed to the model; has the step's recurrent states.
    """

    rotary_position = 0  # keys and queries stay unrotated: the step rotates them

    def __init__(self, facts: AttentionFacts, step: AnyStep, config: PreTrainedConfig):
        self._facts = facts
        self._is_group = isinstance(step, GroupStep)
        self._steps = step.steps if isinstance(step, GroupStep) else [step]
        self._attention: LayerAttention = layer_attention(step)
        # A dispatch, for models with local layers, takes the index among all layers.
        self._dispatches_by_layer = isinstance(self._attention, LayerDispatch)
        self._call_count = 0
        past_length = max(0, *(step.times[0] for step in self._steps))
        layers = new_cache_layers(config) if facts.spec.recurrent else facts.cache_layers
        self.cache = StepCache(layers, past_length)
        if facts.spec.recurrent:
            load_states([step.recurrent_states for step in self._steps], self.cache)

    def finish(self) -> None:
        """Give the step its recurrent states. Raises UnsupportedModel if a layer did not attend."""
        if self._call_count != len(self._facts.calls):
            raise UnsupportedModel(
                f"{self._call_count} of {len(self._facts.calls)} layers attended; kvkeep expects "
                "all of them"
            )
        if self._facts.spec.recurrent:
            states_by_row = read_states(self.cache, len(self._steps))
            for step, states in zip(self._steps, states_by_row, strict=True):
                step.recurrent_states = states

    def make_mask(self, mask_function: MaskFunction, device: torch.device | None) -> Tensor | None:
        return None  # the step determines what each of its tokens sees

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Attend over the step. Raises UnsupportedModel if the probe recorded another call."""
        call_index, call = self._call_count, self._next_call(inputs)
        module, q, k, v = inputs.module, inputs.q, inputs.k, inputs.v
        update = self.cache.updates.get(call.layer_idx)
        if inputs.mask is not None or update is None or update[0] is not k or update[1] is not v:
            raise UnsupportedModel(
                f"{type(module).__name__} attended to other keys than those in its cache, or with "
                "its own mask, unlike when kvkeep probed it"
            )
        queries, keys = _to_cell_order(call, q), _to_cell_order(call, k)
        if call.query_factor != 1:
            queries = queries * call.query_factor
        qkv_rows = (self._as_rows(queries), self._as_rows(keys), self._as_rows(v))
        layer = call_index if self._dispatches_by_layer else call.cell_layer
        if call.owns_keys:
            output = self._attention.attend(layer, *qkv_rows)
        else:
            output = self._attention.attend(layer, qkv_rows[0], None, None)
        batch, heads, n, head_dim = q.shape
        return output.view(batch, n, heads, head_dim).to(q.dtype)

    def _next_call(self, inputs: AttentionInputs) -> AttentionCall:
        """Return the next call that the probe recorded. Raises UnsupportedModel if it differs."""
        calls, module = self._facts.calls, inputs.module
        call = calls[self._call_count] if self._call_count < len(calls) else None
        if call is None or call.module is not module or call.options != inputs.options:
            raise UnsupportedModel(
                f"{type(module).__name__} attended in another order or another way than when "
                "kvkeep probed the model; use a transformers cache with it"
            )
        self._call_count += 1
        return call

    def _as_rows(self, x: Tensor) -> Tensor:
        """Convert `[batch, heads, n, head_dim]` to `[n, heads, head_dim]`, in the cells' dtype.

        Under torch.autocast layers compute in another dtype.
        """
        x = x.to(self._facts.dtype)
        return x[:, :, 0] if self._is_group else x[0].transpose(0, 1)


def _to_cell_order(call: AttentionCall, x: Tensor) -> Tensor:
    """Reorder the components of heads as cells have them: RoPE's pairs lie half a head apart."""
    return x if call.permutation is None else torch.index_select(x, -1, call.permutation)
