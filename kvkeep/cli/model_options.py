"""Options for the model, its dtype, weights and device; loading of the model that they name."""

import os
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import click
from click.shell_completion import CompletionItem

from kvkeep.cli.options import choice_option, integer_option, option, require_utf8
from kvkeep.cli.output import say, spinner
from kvkeep.errors import ModelNotFound
from kvkeep.models.hub.library import pulled_models
from kvkeep.models.hub.names import named_models, split_prefix
from kvkeep.models.hub.source import DEFAULT_MODEL, KNOWN_MODELS, local_folder
from kvkeep.types import DtypeName, WeightFormat

if TYPE_CHECKING:
    from kvkeep import Model

# Listed here because the modules that define them import torch, which would slow down --help.
MODEL_SECTION = "Model"  # heading of these options in the help
DTYPE_NAMES = get_args(DtypeName)
WEIGHT_FORMAT_NAMES = get_args(WeightFormat)


def complete_models(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of known, added and pulled models, or else file names."""
    names = sorted({*KNOWN_MODELS, *named_models(), *(model.name for model in pulled_models())})
    completions = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return completions or [CompletionItem(incomplete, type="file")]


MODEL_OPTION = option(
    "-m",
    section=MODEL_SECTION,
    metavar="NAME",
    default=DEFAULT_MODEL,
    shell_complete=complete_models,
    help="Known or added name, GGUF file, folder, or hub id (owner/name, owner/name:Q4_K_M); "
    "transformers:FOLDER runs it by transformers.",
)
SAVED_MODEL_OPTION = option(
    "-m", metavar="NAME", show_default="as it was saved", help="Model of the session."
)
DTYPE_OPTION = choice_option(
    DTYPE_NAMES, "Data type of weights and KV cache.", default=DTYPE_NAMES[0], section=MODEL_SECTION
)
WEIGHTS_OPTION = choice_option(
    WEIGHT_FORMAT_NAMES,
    "Format in which decode reads the weights.",
    show_default="as in the file",
    section=MODEL_SECTION,
)
DEVICE_OPTION = option(metavar="NAME", default="cpu", section=MODEL_SECTION, help="Torch device.")


def prefill_step_option(default: int) -> Any:
    return integer_option(
        default=default,
        help="Prompt tokens evaluated at once. With --kv-bits, results depend on it.",
    )


PREFILL_STEP_OPTION = prefill_step_option(512)


def load_by_name(
    name: str, dtype: DtypeName, device: str, weights: WeightFormat | None, progress: bool
) -> "Model":
    """Load a model by name; warn if it has no fast kernels. weights: None for the file's."""
    require_utf8(name, "the model's name")  # the name is written to reports and sessions
    name = absolute_name(name)
    # A download has progress bars of its own, which a spinner would disturb.
    is_downloaded = local_folder(name) is not None
    with spinner(f"loading {name}", progress and is_downloaded), warnings.catch_warnings():
        from kvkeep import load_model
        from kvkeep.errors import SlowPathWarning
        from kvkeep.executors import slow_path_message

        warnings.simplefilter("ignore", SlowPathWarning)  # printed below as one line
        model = load_model(name, dtype=dtype, device=device, weights=weights, progress=progress)
    if not click.get_current_context().params.get("quiet"):
        _warn_once(slow_path_message(model.path))
    return model


def absolute_name(name: str) -> str:
    """Return a model's name, as an absolute path if it is that of a file or folder.

    Sessions store it, and may be continued from another working directory.
    """
    prefix, source = split_prefix(name)
    path = os.path.expanduser(source)  # as it is for "~nobody/model"
    if source.lower() in KNOWN_MODELS or source in named_models() or not os.path.exists(path):
        return name
    return f"{prefix}{os.path.abspath(path)}"


@cache  # a second call with the same text does nothing
def _warn_once(text: str) -> None:
    if text:
        say(f"kvkeep: {text}")


def require_local(name: str, file: object) -> None:
    """Raise ModelNotFound if a file's model is not on this machine. Files cause no downloads."""
    if local_folder(name) is None:
        raise ModelNotFound(
            f"{file} was saved with the model {name!r}, which is not on this machine: pass it with "
            "--model, or fetch it with `kvkeep pull`"
        )
