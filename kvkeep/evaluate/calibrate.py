"""Measurement of a calibration: sums over the queries and reconstruction scores of a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from blake3 import blake3

from kvkeep import validation
from kvkeep.cache import Cells
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.calibration.sums import CalibrationSums
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.statistics import Surrogate, features
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Full, Sliding
from kvkeep.session.compression import SINKS
from kvkeep.session.evaluation import evaluate
from kvkeep.session.memory import Memory
from kvkeep.session.reconstruction import reconstruction
from kvkeep.session.session import Session

STEP = 512  # tokens evaluated at once
STEPS_PER_SESSION = 16  # in a `QueryPart`
CONTEXT, MAX_CONTEXTS = 1024, 20  # tokens of a `ReconstructionPart`, and the most of these parts
HELD_BACK_STRIDE = 5  # one of so many reconstruction parts evaluates the surrogate
LOWEST = -27.6  # log of an attention weight of 1e-12; lower scores are not distinguished

Progress = Callable[[int], None]


@torch.inference_mode()
def calibrate(
    model: LoadedModel,
    ids: Sequence[int],
    progress: Progress | None = None,
    unfinished: Path | None = None,
) -> Calibration:
    """Evaluate text and measure the statistics that compression methods use.

    For the first 1,024 tokens of each twentieth of the text, reconstruction scores are computed as
    well. A surrogate is fitted to four fifths of them and evaluated on the rest.

    Args:
        ids: some ten thousand tokens, of the kind of text that the model will be used with.
        progress: called after each step with the number of tokens in it; see `calibration_tokens`.
        unfinished: a file for partial results, so that an interrupted run can be resumed; the
            result is the same to the bit on the same machine.

    Raises InvalidArgument for too few tokens; StoreError and its kinds if the file cannot be
    written, or is of another kind.
    """
    ids = validation.token_ids("ids", ids, model.spec.vocab_size)
    progress = validation.progress(progress) or (lambda tokens: None)
    parts = _text_parts(model, len(ids))
    layout = model.decoder.new_cache().layout
    hashed = blake3(str(sorted(model.fingerprint.saved().items())).encode())
    hashed.update(torch.tensor(ids, dtype=torch.int64, device="cpu").numpy().tobytes())
    digest = hashed.hexdigest()  # of all that the sums depend on: model and text
    sums = CalibrationSums(layout)
    if unfinished is not None:
        sums = CalibrationSums.resume(unfinished, digest, layout, len(parts))
    progress(sum(part.tokens for part in parts[: sums.done]))
    for part in parts[sums.done :]:
        part.measure(model, ids, sums, progress)
        sums.done += 1
        if unfinished is not None:
            sums.save(unfinished, digest)
    measured, weights = sums.queries.statistics(), sums.fitted.weights()
    statistics = replace(measured, surrogate=Surrogate.from_weights(weights))
    r_squared = sums.held_back.r_squared(weights)
    if unfinished is not None:
        unfinished.unlink(missing_ok=True)
    return Calibration(statistics, model.fingerprint.saved(), model.name, len(ids), r_squared)


def calibration_tokens(model: LoadedModel, count: int) -> int:
    """Return how many tokens `calibrate` evaluates for a text of so many, repetitions included.

    Raises InvalidArgument for too few.
    """
    return sum(part.tokens for part in _text_parts(model, count))


@dataclass(frozen=True)
class QueryPart:
    """Tokens `first ... end - 1`, over which queries and the error of merges are measured."""

    first: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.first

    def measure(
        self, model: LoadedModel, ids: list[int], sums: CalibrationSums, progress: Progress
    ) -> None:
        step = _tokens_per_step(model)
        session = Session(model, Sliding(4 * step), step)
        session.cache.observe()
        for first in range(self.first, self.end, step):
            chunk = ids[first : min(first + step, self.end)]
            session.feed(chunk)
            sums.queries.add(session.cache, step)
            progress(len(chunk))


@dataclass(frozen=True)
class ReconstructionPart:
    """Tokens `first ... end - 1`, over whose cells reconstruction scores are measured."""

    first: int
    end: int
    held_back: bool

    @property
    def tokens(self) -> int:
        return 2 * (self.end - self.first)  # prefilled, and then repeated

    def measure(
        self, model: LoadedModel, ids: list[int], sums: CalibrationSums, progress: Progress
    ) -> None:
        memory = Memory(model.decoder, Full(self.end - self.first))
        for done in evaluate(memory, ids[self.first : self.end], STEP):
            progress(done.hidden.shape[0])
        scores = reconstruction(memory, model.text, progress).clamp(min=LOWEST).double().cpu()
        cache, regression = memory.cache, sums.held_back if self.held_back else sums.fitted
        cells = Cells.concatenate([cells for _, cells in cache.read(0, cache.cells)])
        unrotated = Candidates(cells, cache.rope, cache.scale).unrotated
        for layer, (keys, values) in enumerate(zip(unrotated, cells.values, strict=True)):
            x = features(keys, values)[:, SINKS:].cpu()  # attention sinks are always kept
            regression.add(layer, x, scores[layer, :, SINKS:])


def _text_parts(model: LoadedModel, count: int) -> list[QueryPart | ReconstructionPart]:
    step = _tokens_per_step(model)
    if count < 3 * step:
        raise InvalidArgument(f"a calibration needs {3 * step} tokens or more; found {count}")
    # The remainder goes to the last part: alone it would have no tokens before it.
    firsts = range(0, max(1, count - 2 * step), STEPS_PER_SESSION * step)
    parts: list[QueryPart | ReconstructionPart] = [
        QueryPart(first, end) for first, end in zip(firsts, [*firsts[1:], count], strict=True)
    ]
    length = min(CONTEXT, model.spec.max_positions // 2, count // 2)
    contexts = min(MAX_CONTEXTS, count // length)
    for index in range(contexts):
        first, held_back = index * (count - length) // (contexts - 1), index % HELD_BACK_STRIDE == 1
        parts.append(ReconstructionPart(first, first + length, held_back))
    return parts


def _tokens_per_step(model: LoadedModel) -> int:
    return min(STEP, model.spec.max_positions // 4)
