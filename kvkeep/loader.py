"""`load_model`: loads a model by name, computed by kvkeep or by transformers."""

from typing import TYPE_CHECKING

from kvkeep import validation
from kvkeep.errors import InvalidArgument, ModelError
from kvkeep.model import Model
from kvkeep.model import load_model as load_own
from kvkeep.models.hub.source import DEFAULT_MODEL
from kvkeep.types import DtypeName, WeightsName

if TYPE_CHECKING:
    from kvkeep.integrations.transformers import TransformersModel

BY_TRANSFORMERS = "transformers:"  # prefix of a model that transformers computes


def load_model(
    model: str = DEFAULT_MODEL,
    *,
    dtype: DtypeName = "bfloat16",
    device: str = "cpu",
    weights: WeightsName | None = None,
    progress: bool = False,
) -> Model:
    """Load a model, pulling or converting it first if that was not done before.

    Args:
        model: a known name, a GGUF file, a local Hugging Face folder, or a hub id; or
            "transformers:" and such a folder, for architectures that kvkeep does not compute.
        dtype: "bfloat16" or "float32", of weights and cells.
        device: any torch device.
        weights: what a decode step reads for each token: "bf16", "int8" or "int4". None for what
            the model's file has: packed matrices of a GGUF file are read as they are, and held in
            no other form. Other weights are rounded, or unpacked first. Prompts are multiplied by
            weights in `dtype` in any case.
        progress: show progress bars on standard error.

    Warns with SlowPathWarning, once per process, if another processor, or kernels that were not
    built, would compute it faster; `Model.path` says how it is computed.

    Raises:
        ModelNotFound, BadModelFile, UnsupportedModel: see their messages.
        InvalidArgument: an unknown dtype, a device that is not there, packed weights where there
            are no compiled kernels for them.
    """
    name = str(validation.path("model", model))
    if not name.startswith(BY_TRANSFORMERS):
        return load_own(name, dtype=dtype, device=device, weights=weights, progress=progress)
    if weights is not None:
        raise InvalidArgument(
            f"weights={weights!r} are read by kvkeep's own forwards, and {name} is computed by "
            "transformers: leave weights out"
        )
    return _by_transformers(name, dtype, device, progress)


def _by_transformers(
    name: str, dtype: DtypeName, device: str, progress: bool
) -> "TransformersModel":
    try:
        from kvkeep.integrations.transformers.model import load_folder
    except ImportError as error:
        raise ModelError(
            f'{name} is computed by transformers: pip install "kvkeep[transformers]" ({error})'
        ) from error
    return load_folder(name, name.removeprefix(BY_TRANSFORMERS), dtype, device, progress)
