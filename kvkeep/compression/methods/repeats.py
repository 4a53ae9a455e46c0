"""Compression of verbatim repeats alone, as in logs, forms and pasted files.

If evicting repeats frees enough, all cells of other text stay in all KV heads, without any scores.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.compression.methods.apply import Compression, compress
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.fitted import Fitted

RUN_TOKENS = 16  # in real text, a repeat of this length is boilerplate


def find_repeats(tokens: Sequence[int]) -> Tensor:
    """Return `[n]` bool: whether a token is part of a run of 16 that occurred before.

    Runs may overlap: with runs of two, all of a b a b a b but the first two are repeats.
    """
    seen_runs = set[tuple[int, ...]]()
    repeats, run_of_ones = bytearray(len(tokens)), bytes([1]) * RUN_TOKENS
    for start in range(len(tokens) - RUN_TOKENS + 1):
        run = tuple(tokens[start : start + RUN_TOKENS])
        if run in seen_runs:
            repeats[start : start + RUN_TOKENS] = run_of_ones
        seen_runs.add(run)
    return torch.tensor(list(repeats), dtype=torch.bool, device="cpu")


def compress_repeats(
    candidates: Candidates, repeats: Tensor, count: int
) -> tuple[Cells, list[Compression]]:
    """Reduce the repeats to `count` cells by method `fitted`; keep all other cells.

    The mass of evicted repeats is dropped, as it would draw attention from text that occurs once.
    The cells of each layer and KV head are ordered by position.

    candidates: n cells of one token each. repeats: `[n]` bool.
    """
    unique_indices, repeated_indices = (~repeats).nonzero()[:, 0], repeats.nonzero()[:, 0]
    parts = [_select_cells(candidates.cells, unique_indices).to_compressed_format()]
    reports = [Compression(len(unique_indices), len(unique_indices), 0.0, 0.0)]
    repeated = replace(candidates, cells=_select_cells(candidates.cells, repeated_indices))
    for cells, report in compress(Fitted(), repeated, count):
        parts.append(replace(cells, bias=None).to_compressed_format())
        reports.append(report)
    joined = replace(candidates, cells=Cells.concatenate(parts))
    if not len(joined):
        return joined.cells, reports
    order = joined.positions.argsort(stable=True, dim=-1)
    return joined.select(order.to(candidates.cells.keys.device)), reports


def _select_cells(cells: Cells, indices: Tensor) -> Cells:
    keys, values = (x.index_select(2, indices.to(x.device)) for x in (cells.keys, cells.values))
    return Cells(keys, values, cells.positions[indices], cells.serials[indices])
