"""Models that write a given answer, so that small ones reason and call tools in tests."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep.model import Model
from kvkeep.server import chat_input


class Script:
    """A `Constraint` with one possible text."""

    def __init__(self, ids: Sequence[int]):
        self._ids = list(ids)

    def masked(self, logits: Tensor) -> Tensor:
        result = torch.full_like(logits, -torch.inf)
        result[self._ids[0]] = 0.0
        return result

    def accept(self, token: int) -> None:
        assert token == self._ids.pop(0)


def write_answers(monkeypatch: pytest.MonkeyPatch, model: Model, text: str) -> None:
    """Make all chats of servers in this process answer with a text; the rest is as always."""
    ids = [*model.text.encode(text, special=True), model.end_token_ids[0]]

    def scripted(*arguments: Any) -> Script:
        return Script(ids)

    monkeypatch.setattr(chat_input, "reasoning_constraint", scripted)
