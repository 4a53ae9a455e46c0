"""What is measured, and at which sizes. Imports nothing heavy: the command's help reads it."""

from dataclasses import dataclass

PEERS = ("kvkeep", "llama.cpp", "transformers", "mlx-lm")
PARTS = ("prefill", "steps", "decode", "endless", "memory", "startup")
KEEP = 4  # first tokens that an endless context keeps


@dataclass(frozen=True)
class Plan:
    """Sizes are in tokens.

    prefill: prompts. stepped, step: the prompt that kvkeep reads in steps and whole. contexts,
    written: at which tokens are written, and how many; profiled: how many, for `--profile`.
    budget, endless, block: of the endless run, and how many tokens are written before it is
    another's turn; those that cannot forget write one in `shorter`. remembered, deleted: of the
    context that is saved, forked and edited.
    patience: the most seconds that one reading may take, and endless_patience all tokens of the
    endless run: slower ones write one in `shorter`, too.
    """

    rounds: int = 5
    prefill: tuple[int, ...] = (512, 4096)
    stepped: int = 4232
    step: int = 512
    contexts: tuple[int, ...] = (128, 1024, 4096)
    written: int = 32
    profiled: int = 100
    budget: int = 1024
    endless: int = 20_000
    block: int = 100
    shorter: int = 20
    remembered: int = 4096
    deleted: int = 50
    patience: float = 60.0
    endless_patience: float = 1800.0

    @property
    def group(self) -> int:
        """Tokens that the medians of the endless run are taken of: its second and its last."""
        return min(1000, self.endless // 4)

    @property
    def longest(self) -> int:
        """The longest context that any part makes."""
        written = self.contexts[-1] + self.written + 1
        return max(*self.prefill, self.stepped, written, self.budget, self.remembered + 2)


QUICK = Plan(
    rounds=2,
    prefill=(64, 256),
    stepped=300,
    step=64,
    contexts=(32, 128, 256),
    written=8,
    profiled=20,
    budget=128,
    endless=400,
    block=50,
    shorter=5,
    remembered=256,
    deleted=10,
)
