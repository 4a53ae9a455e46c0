"""`python -m kvkeep`."""

from kvkeep.cli.main import main

main(prog_name="kvkeep")
