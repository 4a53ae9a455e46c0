"""Compares the time of a few fed tokens with that of a group of sessions that sample as many.

    python -m benchmarks.small_steps --model llama-1b-Q4_K_M.gguf

All are measured in turn in one process: a session that feeds n tokens in one step, and n sessions
that sample a token each. Beyond 16 tokens a step is computed by the library's products.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option, write_record
from benchmarks.figures import rounded
from kvkeep import SessionGroup, load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model

FED = (1, 4, 8, 16, 17, 24, 32)
GROUPS = (1, 4, 8, 16)


@dataclass(frozen=True)
class StepCost:
    """The milliseconds of a step of `tokens` fed tokens, and of a group of as many sessions."""

    tokens: int
    fed_ms: float
    group_ms: float | None


def measure(model: Model, context: int, rounds: int) -> list[StepCost]:
    """Return the medians of all rounds."""
    ids = (model.text.encode(manual_text()) * (context // 1000 + 1))[: context + 64]
    parent = model.session(policy="full")
    parent.feed(ids[:context])
    groups = {n: SessionGroup([parent.fork() for _ in range(n)]) for n in GROUPS}
    seconds: dict[tuple[str, int], list[float]] = {}

    def timed(kind: str, count: int, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        seconds.setdefault((kind, count), []).append(time.perf_counter() - start)

    for _ in range(rounds):
        for count in FED:
            session = parent.fork()
            session.feed(ids[context : context + 1])  # copies what the fork shares
            part = ids[context + 1 : context + 1 + count]
            timed("fed", count, partial(session.feed, part))
        for count, group in groups.items():
            timed("group", count, group.next_tokens)
    medians = {key: 1000 * statistics.median(values[1:]) for key, values in seconds.items()}
    return [
        StepCost(
            count,
            rounded(medians["fed", count]),
            rounded(medians["group", count]) if count in GROUPS else None,
        )
        for count in FED
    ]


@click.command(cls=Measurement)
@model_option
@click.option(
    "--context", default=256, show_default=True, type=click.IntRange(1), help="Tokens before."
)
@click.option(
    "--rounds",
    default=12,
    show_default=True,
    type=click.IntRange(2),
    help="Repeats; the first is not counted.",
)
@out_option
def main(name: str, context: int, rounds: int, out: Path | None) -> None:
    """Measure steps of 1 to 32 fed tokens, and groups of 1 to 16 sessions."""
    check_outputs(out)
    costs = measure(load_model(name), context, rounds)
    for cost in costs:
        group = "" if cost.group_ms is None else f", a group {cost.group_ms} ms"
        click.echo(f"{cost.tokens} fed tokens {cost.fed_ms} ms{group}")
    write_record(out, name, context=context, rounds=rounds, costs=list(map(asdict, costs)))


if __name__ == "__main__":
    main()
