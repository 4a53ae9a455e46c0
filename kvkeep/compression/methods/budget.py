"""Budgets of cells, which KV heads share equally or by competing with their cells' scores.

Heads compete within a layer in Ada-KV (arXiv:2407.11550), and over all layers in KVzip
(arXiv:2505.23416): a head that attends to little leaves its share to others.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from kvkeep.errors import InvalidArgument

Budget: TypeAlias = Literal["heads", "uniform"]
BUDGETS: tuple[str, ...] = get_args(Budget)


def check_budget(budget: str) -> None:
    """Raise InvalidArgument for an unknown budget."""
    if budget not in BUDGETS:
        raise InvalidArgument(f"budget must be one of {', '.join(BUDGETS)}; found {budget!r}")


def top_over_heads(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Select the highest scores over all runs, layers and KV heads.

    scores: of each run of cells, of any shape.

    Returns bool masks of the same shapes, `count` true in all, or every one if there are fewer
    cells: the length of ragged cells is rounded up.
    """
    flat = torch.cat([score.flatten() for score in scores])
    selected = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    selected[flat.topk(min(count, len(flat)), sorted=False).indices] = True
    parts = torch.split(selected, [score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]
