"""`kvkeep prefixes clear` and `kvkeep prefixes gc`: nothing goes that is not evaluated again."""

import click

from kvkeep.cli.memory import PREFIX_BYTES, open_prefix_store
from kvkeep.cli.options import nbytes
from kvkeep.cli.report import megabytes
from kvkeep.cli.store import store_option, told_store
from kvkeep.objects.address import is_url, open_objects


@click.command()
@store_option
def clear() -> None:
    """Remove all beginnings of prompts. They are evaluated anew when they come again."""
    _remove(0)


@click.command()
@click.option(
    "--max-bytes", metavar="SIZE", type=nbytes, default=f"{PREFIX_BYTES}", help="What may stay."
)
@store_option
def gc(max_bytes: int) -> None:
    """Remove the blocks used longest ago, and what killed processes left, down to a size.

    In a --store that is a URL, those of all owners that were written longest ago: it does not tell
    when they were read.
    """
    _remove(max_bytes)


def _remove(most: int) -> None:
    freed, left = _freed(most)
    click.echo(f"removed {megabytes(freed)}, {megabytes(left)} left")


def _freed(most: int) -> tuple[int, int]:
    """Bytes; and those that are left."""
    shared = told_store()
    if shared is not None and is_url(shared):
        from kvkeep.shared.prefix_room import make_room

        return make_room(open_objects(shared), most)
    store = open_prefix_store()
    return store.gc(most), store.nbytes
