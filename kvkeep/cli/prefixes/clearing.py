"""`kvkeep prefixes clear` and `kvkeep prefixes gc`: nothing goes that is not evaluated again."""

import click

from kvkeep.cli.memory import PREFIX_BYTES, open_prefix_store
from kvkeep.cli.options import nbytes
from kvkeep.cli.report import megabytes


@click.command()
def clear() -> None:
    """Remove all beginnings of prompts. They are evaluated anew when they come again."""
    _remove(0)


@click.command()
@click.option(
    "--max-bytes", metavar="SIZE", type=nbytes, default=f"{PREFIX_BYTES}", help="What may stay."
)
def gc(max_bytes: int) -> None:
    """Remove the blocks used longest ago, and what killed processes left, down to a size."""
    _remove(max_bytes)


def _remove(most: int) -> None:
    store = open_prefix_store()
    freed = store.gc(most)
    click.echo(f"removed {megabytes(freed)}, {megabytes(store.nbytes)} left")
