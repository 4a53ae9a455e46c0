"""Measurement of a calibration: sums over the queries and reconstruction scores of a text."""

import itertools
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
from kvkeep.session.compression_plan import SINK_CELLS
from kvkeep.session.evaluation import evaluate
from kvkeep.session.memory import Memory
from kvkeep.session.reconstruction import reconstruction_scores
from kvkeep.session.session import Session

STEP_TOKENS = 512  # tokens evaluated at once
STEPS_PER_SESSION = 16  # in a `QueryPart`
RECONSTRUCTION_TOKENS, MAX_RECONSTRUCTIONS = 1024, 20  # tokens of a part; the most parts
HELD_OUT_STRIDE = 5  # every n-th reconstruction part evaluates the surrogate
MIN_RECONSTRUCTION_TOKENS = 16  # of a part
MIN_SCORE = -27.6  # log of an attention weight of 1e-12; lower scores are clamped

Progress = Callable[[int], None]  # called with the number of tokens evaluated since the last call


def calibrate(
    model: LoadedModel,
    ids: Sequence[int],
    progress: Progress | None = None,
    unfinished: Path | None = None,
) -> Calibration:
    """Evaluate text and measure the statistics that compression methods use.

    Reconstruction scores are computed over up to 20 stretches of 1,024 tokens. A surrogate is
    fitted to four fifths of them and evaluated on the rest.

    Args:
        ids: some ten thousand tokens, of the kind of text that the model will be used with.
        progress: called after each step with its number of tokens; see `count_calibration_tokens`.
        unfinished: a file for partial results, from which an interrupted run is resumed. The
            result is bit-identical on the same machine.

    Raises InvalidArgument for too few tokens, StoreError if the file cannot be written or read.
    """
    calibration = measure(model, ids, progress, unfinished)
    if unfinished is not None:
        unfinished.unlink(missing_ok=True)
    return calibration


@torch.inference_mode()
def measure(
    model: LoadedModel, ids: Sequence[int], progress: Progress | None, unfinished: Path | None
) -> Calibration:
    """Do as `calibrate`, and leave the file of results, from which a repeated call has the same."""
    ids = validation.token_ids("ids", ids, model.spec.vocab_size)
    progress = validation.progress(progress) or (lambda tokens: None)
    parts = _text_parts(model, len(ids))
    digest, layout = _digest(model, ids), model.decoder.new_cache().layout
    sums = CalibrationSums(layout)
    if unfinished is not None:
        sums = CalibrationSums.resume(unfinished, digest, layout, len(parts))
    progress(sum(part.evaluated_tokens for part in parts[: sums.parts_done]))
    for part in parts[sums.parts_done :]:
        part.measure(model, ids, sums, progress)
        sums.parts_done += 1
        if unfinished is not None:
            sums.save(unfinished, digest)
    surrogate_weights = sums.training.weights()  # of a linear regression
    surrogate = Surrogate.from_weights(surrogate_weights)
    statistics = replace(sums.query_sums.statistics(), surrogate=surrogate)
    r_squared = sums.held_out.r_squared(surrogate_weights)
    return Calibration(statistics, model.fingerprint.to_dict(), model.name, len(ids), r_squared)


def has_results(model: LoadedModel, ids: Sequence[int], unfinished: Path) -> bool:
    """Whether a file has results of `measure` for this model and text. Raises ForeignFile."""
    layout, num_parts = model.decoder.new_cache().layout, len(_text_parts(model, len(ids)))
    sums = CalibrationSums.resume(unfinished, _digest(model, ids), layout, num_parts)
    return sums.parts_done > 0


def _digest(model: LoadedModel, ids: Sequence[int]) -> str:
    """Return a digest of model and text, on which the sums depend."""
    hasher = blake3(str(sorted(model.fingerprint.to_dict().items())).encode())
    hasher.update(torch.tensor(ids, dtype=torch.int64, device="cpu").numpy().tobytes())
    return hasher.hexdigest()


def count_calibration_tokens(model: LoadedModel, token_count: int) -> int:
    """Return how many tokens `calibrate` evaluates for `token_count`. Raises InvalidArgument."""
    return sum(part.evaluated_tokens for part in _text_parts(model, token_count))


@dataclass(frozen=True)
class QueryPart:
    """Tokens `start ... end - 1`, over which queries and the error of merges are measured."""

    start: int
    end: int

    @property
    def evaluated_tokens(self) -> int:
        return self.end - self.start

    def measure(
        self, model: LoadedModel, ids: list[int], sums: CalibrationSums, progress: Progress
    ) -> None:
        """Feed the tokens to a sliding session, and add what it observes to the sums."""
        step = _tokens_per_step(model)
        session = Session(model, Sliding(4 * step), step)
        session.cache.observe()
        for start in range(self.start, self.end, step):
            chunk = ids[start : min(start + step, self.end)]
            session.feed(chunk)
            sums.query_sums.add(session.cache, step)
            progress(len(chunk))


@dataclass(frozen=True)
class ReconstructionPart:
    """Tokens `start ... end - 1`, over whose cells reconstruction scores are measured."""

    start: int
    end: int
    held_out: bool  # whether it evaluates the surrogate, instead of fitting it

    @property
    def evaluated_tokens(self) -> int:
        return 2 * (self.end - self.start)  # prefilled, and then repeated

    def measure(
        self, model: LoadedModel, ids: list[int], sums: CalibrationSums, progress: Progress
    ) -> None:
        """Prefill the tokens, and add features of their cells with their scores to the sums."""
        memory = Memory(model.decoder, Full(self.end - self.start))
        for result in evaluate(memory, ids[self.start : self.end], STEP_TOKENS):
            progress(result.hidden.shape[0])
        scores = reconstruction_scores(memory, model.text, progress)
        scores = scores.clamp(min=MIN_SCORE).double().cpu()
        cache, regression = memory.cache, sums.held_out if self.held_out else sums.training
        cells = Cells.concatenate([cells for _, cells in cache.read(0, cache.cells)])
        unrotated_keys = Candidates(cells, cache.rope, cache.scale).unrotated_keys
        for layer, (keys, values) in enumerate(zip(unrotated_keys, cells.values, strict=True)):
            inputs = features(keys, values)[:, SINK_CELLS:].cpu()  # attention sinks are always kept
            regression.add(layer, inputs, scores[layer, :, SINK_CELLS:])


def _text_parts(model: LoadedModel, token_count: int) -> list[QueryPart | ReconstructionPart]:
    """Split a text of `token_count` tokens into query parts, and place reconstruction parts."""
    step, positions = _tokens_per_step(model), model.spec.max_positions
    if positions < 2 * MIN_RECONSTRUCTION_TOKENS:
        raise InvalidArgument(
            f"a calibration needs a model of {2 * MIN_RECONSTRUCTION_TOKENS} positions or more; "
            f"{model.name} was trained for {positions}"
        )
    minimum = max(3 * step, 2 * MIN_RECONSTRUCTION_TOKENS)
    if token_count < minimum:
        raise InvalidArgument(f"a calibration needs {minimum} tokens or more; found {token_count}")
    # A short remainder is joined to the last part: alone it would have no tokens before it.
    starts = range(0, max(1, token_count - 2 * step), STEPS_PER_SESSION * step)
    parts: list[QueryPart | ReconstructionPart] = [
        QueryPart(start, end) for start, end in itertools.pairwise([*starts, token_count])
    ]
    length = min(RECONSTRUCTION_TOKENS, positions // 2, token_count // 2)
    reconstruction_count = min(MAX_RECONSTRUCTIONS, token_count // length)
    for index in range(reconstruction_count):
        start = index * (token_count - length) // (reconstruction_count - 1)
        held_out = index % HELD_OUT_STRIDE == 1
        parts.append(ReconstructionPart(start, start + length, held_out))
    return parts


def _tokens_per_step(model: LoadedModel) -> int:
    # A query part's window of four steps must fit the positions that the model was trained for.
    return min(STEP_TOKENS, model.spec.max_positions // 4)
