"""What a model makes of hidden states: its head, and whatever it does before and after that."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvkeep.integrations.transformers.hooks import body_name, body_of


class Head:
    """The model's own forward over hidden states that are there already.

    A shallow copy of the model, with the same weights, in which something that gives these hidden
    states stands in the place of its layers. The model itself is as it was.
    """

    def __init__(self, model: PreTrainedModel):
        self._given = _Given(body_of(model))
        self._model = copy.copy(model)
        self._model.__dict__["_modules"] = dict(model._modules)
        self._model._modules[body_name(model)] = self._given
        for name in vars(model):
            if "_hooks" in name and isinstance(vars(model)[name], dict):
                self._model.__dict__[name] = type(vars(model)[name])()

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32."""
        self._given.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        try:
            with torch.inference_mode():
                found: Tensor = self._model(input_ids=ids, use_cache=False).logits
        finally:
            self._given.hidden = None
        return found[0].float()


class _Given(nn.Module):
    """In the place of a model's layers; what a head asks of these besides, they answer."""

    hidden: Tensor | None = None

    def __init__(self, layers: nn.Module):
        super().__init__()
        self.__dict__["_layers"] = layers  # no part of it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layers"], name)

    def forward(self, *args: Any, **kwargs: Any) -> "_Output":
        assert self.hidden is not None
        return _Output(self.hidden)


class _Output:
    """As models give what their layers have made; all else that they may give is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
