"""`kvkeep needle`: whether a sentence in a real text is still known when memory was compressed."""

import click

from kvkeep.cli.evaluate.options import (
    ModelChoice,
    RecallChoice,
    model_options,
    recall_options,
)
from kvkeep.cli.options import Output, output_options, whole_number
from kvkeep.evaluate.needle import Haystack, Needle

GROUP = 2.0  # the ratio where none is given


@click.command(short_help="Hide a sentence in real text, compress, ask for it.")
@click.option(
    "--tokens",
    metavar="N",
    type=whole_number(16),
    default=4000,
    help="Of the text, about.",
)
@recall_options()
@model_options()
@output_options()
def needle(tokens: int, asked: RecallChoice, choice: ModelChoice, output: Output) -> None:
    """Hide a made-up fact in Python's own manual, compress what was read, and ask for it.

    Each sample is a stretch of the manual from anywhere on, with the fact between two sentences.
    The question comes after compression. The same text is also asked for it uncompressed.
    """
    asked.check()
    output.check()

    from kvkeep.cli.evaluate.recalling import Experiment, run_recall
    from kvkeep.evaluate.manual import manual_text

    model = choice.load(output.progress)
    haystack = Haystack.of(manual_text(), lambda text: len(model.text.encode(text)))
    samples = Needle(haystack, tokens, asked.keys, asked.task, asked.where(), asked.seed)
    experiment = Experiment("needle", samples, {"text_tokens": tokens})
    run_recall(experiment, model, choice, asked, asked.ratio or GROUP, output)
