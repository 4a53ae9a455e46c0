"""Who gets how many cells: all layers and KV heads as many, or those whose cells are worth most.

Heads compete within a layer in Ada-KV (arXiv:2407.11550), and over all layers in KVzip
(arXiv:2505.23416): a head that looks at little leaves its share to others.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from kvkeep.errors import InvalidArgument

Budget: TypeAlias = Literal["heads", "uniform"]
BUDGETS: tuple[str, ...] = get_args(Budget)


def check_budget(budget: str) -> None:
    """Raises InvalidArgument for a name that is none."""
    if budget not in BUDGETS:
        raise InvalidArgument(f"budget must be one of {', '.join(BUDGETS)}; found {budget!r}")


def best_of_all(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Which of some cells have the highest scores over all layers and KV heads.

    scores: of each run of cells, of any shape. Returns bool of the same shapes, `count` true in
    all, or every one where there are fewer: the length of ragged cells is rounded up.
    """
    every = torch.cat([score.flatten() for score in scores])
    best = torch.zeros(every.shape, dtype=torch.bool, device=every.device)
    best[every.topk(min(count, len(every)), sorted=False).indices] = True
    parts = torch.split(best, [score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]
