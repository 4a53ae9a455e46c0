"""A forward of a model of transformers in which steps of kvkeep's caches attend."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.cache import LayerAttention
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.layers import LayerDispatch
from kvkeep.compiled.chunk import layer_attention
from kvkeep.errors import UnsupportedModel
from kvkeep.integrations.transformers.interface import Asked, MaskFunction
from kvkeep.integrations.transformers.layers import Adapted
from kvkeep.integrations.transformers.layers import Attends as Call
from kvkeep.integrations.transformers.states import put_states, states_of
from kvkeep.integrations.transformers.step_cache import StepCache, layers_of
from kvkeep.models.layers.executor import AnyStep


class Stepping:
    """Attends by a step, layer by layer, in the order in which the model was seen to.

    A batch of one has all tokens of the step; or each row has one token, of one cache each.
    """

    position = 0  # keys and queries come unrotated: positions are the step's business

    def __init__(self, adapted: Adapted, step: AnyStep):
        self._adapted = adapted
        self._each_alone = isinstance(step, GroupStep)
        self._steps = step.steps if isinstance(step, GroupStep) else [step]
        self._attends: LayerAttention = layer_attention(step)
        self._by_layer = isinstance(self._attends, LayerDispatch)
        self._done = 0
        self._given: dict[int, tuple[Tensor, Tensor]] = {}

    def cache(self, config: PreTrainedConfig) -> StepCache:
        """What the model is to be handed as its cache."""
        seen = max(0, *(step.times[0] for step in self._steps))
        if not self._adapted.spec.recurrent:
            return StepCache(self._adapted.kinds, self.take, seen)
        cache = StepCache(layers_of(config), self.take, seen)
        put_states([step.recurrent for step in self._steps], cache)
        return cache

    def finish(self, cache: StepCache) -> None:
        """Takes what the model has left in its cache, once all layers have attended."""
        self._require_all()
        if self._adapted.spec.recurrent:
            for step, states in zip(self._steps, states_of(cache, len(self._steps)), strict=True):
                step.recurrent = states

    def take(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """As the model hands them to its cache."""
        self._given[layer] = keys, values

    def mask(self, function: MaskFunction, like: Tensor) -> Tensor | None:
        return None  # a step knows what each of its tokens sees

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
        index, call = self._done, self._next(module, asked)
        given = self._given.get(call.layer)
        if mask is not None or given is None or given[0] is not k or given[1] is not v:
            raise UnsupportedModel(
                f"{type(module).__name__} attended to other keys than those of its cache, or by a "
                "mask of its own, which it did not when kvkeep looked at it"
            )
        queries, keys = _ordered(call, q), _ordered(call, k)
        if call.factor != 1:
            queries = queries * call.factor
        rows = (self._rows(queries), self._rows(keys), self._rows(v))
        if not call.own:
            found = self._attends.attend(self._place(index, call), rows[0], None, None)
        else:
            found = self._attends.attend(self._place(index, call), *rows)
        batch, heads, n, width = q.shape
        return found.view(batch, n, heads, width).to(q.dtype)

    def _place(self, index: int, call: Call) -> int:
        return index if self._by_layer else call.index

    def _next(self, module: nn.Module, asked: Asked) -> Call:
        calls = self._adapted.calls
        call = calls[self._done] if self._done < len(calls) else None
        if call is None or call.module is not module or call.asked != asked:
            raise UnsupportedModel(
                f"{type(module).__name__} attended in another order, or in another way, than when "
                "kvkeep looked at the model; use a cache of transformers with it"
            )
        self._done += 1
        return call

    def _rows(self, x: Tensor) -> Tensor:
        """`[n, heads, head_dim]` of `[batch, heads, n, head_dim]`, in the dtype of cells.

        Under torch.autocast layers compute in another one.
        """
        x = x.to(self._adapted.dtype)
        return x[:, :, 0] if self._each_alone else x[0].transpose(0, 1)

    def _require_all(self) -> None:
        """Raises UnsupportedModel where not every layer has attended."""
        if self._done != len(self._adapted.calls):
            raise UnsupportedModel(
                f"{self._done} of {len(self._adapted.calls)} layers attended; kvkeep has cells for "
                "all of them"
            )


def _ordered(call: Call, x: Tensor) -> Tensor:
    return x if call.order is None else torch.index_select(x, -1, call.order)
