"""`kvkeep needle`: whether a sentence in a real text is still known when memory was compressed."""

import click

from kvkeep.cli.evaluate.options import (
    ModelChoice,
    RecallChoice,
    haystack_option,
    model_options,
    recall_options,
)
from kvkeep.cli.options import Output, output_options, whole_number
from kvkeep.evaluate.haystack import TEXTS, Haystack
from kvkeep.evaluate.needle import Needle, keys_of
from kvkeep.evaluate.tasks import TASKS

GROUP = 2.0  # the ratio where none is given


@click.command(short_help="Hide a sentence in real text, compress, ask for it.")
@click.option(
    "--tokens",
    metavar="N",
    type=whole_number(16),
    default=4000,
    help="Of the text, about.",
)
@haystack_option()
@recall_options(TASKS, "What is hidden, and how it is asked for: see docs/compression.md.")
@model_options()
@output_options()
def needle(
    tokens: int, haystack: str, asked: RecallChoice, choice: ModelChoice, output: Output
) -> None:
    """Hide made-up facts in a real text, compress what was read, and ask for them.

    Each sample is a stretch of the text from anywhere on, with each fact between two sentences.
    The question comes after compression. The same text is also asked for it uncompressed.
    """
    keys = keys_of(asked.task, asked.keys)
    asked.check(choice)
    output.check()

    from kvkeep.cli.evaluate.recall_runner import Experiment, run_recall

    model = choice.load(output.progress)
    text = Haystack.of(TEXTS[haystack](), lambda text: len(model.text.encode(text)))
    samples = Needle(text, tokens, keys, asked.task, asked.where(), asked.seed)
    settings = {"keys": keys, "haystack": haystack, "text_tokens": tokens}
    experiment = Experiment("needle", samples, settings)
    run_recall(experiment, model, choice, asked, asked.ratio or GROUP, output)
