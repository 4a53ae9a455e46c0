"""A model that writes given answers, through an unchanged server.

SmolLM2 never calls tools. A constraint that allows one token at a time makes it write any text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kvkeep.chat.output_format import format_by_name
from kvkeep.model import Model
from kvkeep.server import chat_input


class Script:
    """A constraint that allows the tokens of a script only, and then an end token."""

    def __init__(self, ids: Sequence[int], end_id: int):
        self._ids, self._written = [*ids, end_id], 0

    def masked(self, logits: Tensor) -> Tensor:
        mask = torch.full_like(logits, -torch.inf)
        token = self._ids[min(self._written, len(self._ids) - 1)]
        mask[token] = logits[token]
        return mask

    def accept(self, token: int) -> None:
        self._written += 1


@contextmanager
def scripted_answers(model: Model, *texts: str, output_format: str = "hermes") -> Iterator[None]:
    """Make each generation of a chat write the next of the texts, and then the first again.

    output_format: that the model is taken to write. Its markers are plain text for SmolLM2, unless
    its vocabulary has them as control tokens.
    """
    scripts = [model.text.encode(text, special=True) for text in texts]
    count = 0

    def next_script(*arguments: Any) -> Script:
        nonlocal count
        count += 1
        return Script(scripts[(count - 1) % len(scripts)], model.end_token_ids[0])

    found = format_by_name(output_format, model.text.control_texts)
    with (
        mock.patch.object(chat_input, "reasoning_constraint", next_script),
        mock.patch.dict(model.renderer.__dict__, {"output_format": found}),
    ):
        yield
