"""Making a calibration: text is run through the model, and what its sessions see is measured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from kvkeep import validation
from kvkeep.cache import Cells
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.calibration.sums import CalibrationSums
from kvkeep.compression.methods import Statistics
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.statistics import Surrogate, features
from kvkeep.compression.plan import SINKS
from kvkeep.compression.reconstruction import reconstruction
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Full, Sliding
from kvkeep.session.memory import Memory
from kvkeep.session.session import Session

STEP = 512  # tokens evaluated at once
STRETCH = 16  # steps that are measured in one session
CONTEXT, CONTEXTS = 1024, 20  # tokens that are read and then repeated, so often at most
EVERY = 5  # one context of so many is held back
LOWEST = -27.6  # log of a share, 1e-12: below it nothing is told apart

Progress = Callable[[int], None]


@torch.inference_mode()
def calibrate(
    model: LoadedModel,
    ids: Sequence[int],
    progress: Progress | None = None,
    unfinished: Path | None = None,
) -> Calibration:
    """Runs text through the model and measures what compression decides by.

    Of the first 1,024 tokens of each twentieth of the text it is also measured what reconstruction
    gives each cell, and a surrogate is fitted to that, on four of five of them; the others say how
    good it is.

    Args:
        ids: some ten thousand tokens of the kind of text to come.
        progress: called after each step with the number of tokens in it; see `calibration_tokens`.
        unfinished: a file that keeps what is done until all of it is, so that a run that ends
            before can be gone on with: the result is the same to the bit on the same machine.

    Raises InvalidArgument for too few tokens; StoreError and its kinds where that file cannot be
    written, or is no such file.
    """
    ids = validation.token_ids("ids", ids, model.spec.vocab_size)
    progress = validation.progress(progress) or (lambda tokens: None)
    parts = _parts(model, len(ids))
    layout, of = model.decoder.new_cache().layout, _digest(model, ids)
    sums = CalibrationSums(layout)
    if unfinished is not None:
        sums = CalibrationSums.begun(unfinished, of, layout, len(parts))
    progress(sum(part.tokens for part in parts[: sums.done]))
    for part in parts[sums.done :]:
        part.measure(model, ids, sums, progress)
        sums.done += 1
        if unfinished is not None:
            sums.save(unfinished, of)
    found = _calibration(model, len(ids), sums)
    if unfinished is not None:
        unfinished.unlink(missing_ok=True)
    return found


def calibration_tokens(model: LoadedModel, count: int) -> int:
    """How many tokens `calibrate` evaluates in all, for a text of so many: some of them again.

    Raises InvalidArgument for too few.
    """
    return sum(part.tokens for part in _parts(model, count))


@dataclass(frozen=True)
class _Part(ABC):
    """Tokens `first ... upto - 1`, measured as a whole or not at all."""

    first: int
    upto: int

    @property
    def tokens(self) -> int:
        """That are evaluated for it."""
        return self.upto - self.first

    @abstractmethod
    def measure(
        self, model: LoadedModel, ids: list[int], sums: CalibrationSums, progress: Progress
    ) -> None:
        """Adds what is seen to the sums."""


class _Stretch(_Part):
    """Queries, and how alike keys may be to be merged."""

    def measure(
        self, model: LoadedModel, ids: list[int], sums: CalibrationSums, progress: Progress
    ) -> None:
        step = _step(model)
        session = Session(model, Sliding(4 * step), step)
        session.cache.observe()
        for first in range(self.first, self.upto, step):
            chunk = ids[first : min(first + step, self.upto)]
            session.feed(chunk)
            sums.measured.take(session.cache, step)
            progress(len(chunk))


@dataclass(frozen=True)
class _Context(_Part):
    """What reconstruction gives each cell."""

    held_back: bool

    @property
    def tokens(self) -> int:
        return 2 * super().tokens  # they are read, and then repeated

    def measure(
        self, model: LoadedModel, ids: list[int], sums: CalibrationSums, progress: Progress
    ) -> None:
        memory = Memory(model.decoder, Full(self.upto - self.first))
        for done in memory.evaluate(ids[self.first : self.upto], STEP):
            progress(done.hidden.shape[0])
        scores = reconstruction(memory, model.text, progress).clamp(min=LOWEST).double().cpu()
        cache, regression = memory.cache, sums.held_back if self.held_back else sums.fitted
        cells = Cells.concatenate([cells for _, cells in cache.read(0, cache.cells)])
        seen = Candidates(cells, cache.rope, cache.scale).unrotated
        for layer, (keys, values) in enumerate(zip(seen, cells.values, strict=True)):
            # The first cells, where attention rests, are kept by all methods.
            x = features(keys, values)[:, SINKS:].cpu()
            regression.take(layer, x, scores[layer, :, SINKS:])


def _parts(model: LoadedModel, count: int) -> list[_Part]:
    """What is to be done with a text of so many tokens."""
    step = _step(model)
    if count < 3 * step:
        raise InvalidArgument(f"a calibration needs {3 * step} tokens or more; found {count}")
    # What is left over goes to the last stretch: alone it would have nothing before it.
    firsts = range(0, max(1, count - 2 * step), STRETCH * step)
    parts: list[_Part] = [
        _Stretch(first, upto) for first, upto in zip(firsts, [*firsts[1:], count], strict=True)
    ]
    length = min(CONTEXT, model.spec.max_positions // 2, count // 2)
    many = min(CONTEXTS, count // length)
    for index in range(many):
        first = index * (count - length) // (many - 1)
        parts.append(_Context(first, first + length, index % EVERY == 1))
    return parts


def _step(model: LoadedModel) -> int:
    return min(STEP, model.spec.max_positions // 4)


def _digest(model: LoadedModel, ids: list[int]) -> str:
    """Of all that sums depend on: those of another model or text are no beginning."""
    hashed = blake3(str(sorted(model.fingerprint.saved().items())).encode())
    hashed.update(torch.tensor(ids, dtype=torch.int64, device="cpu").numpy().tobytes())
    return hashed.hexdigest()


def _calibration(model: LoadedModel, count: int, sums: CalibrationSums) -> Calibration:
    weights = sums.fitted.weights()
    measured = sums.measured.statistics()
    statistics = Statistics(
        measured.mean, measured.moment, measured.tolerance, Surrogate.from_weights(weights)
    )
    r_squared = sums.held_back.r_squared(weights)
    return Calibration(statistics, model.fingerprint.saved(), model.name, count, r_squared)
