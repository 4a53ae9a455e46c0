"""`kvkeep passkey` and `kvkeep needle`: recall of hidden facts after compression."""

from kvkeep.cli.evaluate.options import (
    HAYSTACK_OPTION,
    ModelOptions,
    RecallOptions,
    load_haystack,
    recall_options,
)
from kvkeep.cli.options import OUTPUT_OPTIONS, OutputOptions, command, integer_option, option_group
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import PASSKEY_TASKS, NeedleDataset, PasskeyDataset, task_key_type
from kvkeep.evaluate.samples import KEY_TYPES
from kvkeep.evaluate.tasks import TASKS

DEFAULT_NEEDLE_RATIO = 2.0


@command(short_help="Hide a key in a long text, compress the cache, ask for the key.")
def passkey(
    junk: int = integer_option(default=250, help="Repetitions of the filler text."),
    pos: int | None = integer_option(
        minimum=0, show_default="as --depths", help="Repetition before which the key is inserted."
    ),
    group: int = integer_option(
        minimum=2, default=2, help="Compression ratio, if --ratio is not given."
    ),
    recall: RecallOptions = recall_options(
        PASSKEY_TASKS,
        "single: one fact; several: four facts, one question; second: two facts, two questions.",
    ),
    options: ModelOptions = option_group(ModelOptions),
    output: OutputOptions = OUTPUT_OPTIONS,
) -> None:
    """Hide a key in a long text, compress the cache, and ask for the key.

    The text is that of llama.cpp's passkey example. The question is fed after compression, so
    compression cannot use it. The same question is fed to the uncompressed cache, for comparison.
    """
    if pos is not None and recall.depths is not None:
        raise InvalidArgument("--pos and --depths both say where the key is: use one of them")
    key_type = recall.keys or KEY_TYPES[0]
    dataset = PasskeyDataset(junk, key_type, recall.task, recall.placement(pos), recall.seed)
    recall.check(options)
    output.check()

    from kvkeep.cli.evaluate.recall_runner import RecallRun

    model = options.load(output.progress)
    task_settings = {"keys": key_type, "junk": junk, "pos": pos}
    ratio = recall.ratio or float(group)
    RecallRun("passkey", dataset, task_settings, model, options, recall, ratio, output).run()


@command(short_help="Hide facts in a real text, compress the cache, ask for them.")
def needle(
    tokens: int = integer_option(minimum=16, default=4000, help="Approximate tokens of the text."),
    haystack: str = HAYSTACK_OPTION,
    recall: RecallOptions = recall_options(
        TASKS, "Kind of facts and questions: see docs/compression-measurements.md."
    ),
    options: ModelOptions = option_group(ModelOptions),
    output: OutputOptions = OUTPUT_OPTIONS,
) -> None:
    """Hide made-up facts in a real text, compress the cache, and ask for them.

    Each sample is a random stretch of the text with the facts inserted between sentences. The
    question is fed after compression. The same question is fed to the uncompressed cache, for
    comparison.
    """
    key_type = task_key_type(recall.task, recall.keys)
    recall.check(options)
    output.check()

    from kvkeep.cli.evaluate.recall_runner import RecallRun

    model = options.load(output.progress)
    text = load_haystack(haystack, model)
    dataset = NeedleDataset(text, tokens, key_type, recall.task, recall.placement(), recall.seed)
    task_settings = {"keys": key_type, "haystack": haystack, "text_tokens": tokens}
    ratio = recall.ratio or DEFAULT_NEEDLE_RATIO
    RecallRun("needle", dataset, task_settings, model, options, recall, ratio, output).run()
