"""`kvkeep batch`: many prompts, asked together, and what became of each in a file."""

from kvkeep.cli.batch.command import batch

__all__ = ["batch"]
