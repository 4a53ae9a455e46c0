"""What a decoder hands to attention, heard, changed or broken off in the middle of a forward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep

Attend = Callable[[AnyStep, int, Tensor, Tensor, Tensor], Tensor]


@contextmanager
def attending(decoder: Decoder, attend: Attend) -> Iterator[None]:
    """Each layer calls `attend(step, layer, q, k, v)` in the place of `step.attend`."""
    usual = decoder.executor

    class Heard:
        def __init__(self, step: AnyStep):
            self.step = step

        @property
        def layer_attention(self) -> "Heard":
            return self

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.step, layer, q, k, v)

    class Listening:
        def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
            return usual.hidden(tokens, Heard(step))  # type: ignore[arg-type]

        def logits(self, hidden: Tensor) -> Tensor:
            return usual.logits(hidden)

    decoder.executor = Listening()
    try:
        yield
    finally:
        decoder.executor = usual
