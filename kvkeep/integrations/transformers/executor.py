"""A model of transformers as the executor of kvkeep's steps."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import ChunkStep
from kvkeep.integrations.transformers.adapting import adapted
from kvkeep.integrations.transformers.head import Head
from kvkeep.integrations.transformers.hooks import body_of, configs_of, hold_rotary
from kvkeep.integrations.transformers.interface import attended_by
from kvkeep.integrations.transformers.reading import hook_body
from kvkeep.integrations.transformers.stepping import Stepping
from kvkeep.models.executor import AnyStep
from kvkeep.models.finite import checked


class TransformersExecutor:
    """Every step by the model's own forward, in which kvkeep attends.

    Raises UnsupportedModel, naming the reason, for a model whose layers do something else with
    their cells than kvkeep would.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.body: nn.Module = body_of(model)
        self.configs = configs_of(model)
        self.handles = [*hold_rotary(self.body), *hook_body(self.body)]
        self._made_for = _kind(model)
        try:
            self.adapted = adapted(model, self.configs)
            self._head = Head(model)
        except BaseException:
            self.unhook()
            raise

    def is_as_it_was(self) -> bool:
        """Whether the model is still where it was looked at, and in that dtype."""
        return _kind(self.model) == self._made_for

    def unhook(self) -> None:
        """Takes every hook off the model."""
        while self.handles:
            self.handles.pop().remove()

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        alone = isinstance(step, GroupStep)
        stepping = Stepping(self.adapted, step)
        cache = stepping.cache(self.configs[0])
        with attended_by(stepping, self.configs), torch.inference_mode():
            ids = tokens[:, None] if alone else tokens[None]
            found = self.body(input_ids=ids, past_key_values=cache, use_cache=True)
            stepping.finish(cache)
        rows: Tensor = found.last_hidden_state
        return rows[:, 0] if alone else rows[0]

    def chunk(self, tokens: Tensor, step: ChunkStep, lengths: Tensor | None) -> Tensor:
        return self.hidden(tokens, step)

    def logits(self, hidden: Tensor) -> Tensor:
        return checked(self._head.logits(hidden))

    def unpacked(self, name: str) -> Tensor:
        raise KeyError(name)  # all are tensors


def _kind(model: PreTrainedModel) -> tuple[torch.dtype, torch.device]:
    first = next(model.parameters())
    return first.dtype, first.device
