"""Summary of readings: medians, the best variant of each peer, and ratios within a round."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.compare.results import Measure, Reading, Result
from benchmarks.prefill import Spread

OURS = "kvkeep"


@dataclass(frozen=True)
class Figure:
    """The spread of a variant's readings of one measure."""

    measure: str
    variant: str
    rounds: int
    spread: Spread


@dataclass(frozen=True)
class Ratio:
    """kvkeep relative to a variant, by ratios within a round; above 1, kvkeep is better."""

    measure: str
    variant: str
    rounds: int
    spread: Spread


def peers_of(result: Result) -> list[str]:
    """Return the peers with readings, kvkeep first."""
    names = dict.fromkeys(peer_of(reading.variant) for reading in result.readings)
    return sorted(names, key=lambda peer: peer != OURS)


def peer_of(variant: str) -> str:
    return variant.partition(" ")[0]


def best(result: Result, measure: Measure, peer: str) -> Figure | None:
    """Return the figure of the peer's variant with the best median, or None without readings."""
    of_measure = [reading for reading in result.readings if reading.measure == measure.key]
    variants = dict.fromkeys(
        reading.variant for reading in of_measure if peer_of(reading.variant) == peer
    )
    figures = [_figure(of_measure, measure, variant) for variant in variants]
    if not figures:
        return None
    choose = max if measure.more else min
    return choose(figures, key=lambda figure: figure.spread.median)


def ratio(result: Result, measure: Measure, peer: str) -> Ratio | None:
    """Return kvkeep's best against the peer's best, or None if they share no round."""
    ours, theirs = best(result, measure, OURS), best(result, measure, peer)
    if ours is None or theirs is None:
        return None
    our_values = _by_round(result.readings, measure, ours.variant)
    their_values = _by_round(result.readings, measure, theirs.variant)
    ratios = [
        our_values[index] / their_values[index]
        if measure.more
        else their_values[index] / our_values[index]
        for index in our_values.keys() & their_values.keys()
    ]
    if not ratios:
        return None
    return Ratio(measure.key, theirs.variant, len(ratios), Spread.of(ratios))


def spreads(result: Result, measure: Measure) -> dict[str, Spread]:
    """Return the spread of each variant's readings of a measure."""
    readings = [reading for reading in result.readings if reading.measure == measure.key]
    variants = dict.fromkeys(reading.variant for reading in readings)
    return {variant: _figure(readings, measure, variant).spread for variant in variants}


def summary_json(result: Result) -> dict[str, Any]:
    """Return all figures, and the ratios to each peer's best, for the JSON file."""
    figures, ratios = [], []
    for measure in result.measures:
        readings = [entry for entry in result.readings if entry.measure == measure.key]
        figures += [
            _figure(readings, measure, v) for v in dict.fromkeys(e.variant for e in readings)
        ]
        others = [peer for peer in peers_of(result) if peer != OURS]
        ratios += [value for peer in others if (value := ratio(result, measure, peer))]
    return {
        "figures": [asdict(entry) for entry in figures],
        "ratios": [asdict(entry) for entry in ratios],
    }


def _figure(readings: Iterable[Reading], measure: Measure, variant: str) -> Figure:
    values = list(_by_round(readings, measure, variant).values())
    return Figure(measure.key, variant, len(values), Spread.of(values))


def _by_round(readings: Iterable[Reading], measure: Measure, variant: str) -> dict[int, float]:
    return {
        reading.round: reading.value
        for reading in readings
        if reading.measure == measure.key and reading.variant == variant
    }
