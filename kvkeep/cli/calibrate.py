"""`kvkeep calibrate`: measure a model once, for compression methods that need it."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.output import say
from kvkeep.cli.text_input import read_text
from kvkeep.cli.which_model import DEVICE, DTYPE, MODEL, load_named
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.snapshots.header import check_output_path
from kvkeep.types import DtypeName

if TYPE_CHECKING:
    from kvkeep import Model


@click.command()
@click.argument("text", metavar="TEXT", type=click.Path())
@click.option(
    "-o",
    "--output",
    metavar="FILE.kvcal",
    type=click.Path(path_type=Path),
    show_default="where every command finds it",
    help="Where it is kept.",
)
@MODEL
@DTYPE
@DEVICE
@click.option("-q", "--quiet", is_flag=True, help="No progress bars, no closing line.")
def calibrate(
    text: str, output: Path | None, model: str, dtype: DtypeName, device: str, quiet: bool
) -> None:
    """Measure a model on the file TEXT ("-": standard input), for compressing its memory.

    Some ten thousand tokens of the kind of text to come are enough. kvzap decides by it, and policy
    archive does so from then on. A file of its own is given as --calibration to commands that
    compress; expected_attention and fitted decide better with it, too.

    What is done is kept in FILE.kvcal.unfinished: the same command goes on from there.
    """
    content = read_text(text)
    if not content:
        raise InvalidArgument(f"{text} is empty: expected some text")
    if output is not None:
        check_output_path(output, "calibration")
    measure(
        load_named(model, dtype, device, weights=None, progress=not quiet), content, output, quiet
    )


def measure(model: "Model", text: str, output: Path | None, quiet: bool) -> None:
    """Calibrate a model on a text, save the result and print a summary.

    output: the calibration file; None for the default path, where every command finds it.
    Raises StoreError if its folder cannot be created.
    """
    from tqdm import tqdm

    from kvkeep.compression.calibration.calibration import calibration_path
    from kvkeep.compression.calibration.measure import calibrate as calibration_of
    from kvkeep.compression.calibration.measure import calibration_tokens

    if output is None:
        output = calibration_path(model)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{output.parent} cannot be created: {error.strerror or error}"
            ) from error
        check_output_path(output, "calibration")
    unfinished = output.with_name(f"{output.name}.unfinished")
    ids = model.text.encode(text)
    hidden = True if quiet else None  # None: tqdm shows the bar on terminals only
    total = calibration_tokens(model, len(ids))
    with tqdm(total=total, desc="measuring", unit="tok", disable=hidden, leave=False) as bar:

        def progress(tokens: int) -> None:
            bar.update(tokens)

        calibration = calibration_of(model, ids, progress, unfinished)
    size = calibration.save(output)
    if not quiet:
        say(
            f"{output}: {size / 1e6:.1f} MB, from {len(ids)} tokens; R² of the surrogate on "
            f"held-out text: {calibration.r_squared:.2f}"
        )
