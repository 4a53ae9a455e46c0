"""A folder that transformers loads, as a model of kvkeep."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import AutoModelForCausalLM
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from kvkeep import validation
from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.integrations.transformers.model import TransformersModel, from_transformers
from kvkeep.model import DTYPES, on_device
from kvkeep.models.hub.source import resolve
from kvkeep.models.weights.packed import converted_file
from kvkeep.runtime.cpu import fit_threads
from kvkeep.types import DtypeName


def load_folder(
    name: str, model: str, dtype: DtypeName, device: str, progress: bool
) -> TransformersModel:
    """name: as it was asked for. model: a folder, or what kvkeep finds one by.

    Raises ModelNotFound, BadModelFile, UnsupportedModel, InvalidArgument.
    """
    dtype = validation.one_of("dtype", dtype, DTYPES)
    where = on_device(device)
    fit_threads()
    folder = resolve(model, progress)
    if converted_file(folder) is not None:
        raise UnsupportedModel(
            f"{model} is packed, which transformers does not read: `kvkeep models export {model} "
            "FOLDER` unpacks it, then say transformers:FOLDER"
        )
    try:
        with _progress(progress):
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=DTYPES[dtype], local_files_only=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise BadModelFile(f"transformers cannot load {folder}: {error}") from error
    loaded.to(where).eval()  # type: ignore[arg-type]  # its wrapper hides that it takes one
    return from_transformers(loaded, folder, name)


@contextmanager
def _progress(shown: bool) -> Iterator[None]:
    """With transformers' own progress bar, or without, and afterwards as before."""
    before = is_progress_bar_enabled()
    _show(shown)
    try:
        yield
    finally:
        _show(before)


def _show(shown: bool) -> None:
    if shown:
        enable_progress_bar()  # type: ignore[no-untyped-call]
    else:
        disable_progress_bar()  # type: ignore[no-untyped-call]
