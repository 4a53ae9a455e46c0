"""`kvkeep evaluate`: measure the quality of a bounded or compressed memory."""

import click

from kvkeep.cli.lazy import LazyCommand, LazyGroup

EVALUATIONS = {
    "perplexity": LazyCommand("perplexity:perplexity", "Measure the perplexity of a text."),
    "passkey": LazyCommand(
        "evaluate.recall:passkey", "Hide a key in a long text, compress the cache, ask for the key."
    ),
    "needle": LazyCommand(
        "evaluate.recall:needle", "Hide facts in a real text, compress the cache, ask for them."
    ),
    "grid": LazyCommand("evaluate.grid:grid", "Measure all compression methods on all tasks."),
}


@click.group(cls=LazyGroup, lazy_commands=EVALUATIONS)
def evaluate() -> None:
    """Measure perplexity and recall of a bounded or compressed KV cache."""
