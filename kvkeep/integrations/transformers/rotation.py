"""The rotation that a layer applies to its keys, inferred from probe forwards of one token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROBED_POSITIONS = (0, 1, 977)  # the token is evaluated at each of them to compare its keys
_TOLERANCE = {torch.float32: 5e-4, torch.float64: 5e-4}
_ROUNDED_TOLERANCE = 3e-2  # for all other dtypes: their cosines are rounded


@dataclass(frozen=True)
class KeyRotation:
    """A rotation of keys and queries by their position.

    frequencies: radians per position of each pair, `[head_dim / 2]`; 0 for pairs that are not
    rotated. order: `order[i]` is the index, in the model's head, of component i of a cell; in the
    cell's order the two components of a pair lie half a head apart.
    """

    frequencies: tuple[float, ...]
    order: tuple[int, ...]

    @property
    def rotates(self) -> bool:
        return any(self.frequencies)


def find_rotation(
    probed: Sequence[Sequence[Tensor]], tables: Sequence[Tensor]
) -> KeyRotation | None:
    """Return the rotation that maps rows at position 0 to the rows at the other probed positions.

    probed: for each of PROBED_POSITIONS the same tensors, `[rows, head_dim]`. tables: the frequency
    tables of the model, `[pairs]` each. Returns None if no candidate fits: then positions change
    more than a rotation does.
    """
    rows_at = [torch.cat(list(tensors)).cpu().double() for tensors in probed]
    width = rows_at[0].shape[-1]
    if width % 2:
        return None
    error, rotation = min(
        ((_error(rows_at, candidate), candidate) for candidate in _candidates(width, tables)),
        key=lambda pair: pair[0],
    )
    return rotation if error <= _TOLERANCE.get(probed[0][0].dtype, _ROUNDED_TOLERANCE) else None


def _error(rows_at: Sequence[Tensor], rotation: KeyRotation) -> float:
    """Return the largest distance of rows from their expected rotation, relative to their norm."""
    order = list(rotation.order)
    first, width = rows_at[0][:, order], rows_at[0].shape[-1]
    frequencies = torch.tensor(rotation.frequencies, dtype=torch.float64, device="cpu")
    a, b = torch.split(first, width // 2, -1)
    worst = 0.0
    for position, rows in zip(PROBED_POSITIONS, rows_at, strict=True):
        angles = position * frequencies
        expected = torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )
        worst = max(worst, ((rows[:, order] - expected).norm() / first.norm()).item())
    return worst


def _candidates(width: int, tables: Sequence[Tensor]) -> Iterator[KeyRotation]:
    """Yield no rotation, then every way to apply each table to a head of `width` components.

    A table may rotate the first or the last components of a head (partial RoPE), pair halves or
    neighbours, and turn in either direction. Example, width 8 and a table of 2 pairs at the
    beginning: components 0 to 3 are rotated. As halves the pairs are (0, 2), (1, 3) and the order
    is (0, 1, 4, 5, 2, 3, 6, 7); as neighbours they are (0, 1), (2, 3): (0, 2, 4, 5, 1, 3, 6, 7).
    """
    yield KeyRotation((0.0,) * (width // 2), tuple(range(width)))
    for table in tables:
        pairs = len(table)
        if not 0 < 2 * pairs <= width:
            continue
        for begin in sorted({0, width - 2 * pairs}):
            rotated = range(begin, begin + 2 * pairs)
            unrotated = [index for index in range(width) if index not in rotated]
            half = len(unrotated) // 2
            for firsts, seconds in (
                (rotated[:pairs], rotated[pairs:]),
                (rotated[::2], rotated[1::2]),
            ):
                order = (*firsts, *unrotated[:half], *seconds, *unrotated[half:])
                for sign in (1, -1):
                    frequencies = [sign * value for value in table.double().tolist()]
                    yield KeyRotation((*frequencies, *(0.0,) * half), order)
