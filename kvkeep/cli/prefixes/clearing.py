"""`kvkeep prefixes clear` and `kvkeep prefixes gc`: nothing goes that is not evaluated again."""

import click

from kvkeep.cli.memory import PREFIX_BYTES, open_prefix_store
from kvkeep.cli.options import nbytes
from kvkeep.cli.prefixes.where import shared_option
from kvkeep.cli.report import megabytes
from kvkeep.storage.objects.address import open_object_store


@click.command()
@shared_option
def clear(store: str | None) -> None:
    """Remove all beginnings of prompts. They are evaluated anew when they come again."""
    _remove(store, 0)


@click.command()
@click.option(
    "--max-bytes",
    metavar="SIZE",
    type=nbytes,
    show_default=f"{megabytes(PREFIX_BYTES)} on this machine",
    help="What may stay.",
)
@shared_option
def gc(store: str | None, max_bytes: int | None) -> None:
    """Remove the blocks used longest ago, and what killed processes left, down to a size.

    In a --store, those of all owners that were written longest ago: it does not tell when they were
    read.
    """
    if store is not None and max_bytes is None:
        raise click.UsageError("--store needs --max-bytes: it is of all who share the store")
    _remove(store, PREFIX_BYTES if max_bytes is None else max_bytes)


def _remove(shared: str | None, most: int) -> None:
    freed, left = _freed(shared, most)
    where = "" if shared is None else f" in {shared}"
    click.echo(f"removed {megabytes(freed)}, {megabytes(left)} left{where}")


def _freed(shared: str | None, most: int) -> tuple[int, int]:
    """Bytes; and those that are left."""
    if shared is not None:
        from kvkeep.storage.prefixes.inventory import make_room

        return make_room(open_object_store(shared), most)
    store = open_prefix_store()
    return store.gc(most), store.nbytes
