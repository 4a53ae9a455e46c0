"""Error of keys that are rotated again at each shift, which is why kvkeep never rewrites keys.

Keys of a real text are shifted by one position many times, rounded to their dtype each time, and
compared with the same keys rotated once by the whole distance in float32.
"""

import click
import torch
from torch import Tensor

from benchmarks.command import Measurement
from kvkeep import load_model
from kvkeep.cache.rope import Rope, rotate
from kvkeep.evaluate.haystack import manual_text
from kvkeep.models.hub.source import DEFAULT_MODEL

SHIFTS = (1, 10, 100, 1000)


def rotation_error(keys: Tensor, rope: Rope, shifts: int) -> float:
    """Return the relative error in the Euclidean norm. keys: `[cells, heads, head_dim]`."""
    one_position = rope.rotation_at([-1])
    shifted = keys
    for _ in range(shifts):
        shifted = rotate(shifted, one_position)
    exact = rotate(keys.float(), rope.rotation_at([-shifts]))
    return float((shifted.float() - exact).norm() / exact.norm())


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--cells", default=512, type=click.IntRange(1), help="Keys per layer and head.")
@click.option("--model", "name", default=DEFAULT_MODEL, help="As for `kvkeep generate`.")
def rerotation(cells: int, name: str) -> None:
    """Print the error of bfloat16 keys after 1, 10, 100 and 1000 shifts by one position."""
    model = load_model(name, progress=True)
    session = model.session(policy="full")
    session.feed(model.text.encode(manual_text())[:cells])
    cells_read = session.cache.segments[-1].read(0, session.cache.cells).keys
    # Layers and KV heads are all heads of one cell to the rotation.
    keys = cells_read.flatten(0, 1).transpose(0, 1).to(torch.bfloat16)
    for shifts in SHIFTS:
        error = rotation_error(keys, session.cache.rope, shifts)
        click.echo(f"{shifts:>5} shifts: {error:.2%}")


if __name__ == "__main__":
    rerotation()
