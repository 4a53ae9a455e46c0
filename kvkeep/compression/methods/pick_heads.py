"""Method `pick_heads`: neighbours become one, head by head (llama.cpp, pull request 5719)."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.runs import RunMerging


class PickHeads(RunMerging):
    """Of each run of cells, one KV head is taken from the first, the next from the second, ..."""

    name: ClassVar[str] = "pick_heads"

    def weights(self, candidates: Candidates, run: Tensor, sizes: Tensor) -> Tensor:
        kv_heads, count = candidates.shape[1:]
        first = sizes.cumsum(0) - sizes
        place = torch.arange(count, dtype=torch.int64, device="cpu") - first[run]
        heads = torch.arange(kv_heads, dtype=torch.int64, device="cpu").unsqueeze(-1)
        return (place == heads % sizes[run]).float()
