"""`kvkeep evaluate`: measure the quality of a bounded or compressed memory."""

import click

from kvkeep.cli.lazy import LazyCommand, LazyGroup

EVALUATIONS = {
    "perplexity": LazyCommand("perplexity:perplexity", "Measure the perplexity of a text."),
    "passkey": LazyCommand(
        "evaluate.recall:passkey", "Hide a key in a long text, compress, ask for it."
    ),
    "needle": LazyCommand(
        "evaluate.recall:needle", "Hide a sentence in real text, compress, ask for it."
    ),
    "grid": LazyCommand("evaluate.grid:grid", "Measure all methods of compression on all tasks."),
}


@click.group(cls=LazyGroup, lazy=EVALUATIONS)
def evaluate() -> None:
    """Measure what a memory still knows, compressed or bounded."""
