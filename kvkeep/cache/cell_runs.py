"""Cells by their rank among all cells of several segments, and by their tokens' serials."""

from collections.abc import Callable, Sequence, Set
from itertools import groupby, islice
from typing import TypeAlias

import torch
from torch import Tensor

from kvkeep.cache.block import Cells
from kvkeep.cache.layout import Layout
from kvkeep.cache.segment import Segment
from kvkeep.cache.storage import merge_small_segments

# A segment, whether the cells match what it was cut by, the first cell, and how many they are.
CellRun: TypeAlias = tuple[Segment, bool, int, int]


def read_cells(segments: Sequence[Segment], first: int, count: int) -> list[tuple[Segment, Cells]]:
    """Return copies of `count` cells from index `first` on; indices run through all segments."""
    parts = []
    for segment in segments:
        count_here = min(segment.length - first, count)
        if count_here > 0:
            parts.append((segment, segment.read(first, count_here)))
            count -= count_here
        first = max(0, first - segment.length)
    return parts


def split_by(
    segments: Sequence[Segment], matches: Callable[[Tensor, Tensor], Tensor]
) -> list[CellRun]:
    """Return runs of neighbouring cells that match or do not; each is of one segment.

    matches: called with the rank of each cell among all cells, and with its serial, `[n]` int64
    in the host's memory; returns `[n]` bool.
    """
    empty = torch.empty(0, dtype=torch.int64, device="cpu")
    parts = [segment.live_serials().cpu() for segment in segments]
    serials, runs = torch.cat([empty, *parts]), list[CellRun]()
    ranks = torch.arange(len(serials), dtype=torch.int64, device="cpu")
    matched = iter(matches(ranks, serials).tolist())
    for segment, part in zip(segments, parts, strict=True):
        first = 0
        for is_match, run in groupby(islice(matched, len(part))):
            count = len(list(run))
            runs.append((segment, is_match, first, count))
            first += count
    return runs


def reassign_anchors(
    segments: Sequence[Segment],
    is_anchor: Callable[[Tensor, Tensor], Tensor],
    layout_for: Callable[[bool], Layout],
) -> list[Segment]:
    """Return segments of the same cells, cut between those that are anchors and others.

    All keep their distances from the next token. A cell is copied only if its layout changes.

    is_anchor: a function of ranks and serials, as in `split_by`. layout_for: returns the layout of
    anchors, and of other cells.
    """
    result: list[Segment] = []
    for segment, is_anchor_run, first, count in split_by(segments, is_anchor):
        layout = layout_for(is_anchor_run)
        if layout != segment.layout:
            cells = segment.read(first, count)
            parts = [Segment.from_cells(layout, cells, segment.position_map, is_anchor_run)]
        elif is_anchor_run is segment.is_anchor and first + count == segment.length:
            parts = segment.tail(first)
        else:
            parts = segment.part(first, count)
        for part in parts:
            part.is_anchor = is_anchor_run
        result += parts
    return merge_small_segments(result)


def are_in(serials: Tensor, chosen: Set[int]) -> Tensor:
    """Return which serials, `[n]` int64, are in a set: `[n]` bool."""
    if not chosen:
        return torch.zeros(serials.shape, dtype=torch.bool, device="cpu")
    ordered = torch.tensor(sorted(chosen), dtype=torch.int64, device="cpu")
    places = torch.searchsorted(ordered, serials).clamp_(max=len(ordered) - 1)
    return ordered[places] == serials
