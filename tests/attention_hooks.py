"""Replaces attention in a decoder: to record, change or fail it during a forward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep

Attend = Callable[[AnyStep, int, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def attending(decoder: Decoder, attend: Attend) -> Iterator[None]:
    """Make each layer call `attend(step, layer, q, k, v)` in place of `step.attend`."""
    original = decoder.executor

    class ReplacedStep:
        def __init__(self, step: AnyStep):
            self.step = step

        @property
        def layer_attention(self) -> "ReplacedStep":
            return self

        @property
        def recurrent_states(self) -> Mapping[str, Tensor]:
            return self.step.recurrent_states

        @recurrent_states.setter
        def recurrent_states(self, states: Mapping[str, Tensor]) -> None:
            self.step.recurrent_states = states

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.step, layer, q, k, v)

    class ReplacedExecutor:
        row_limit = 0
        rounding = original.rounding

        def forward(
            self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None
        ) -> Tensor:
            return original.forward(tokens, ReplacedStep(step), input_norms)  # type: ignore[arg-type]

        def logits(self, hidden: Tensor) -> Tensor:
            return original.logits(hidden)

    decoder.executor = ReplacedExecutor()
    try:
        yield
    finally:
        decoder.executor = original
