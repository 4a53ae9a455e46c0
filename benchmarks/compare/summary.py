"""From readings to figures: medians, the best variant of each peer, and ratios within a round."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.compare.results import Measure, Reading, Result
from benchmarks.prefill import Spread

OURS = "kvkeep"


@dataclass(frozen=True)
class Figure:
    """A variant's readings of a measure."""

    measure: str
    variant: str
    rounds: int
    spread: Spread


@dataclass(frozen=True)
class Ratio:
    """How many times as good kvkeep is as a variant: above 1, kvkeep is faster or smaller.

    Readings of the same round are compared, and the median is taken of these ratios.
    """

    measure: str
    variant: str
    rounds: int
    spread: Spread


def peers_of(result: Result) -> list[str]:
    """Those that there are readings of, kvkeep first."""
    found = dict.fromkeys(peer_of(each.variant) for each in result.readings)
    return sorted(found, key=lambda peer: peer != OURS)


def peer_of(variant: str) -> str:
    return variant.partition(" ")[0]


def best(result: Result, measure: Measure, peer: str) -> Figure | None:
    """The figure of the peer's variant with the best median; None where nothing was read."""
    of_measure = [each for each in result.readings if each.measure == measure.key]
    variants = dict.fromkeys(e.variant for e in of_measure if peer_of(e.variant) == peer)
    figures = [_figure(of_measure, measure, variant) for variant in variants]
    if not figures:
        return None
    choose = max if measure.more else min
    return choose(figures, key=lambda figure: figure.spread.median)


def ratio(result: Result, measure: Measure, peer: str) -> Ratio | None:
    """kvkeep's best against the peer's best; None where they share no round."""
    ours, theirs = best(result, measure, OURS), best(result, measure, peer)
    if ours is None or theirs is None:
        return None
    mine = _by_round(result.readings, measure, ours.variant)
    other = _by_round(result.readings, measure, theirs.variant)
    found = [
        mine[index] / other[index] if measure.more else other[index] / mine[index]
        for index in mine.keys() & other.keys()
    ]
    if not found:
        return None
    return Ratio(measure.key, theirs.variant, len(found), Spread.of(found))


def spreads(result: Result, measure: Measure) -> dict[str, Spread]:
    """Of every variant that was measured."""
    read = [each for each in result.readings if each.measure == measure.key]
    variants = dict.fromkeys(each.variant for each in read)
    return {variant: _figure(read, measure, variant).spread for variant in variants}


def summarised(result: Result) -> dict[str, Any]:
    """Every variant's figures, and the ratios to each peer's best, for a file."""
    figures, ratios = [], []
    for measure in result.measures:
        read = [each for each in result.readings if each.measure == measure.key]
        figures += [_figure(read, measure, v) for v in dict.fromkeys(e.variant for e in read)]
        others = [peer for peer in peers_of(result) if peer != OURS]
        ratios += [found for peer in others if (found := ratio(result, measure, peer))]
    return {
        "figures": [asdict(each) for each in figures],
        "ratios": [asdict(each) for each in ratios],
    }


def _figure(readings: Iterable[Reading], measure: Measure, variant: str) -> Figure:
    values = list(_by_round(readings, measure, variant).values())
    return Figure(measure.key, variant, len(values), Spread.of(values))


def _by_round(readings: Iterable[Reading], measure: Measure, variant: str) -> dict[int, float]:
    return {
        each.round: each.value
        for each in readings
        if each.measure == measure.key and each.variant == variant
    }
