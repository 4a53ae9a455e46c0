"""`kvkeep evaluate`: what a memory still knows, by every measure there is."""

import click

from kvkeep.cli.evaluate.grid import grid
from kvkeep.cli.evaluate.needle import needle
from kvkeep.cli.evaluate.passkey import passkey
from kvkeep.cli.perplexity import perplexity


@click.group()
def evaluate() -> None:
    """Measure what a memory still knows, compressed or bounded."""


for _command in (passkey, needle, grid, perplexity):
    evaluate.add_command(_command)
