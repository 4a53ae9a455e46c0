"""Many samples in a few numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from kvkeep.evaluate.recall import Outcome, Recall


@dataclass(frozen=True)
class Summary:
    """found: samples whose every question was answered; rate: their share.

    log_probability: of a token of a key, the mean over samples. cells, bytes: means, before and
    after compression. What is of the uncompressed memory counts the samples that fitted into one,
    and is None where none did. ms_per_chunk: of each chunk that was compressed, in all samples.
    each: every sample.
    """

    samples: int
    found: int
    rate: float
    log_probability: float
    samples_uncompressed: int
    found_uncompressed: int | None
    rate_uncompressed: float | None
    log_probability_uncompressed: float | None
    cells_before: int
    cells_after: int
    bytes_before: int | None
    bytes_after: int
    ms_per_chunk: list[float]
    each: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(measured: Sequence[Outcome]) -> Summary:
    """Of at least one sample."""
    compressed = [each.compressed for each in measured]
    whole = [each.uncompressed for each in measured if each.uncompressed is not None]
    return Summary(
        samples=len(measured),
        found=_found(compressed),
        rate=_found(compressed) / len(compressed),
        log_probability=fmean(each.log_probability for each in compressed),
        samples_uncompressed=len(whole),
        found_uncompressed=_found(whole) if whole else None,
        rate_uncompressed=_found(whole) / len(whole) if whole else None,
        log_probability_uncompressed=fmean(w.log_probability for w in whole) if whole else None,
        cells_before=round(fmean(each.tokens for each in measured)),
        cells_after=round(fmean(each.cells for each in compressed)),
        bytes_before=round(fmean(each.nbytes for each in whole)) if whole else None,
        bytes_after=round(fmean(each.nbytes for each in compressed)),
        ms_per_chunk=[c.seconds * 1000 for each in measured for c in each.chunks],
        each=[_row(each) for each in measured],
    )


def _found(recalls: Sequence[Recall]) -> int:
    return sum(each.found for each in recalls)


def _row(measured: Outcome) -> dict[str, Any]:
    sample, compressed, whole = measured.sample, measured.compressed, measured.uncompressed
    return {
        "key": [fact.answer for fact in sample.asked],
        "question": [fact.question.strip() for fact in sample.asked],
        "answer": [answer.text for answer in compressed.answers],
        "position": sample.position,
        "places": sample.places,
        "depth": round(sample.depth, 1),
        "found": compressed.found,
        "found_each": [answer.found for answer in compressed.answers],
        "found_uncompressed": whole.found if whole else None,
        "log_probability": compressed.log_probability,
        "log_probability_uncompressed": whole.log_probability if whole else None,
        "cells_before": measured.tokens,
        "cells_after": compressed.cells,
        "bytes_before": whole.nbytes if whole else None,
        "bytes_after": compressed.nbytes,
        "merged": [chunk.merged for chunk in measured.chunks],
    }
