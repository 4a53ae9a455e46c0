"""How a layer turns its keys by their positions: found from what it makes of one token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PLACES = (0, 1, 977)  # where the token is put, to see what becomes of its keys
_TOLERANCE = {torch.float32: 5e-4, torch.float64: 5e-4}  # of others 3e-2: their cosines are rounded


@dataclass(frozen=True)
class Rotation:
    """frequencies: radians per position of each pair, `[head_dim / 2]`, 0 for those that are not
    rotated. order: which number of the model's head is the i-th of a cell's; pairs lie half a head
    apart there.
    """

    frequencies: tuple[float, ...]
    order: tuple[int, ...]

    @property
    def rotates(self) -> bool:
        return any(self.frequencies)


def find_rotation(seen: Sequence[Sequence[Tensor]], tables: Sequence[Tensor]) -> Rotation | None:
    """The rotation that makes each of some rows, at PLACES[0], what they are at the others.

    seen: for each of PLACES the same tensors, `[rows, head_dim]`. tables: the frequencies that the
    model has, `[pairs]` each. None where there is no such rotation: positions change more.
    """
    at = [torch.cat(list(rows)).cpu().double() for rows in seen]
    width, most = at[0].shape[-1], _TOLERANCE.get(seen[0][0].dtype, 3e-2)
    if width % 2:
        return None
    found = min(
        ((_distance(at, each), each) for each in _candidates(width, tables)),
        key=lambda pair: pair[0],
    )
    return found[1] if found[0] <= most else None


def _distance(at: Sequence[Tensor], rotation: Rotation) -> float:
    """How far the rows are from where the rotation would have them, as a part of their length."""
    first, width = at[0][:, list(rotation.order)], at[0].shape[-1]
    frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64, device="cpu")
    a, b = torch.split(first, width // 2, -1)
    worst = 0.0
    for place, rows in zip(PLACES, at, strict=True):
        angles = place * frequencies
        expected = torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )
        off = (rows[:, list(rotation.order)] - expected).norm() / first.norm()
        worst = max(worst, off.item())
    return worst


def _candidates(width: int, tables: Sequence[Tensor]) -> Iterator[Rotation]:
    """None at all, and each table: of neighbours or of halves, from the first number of a head or
    up to the last, in either direction.
    """
    yield Rotation((0.0,) * (width // 2), tuple(range(width)))
    for table in tables:
        pairs = len(table)
        if not 0 < 2 * pairs <= width:
            continue
        for begin in sorted({0, width - 2 * pairs}):
            inside = range(begin, begin + 2 * pairs)
            rest = [index for index in range(width) if index not in inside]
            half = len(rest) // 2
            for one, other in (
                (inside[:pairs], inside[pairs:]),
                (inside[::2], inside[1::2]),
            ):
                order = (*one, *rest[:half], *other, *rest[half:])
                for sign in (1, -1):
                    frequencies = [sign * value for value in table.double().tolist()]
                    yield Rotation((*frequencies, *(0.0,) * half), order)
