"""Making a calibration: text is run through the model, and what its sessions see is measured."""

from collections.abc import Callable, Sequence

import torch

from kvkeep import arguments
from kvkeep.errors import InvalidArgument
from kvkeep.loaded import LoadedModel
from kvkeep.methods.measured import Measured
from kvkeep.policies import Sliding
from kvkeep.session.calibration import Calibration
from kvkeep.session.session import Session

STEP = 512  # tokens evaluated at once


@torch.inference_mode()
def calibrate(
    model: LoadedModel, ids: Sequence[int], progress: Callable[[int], None] | None = None
) -> Calibration:
    """Runs text through the model and measures what compression decides by.

    Args:
        ids: some ten thousand tokens of the kind of text to come.
        progress: called after each step with the number of tokens in it.

    Raises InvalidArgument for too few tokens.
    """
    ids = arguments.token_ids("ids", ids, model.spec.vocab_size)
    progress = arguments.progress(progress)
    step = min(STEP, model.spec.max_positions // 4)
    if len(ids) < 3 * step:
        raise InvalidArgument(f"a calibration needs {3 * step} tokens or more; found {len(ids)}")
    measured = Measured(model.decoder.new_cache().layout)
    session = Session(model, Sliding(4 * step), step)
    session.cache.observe()
    for first in range(0, len(ids), step):
        chunk = ids[first : first + step]
        session.feed(chunk)
        measured.take(session.cache, step)
        if progress:
            progress(len(chunk))
    return Calibration(measured.statistics(), model.fingerprint.saved(), model.name, len(ids))
