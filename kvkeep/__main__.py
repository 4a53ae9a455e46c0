"""`python -m kvkeep`."""

from kvkeep.cli.start import run

run()
