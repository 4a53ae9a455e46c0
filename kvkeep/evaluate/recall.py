"""Recall of hidden facts: the answers of a session, compressed and uncompressed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvkeep.compression.methods import best_method, make_method
from kvkeep.evaluate.samples import Fact, Sample
from kvkeep.policies import Archive
from kvkeep.session.compression_plan import default_method_name
from kvkeep.session.session import Session

if TYPE_CHECKING:
    from kvkeep.compression.calibration.calibration import Calibration
    from kvkeep.compression.methods.apply import Compression
    from kvkeep.model import Model
    from kvkeep.session.compression import CompressionReport

EXTRA_TOKENS = 3  # generated beyond the key's, since a space or a quote may precede it
MAX_QUESTION_TOKENS = 128  # tokens for a question and its answer; none takes more


@dataclass(frozen=True)
class Answer:
    """The greedy continuation of a question."""

    text: str
    found: bool  # whether the text begins with the key
    log_probability: float  # natural, the mean over the key's tokens


@dataclass(frozen=True)
class Recall:
    """One session's answers. cells, nbytes: held before the first question."""

    answers: tuple[Answer, ...]
    cells: int
    nbytes: int

    @property
    def found(self) -> bool:
        return all(answer.found for answer in self.answers)

    @property
    def log_probability(self) -> float:
        return sum(answer.log_probability for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class CompressionSettings:
    """Settings for compressing a session.

    max_kv_size: cells during streaming prefill; None for as many as compression afterwards leaves.
    """

    method: str  # with or without a budget: "keydiff" or "keydiff:heads"
    ratio: float
    seed: int = 0
    calibration: "Calibration | None" = None
    max_kv_size: int | None = None

    def budget_cells(self, token_count: int) -> int:
        """Return the budget for a session that is compressed during prefill."""
        return self.max_kv_size or math.ceil(token_count / self.ratio)

    def compress(self, session: Session) -> "CompressionReport":
        method, budget = parse_method(self.method)
        return session.compress(
            self.ratio, method, seed=self.seed, calibration=self.calibration, budget=budget
        )


def default_method(model: "Model", calibration: "Calibration | None", is_streaming: bool) -> str:
    """Return the method that `Session.compress`, or an archive if streaming, takes by default."""
    if is_streaming:
        calibration = calibration or model.calibration
    statistics = calibration.statistics if calibration else None
    if is_streaming:
        return best_method(statistics)
    return default_method_name(model.session(policy="full").core.memory, statistics)


def used_calibration(
    model: "Model", method: str, calibration: "Calibration | None"
) -> "Calibration | None":
    """Return the calibration, or for None the stored one if sessions use it with the method."""
    if calibration is None and make_method(parse_method(method)[0]).uses_surrogate:
        return model.calibration
    return calibration


def parse_method(text: str) -> tuple[str, Any]:
    """Split METHOD or METHOD:BUDGET, such as "keydiff:heads"."""
    method, _, budget = text.partition(":")
    return method, budget or None


@dataclass(frozen=True)
class RecallResult:
    """A sample's answers from a compressed and an uncompressed session."""

    sample: Sample
    tokens: int  # of the text
    compressed: Recall
    uncompressed: Recall | None  # None if the text is too long for an uncompressed session
    chunks: "tuple[Compression, ...]"  # what the compression did to each chunk of cells
    budget_cells: int | None = None  # of the session if it was compressed during prefill


def measure_recall(session: Session, facts: Sequence[Fact]) -> Recall:
    """Ask for each fact in a fork; the session stays as it is."""
    answers = tuple(_ask(session.fork(), fact) for fact in facts)
    return Recall(answers, session.cache.cells, session.cache.nbytes)


def measure_compression(
    model: "Model", sample: Sample, settings: CompressionSettings, prefill_step: int = 512
) -> RecallResult:
    """Prefill the text; ask before and after compression. Raises ContextFull."""
    session = model.session(policy="full", prefill_step=prefill_step)
    tokens = session.feed(sample.text).tokens
    uncompressed = measure_recall(session, sample.facts)
    fork = session.fork()
    report = settings.compress(fork)
    compressed = measure_recall(fork, sample.facts)
    return RecallResult(sample, tokens, compressed, uncompressed, report.chunks)


def measure_streaming_compression(
    model: "Model", sample: Sample, settings: CompressionSettings, prefill_step: int = 512
) -> RecallResult:
    """Prefill the text in a session that compresses as it grows, and if it fits in a full one."""
    ids, (method, budget) = model.text.encode(sample.text), parse_method(settings.method)
    budget_cells = settings.budget_cells(len(ids))
    policy = Archive(
        budget_cells,
        method=method,
        budget=budget or "",
        ratio=settings.ratio,
        seed=settings.seed,
    )
    archive_session = model.session(
        policy=policy, prefill_step=prefill_step, calibration=settings.calibration
    )
    report = archive_session.feed(ids)
    full_session = model.session(policy="full", prefill_step=prefill_step)
    uncompressed = None
    if full_session.room is None or report.tokens + MAX_QUESTION_TOKENS <= full_session.room:
        full_session.feed(ids)
        uncompressed = measure_recall(full_session, sample.facts)
    compressed = measure_recall(archive_session, sample.facts)
    return RecallResult(
        sample, report.tokens, compressed, uncompressed, report.compressions, budget_cells
    )


def _ask(session: Session, fact: Fact) -> Answer:
    """Feed a fact's question to the session, and generate and score its answer."""
    session.feed(fact.question)
    answer_scores = session.fork().score(f" {fact.answer}")
    text = "".join(session.stream(len(answer_scores) + EXTRA_TOKENS))
    return Answer(text, text.strip().startswith(fact.answer), float(answer_scores.mean()))


def summarise(results: Sequence[RecallResult]) -> dict[str, Any]:
    """Return recall over at least one sample, as in the JSON report.

    Names with `uncompressed` cover samples that fit a `full` session; None if there are none.
    """
    compressed = [result.compressed for result in results]
    full = [result.uncompressed for result in results if result.uncompressed is not None]
    found, found_full = sum(r.found for r in compressed), sum(r.found for r in full)
    return {
        "samples": len(results),
        "found": found,
        "rate": found / len(results),
        "log_probability": fmean(recall.log_probability for recall in compressed),
        "samples_uncompressed": len(full),
        "found_uncompressed": found_full if full else None,
        "rate_uncompressed": found_full / len(full) if full else None,
        "log_probability_uncompressed": fmean(r.log_probability for r in full) if full else None,
        "cells_before": round(fmean(result.tokens for result in results)),
        "cells_after": round(fmean(recall.cells for recall in compressed)),
        "bytes_before": round(fmean(recall.nbytes for recall in full)) if full else None,
        "bytes_after": round(fmean(recall.nbytes for recall in compressed)),
        "ms_per_chunk": [chunk.seconds * 1000 for result in results for chunk in result.chunks],
        "each": [_sample_row(result) for result in results],
    }


def _sample_row(result: RecallResult) -> dict[str, Any]:
    sample, compressed, full = result.sample, result.compressed, result.uncompressed
    return {
        "key": [fact.answer for fact in sample.facts],
        "question": [fact.question.strip() for fact in sample.facts],
        "answer": [answer.text for answer in compressed.answers],
        "position": sample.position,
        "places": sample.position_count,
        "depth": round(sample.depth, 1),
        "found": compressed.found,
        "found_each": [answer.found for answer in compressed.answers],
        "found_uncompressed": full.found if full else None,
        "log_probability": compressed.log_probability,
        "log_probability_uncompressed": full.log_probability if full else None,
        "cells_before": result.tokens,
        "cells_after": compressed.cells,
        "budget_cells": result.budget_cells,
        "bytes_before": full.nbytes if full else None,
        "bytes_after": compressed.nbytes,
        "merged": [chunk.merged for chunk in result.chunks],
    }
