"""`kvkeep calibrate`: measures, once for a model, what compression decides by."""

from pathlib import Path

import click

from kvkeep.cli.saying import say
from kvkeep.cli.text_input import read_text
from kvkeep.cli.which_model import DEVICE, DTYPE, MODEL, load_named
from kvkeep.errors import InvalidArgument
from kvkeep.store.output_file import check_store_place


@click.command()
@click.argument("text", metavar="TEXT", type=click.Path())
@click.option(
    "-o",
    "--output",
    metavar="FILE.kvcal",
    type=click.Path(path_type=Path),
    required=True,
    help="Where it is kept.",
)
@MODEL
@DTYPE
@DEVICE
@click.option("-q", "--quiet", is_flag=True, help="No progress bars, no closing line.")
def calibrate(text: str, output: Path, model: str, dtype: str, device: str, quiet: bool) -> None:
    """Measure a model on the file TEXT ("-": standard input), for compressing its memory.

    Some ten thousand tokens of the kind of text to come are enough. Give the result as
    --calibration to commands that compress: kvzap decides by it, and expected_attention and fitted
    decide better with it.

    What is done is kept in FILE.kvcal.unfinished: the same command goes on from there.
    """
    written = read_text(text)
    if not written:
        raise InvalidArgument(f"{text} is empty: expected some text")
    check_store_place(output, "calibration")
    unfinished = output.with_name(f"{output.name}.unfinished")

    from tqdm import tqdm

    from kvkeep.session.calibrating import calibrate as measure
    from kvkeep.session.calibrating import calibration_tokens

    loaded = load_named(model, dtype, device, weights=None, progress=not quiet)
    ids = loaded.text.encode(written)
    hidden = True if quiet else None  # None: unless it is a terminal
    total = calibration_tokens(loaded, len(ids))
    with tqdm(total=total, desc="measuring", unit="tok", disable=hidden, leave=False) as bar:

        def progress(tokens: int) -> None:
            bar.update(tokens)

        calibration = measure(loaded, ids, progress, unfinished)
    size = calibration.save(output)
    if not quiet:
        say(
            f"{output}: {size / 1e6:.1f} MB, from {len(ids)} tokens; R² of the surrogate on text "
            f"held back: {calibration.r_squared:.2f}"
        )
