"""Parts and sizes of the comparison. Imports nothing heavy, since `--help` needs it."""

from dataclasses import dataclass

PEERS = ("kvkeep", "llama.cpp", "transformers", "mlx-lm")
PARTS = ("prefill", "steps", "decode", "endless", "memory", "startup")
KEEP = 4  # first tokens that an endless context keeps


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurements, in tokens.

    prefill: prompt lengths. stepped, step: prompt that kvkeep prefills in steps and at once.
    contexts: context lengths before decoding; written: tokens decoded; profiled: tokens decoded
    for `--profile`. budget, endless: budget and length of the endless run; block: tokens per turn;
    variants that cannot evict, or are too slow, generate 1 / `shorter` of it. remembered, deleted:
    length of the context that is saved, forked and edited, and of the deletion. patience: maximum
    seconds of one reading; endless_patience: maximum seconds of the endless run.
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
        """Tokens per median of the endless run (of its second and its last group)."""
        return min(1000, self.endless // 4)

    @property
    def longest(self) -> int:
        """The longest context of any part."""
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
