"""`kvkeep generate`: continues a text."""

import click

from kvkeep.cli.options import (
    SINKS,
    WHOLE_PROMPT,
    Memory,
    Output,
    SamplingChoice,
    memory_options,
    output_options,
    sampling_options,
    whole_number,
)
from kvkeep.cli.text_input import read_prompt


@click.command()
@click.option("-p", "--prompt", metavar="TEXT", help="Text to continue, as it is.")
@click.option("-f", "--file", metavar="FILE", help='File with the text; "-": standard input.')
@click.option(
    "-n",
    "--max-tokens",
    metavar="N",
    type=whole_number(-1),
    default=256,
    help="Most tokens to write; -1: no end.",
)
@memory_options(
    click.option(
        "--keep",
        metavar="N",
        type=whole_number(WHOLE_PROMPT),
        default=SINKS,
        help="First tokens never forgotten; -1: the prompt.",
    )
)
@sampling_options()
@click.option("--ignore-eos", is_flag=True, help="Write on after the model's end of text.")
@output_options()
def generate(
    prompt: str | None,
    file: str | None,
    max_tokens: int,
    ignore_eos: bool,
    memory: Memory,
    sampling: SamplingChoice,
    output: Output,
) -> None:
    """Continue a text.

    The text comes from --file, then --prompt, or else from standard input. It goes to the model
    as it is: no special token and no chat template is added. What the model writes streams to
    standard output; progress and the closing line go to standard error. Ctrl-C ends it.
    """
    text = read_prompt(prompt, file)
    output.check()
    how = sampling.resolve()
    memory.check()

    from kvkeep.cli.run import Run

    model = memory.load(output.progress)
    assert memory.keep is not None, "--keep has a default here"
    run = Run("generate", model, memory.session(model, memory.keep), output, how.seed)
    with run.reported():
        run.feed(model.text.encode(text))
        reason = run.write(None if max_tokens < 0 else max_tokens, how, ignore_eos)
    run.close(reason)
