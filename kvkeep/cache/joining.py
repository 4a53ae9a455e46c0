"""Neighbouring segments made one."""

import itertools
from collections.abc import Sequence

from kvkeep.cache.block import Cells
from kvkeep.cache.segment import Segment

SMALL = 256  # cells; so many are copied in less time than a token takes
MOST = 16  # borders between segments that could be one: each costs every later token a little


def merge_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Segments; neighbours of one kind and one map made into one, copied."""
    return _merge_segments(segments, None)


def merge_small_segments(segments: Sequence[Segment]) -> list[Segment]:
    """The same of neighbours that are small together; of all, if too many would be left.

    So cells are rarely copied, and segments do not become more and more by small edits.
    """
    found = _merge_segments(segments, SMALL)
    borders = sum(_one_kind(one, other) for one, other in itertools.pairwise(found))
    return merge_segments(found) if borders > MOST else found


def _merge_segments(segments: Sequence[Segment], most: int | None) -> list[Segment]:
    runs: list[list[Segment]] = []
    for segment in segments:
        together = runs and _one_kind(runs[-1][-1], segment)
        if together and (most is None or sum(s.length for s in runs[-1]) + segment.length <= most):
            runs[-1].append(segment)
        elif segment.length:
            runs.append([segment])
    return [run[0] if len(run) == 1 else _one(run) for run in runs]


def _one(run: Sequence[Segment]) -> Segment:
    first = run[0]
    cells = Cells.concatenate([segment.read(0, segment.length) for segment in run])
    return Segment.from_cells(first.layout, cells, first.map, first.anchor)


def _one_kind(one: Segment, other: Segment) -> bool:
    return (
        one.map == other.map and one.anchor == other.anchor and one.compressed == other.compressed
    )
