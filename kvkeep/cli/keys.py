"""`kvkeep keys`: the API keys of a server."""

from pathlib import Path

import click

from kvkeep.cli import options
from kvkeep.cli.lazy import LazyCommand, LazyGroup
from kvkeep.cli.output import plural, say
from kvkeep.server import key_file

SUBCOMMANDS = {
    "new": LazyCommand("keys:new", "Make a key, and add its hash to a file."),
    "hash": LazyCommand("keys:hash_", "Replace the keys in a file by their hashes."),
}


@click.group(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def keys() -> None:
    """Make API keys for `kvkeep serve --api-key-file`, stored as hashes."""


@options.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def new(
    file: Path,
    note: str | None = options.option(metavar="TEXT", help="Comment above the key's hash."),
) -> None:
    """Make a random key, add its hash to FILE, and print the key.

    The key itself is not stored: give it to its user. A running server accepts it only after a
    restart.
    """
    click.echo(key_file.add_key(file, note))
    say(f"{file} has the hash of this key; the key is not stored")


@options.command("hash")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def hash_(file: Path) -> None:
    """Replace the keys in FILE by their hashes; comments and settings stay.

    Users keep their keys, and owners their sessions. Only random keys are safe as hashes: a word or
    a name can be guessed.
    """
    count = key_file.hash_keys_in_place(file)
    say(f"{file}: {plural(count, 'key')} replaced" if count else f"{file} has only hashes")
