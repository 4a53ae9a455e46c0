"""`kvkeep passkey` and `kvkeep needle`: recall of hidden facts after compression."""

import click

from kvkeep.cli.evaluate.options import (
    ModelChoice,
    RecallChoice,
    haystack_option,
    model_options,
    recall_options,
)
from kvkeep.cli.options import OutputChoice, output_options, whole_number
from kvkeep.evaluate.facts import KEYS
from kvkeep.evaluate.haystack import TEXTS, Haystack
from kvkeep.evaluate.needle import Needle, keys_of
from kvkeep.evaluate.passkey import PASSKEY_TASKS, Passkey
from kvkeep.evaluate.tasks import TASKS


@click.command(short_help="Hide a key in a long text, compress, ask for it.")
@click.option(
    "--junk",
    metavar="N",
    type=whole_number(1),
    default=250,
    help="Repetitions of the text that hides it.",
)
@click.option(
    "--pos",
    metavar="N",
    type=whole_number(0),
    show_default="as --depths",
    help="Repetition that the key comes before.",
)
@click.option(
    "--group",
    metavar="N",
    type=whole_number(2),
    default=2,
    help="Cells that become one, where --ratio is not given.",
)
@recall_options(
    PASSKEY_TASKS, "One fact; several, one asked for; two, both asked of the same memory."
)
@model_options()
@output_options
def passkey(
    junk: int,
    pos: int | None,
    group: int,
    recall: RecallChoice,
    choice: ModelChoice,
    output: OutputChoice,
) -> None:
    """Hide a key in a long text, compress what was read, and ask for the key.

    The text is that of llama.cpp's example of this name. The question comes after compression, so
    that nothing can look ahead to it. The same text is also asked for the key uncompressed.
    """
    keys = recall.keys or KEYS[0]
    samples = Passkey(junk, keys, recall.task, recall.where(pos), recall.seed)
    recall.check(choice)
    output.check()

    from kvkeep.cli.evaluate.recall_runner import Experiment, run_recall

    model = choice.load(output.progress)
    experiment = Experiment("passkey", samples, {"keys": keys, "junk": junk, "pos": pos})
    run_recall(experiment, model, choice, recall, recall.ratio or float(group), output)


DEFAULT_RATIO = 2.0  # of `needle`


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
@output_options
def needle(
    tokens: int, haystack: str, recall: RecallChoice, choice: ModelChoice, output: OutputChoice
) -> None:
    """Hide made-up facts in a real text, compress what was read, and ask for them.

    Each sample is a stretch of the text from anywhere on, with each fact between two sentences.
    The question comes after compression. The same text is also asked for it uncompressed.
    """
    keys = keys_of(recall.task, recall.keys)
    recall.check(choice)
    output.check()

    from kvkeep.cli.evaluate.recall_runner import Experiment, run_recall

    model = choice.load(output.progress)
    text = Haystack.of(TEXTS[haystack](), lambda text: len(model.text.encode(text)))
    samples = Needle(text, tokens, keys, recall.task, recall.where(), recall.seed)
    settings = {"keys": keys, "haystack": haystack, "text_tokens": tokens}
    experiment = Experiment("needle", samples, settings)
    run_recall(experiment, model, choice, recall, recall.ratio or DEFAULT_RATIO, output)
