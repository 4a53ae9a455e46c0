"""Cost of in-place edits in long sessions: it depends on the tokens inserted, not on those held.

The same session is edited in many places, so that the segments that edits leave behind are part of
the cost; so is the token after each edit.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.files.atomic import write_json


@dataclass(frozen=True)
class Plan:
    """Sizes. cells: held by each session; by `sliding` after its window has wrapped. span: tokens
    per edit. rounds: edits of each kind.
    """

    cells: int = 8000
    span: int = 50
    rounds: int = 5


@dataclass(frozen=True)
class Cost:
    """Milliseconds of an edit (median, slowest) and of the token after it (median).

    segments: of the cache after all edits.
    """

    policy: str
    what: str
    median_ms: float
    slowest_ms: float
    next_token_ms: float
    segments: int


def measure_long_edits(
    model: Model, ids: list[int], plan: Plan, progress: Callable[[int], None]
) -> list[Cost]:
    """Measure both policies. Raises InvalidArgument if the text is too short for the plan."""
    longest = plan.cells + plan.cells // 8
    if len(ids) < longest + plan.span:
        raise InvalidArgument(
            f"the text has {len(ids)} tokens; this plan needs {longest + plan.span}"
        )
    full = model.session(policy="full")
    full.feed(ids[: plan.cells], progress)
    sliding = model.session(plan.cells)
    sliding.feed(ids[:longest], progress)
    new = ids[-plan.span :]
    return [*_costs(full, new, plan), *_costs(sliding, new, plan)]


def _costs(session: Session, new: list[int], plan: Plan) -> list[Cost]:
    span = len(new)
    kinds: dict[str, Callable[[int], object]] = {
        "delete": lambda at: session.delete(at, at + span),
        "insert": lambda at: session.insert(at, new),
        "replace": lambda at: session.replace(at, at + span, new),
    }
    edits: dict[str, list[float]] = {kind: [] for kind in kinds}
    tokens: dict[str, list[float]] = {kind: [] for kind in kinds}
    session.next_token()
    for index in range(plan.rounds * len(kinds)):
        kind = list(kinds)[index % len(kinds)]
        # In the newer half: a window evicts older tokens. The golden ratio spreads places evenly.
        distance = int((index * 0.618034 % 1) * (plan.cells // 2 - 3 * span)) + 2 * span
        start = time.perf_counter()
        kinds[kind](len(session.tokens) - distance)
        edit_end = time.perf_counter()
        session.next_token()
        edits[kind].append((edit_end - start) * 1e3)
        tokens[kind].append((time.perf_counter() - edit_end) * 1e3)
    segments = len(session.cache.segments)
    return [
        Cost(
            session.policy,
            kind,
            rounded(median(edits[kind])),
            rounded(max(edits[kind])),
            rounded(median(tokens[kind])),
            segments,
        )
        for kind in kinds
    ]


def table(costs: list[Cost], plan: Plan) -> str:
    head = f"{plan.span} tokens of {plan.cells:,}"
    lines = [f"{head:<22}  {'ms':>8}  {'slowest':>8}  {'next token':>10}  {'segments':>8}"]
    lines += [
        f"{f'{c.policy}, {c.what}':<22}  {c.median_ms:>8.1f}  {c.slowest_ms:>8.1f}  "
        f"{c.next_token_ms:>10.1f}  {c.segments:>8}"
        for c in costs
    ]
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--cells", default=8000, type=click.IntRange(400), help="Held in each session.")
@click.option("--span", default=50, type=click.IntRange(1, 100), help="Tokens per edit.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Edits of each kind.")
@model_option
@out_option
def long_edits(cells: int, span: int, rounds: int, name: str, out: Path | None) -> None:
    """Time in-place edits of sessions with many cells."""
    check_outputs(out)
    model, plan = load_model(name, progress=True), Plan(cells, span, rounds)
    machine = describe_machine()
    with bar(2 * cells + cells // 8, "context") as progress:
        costs = measure_long_edits(model, model.text.encode(manual_text()), plan, progress)
    click.echo(table(costs, plan))
    result = {
        "machine": dataclasses.asdict(machine),
        "settings": {"model": name, "dtype": "bfloat16"} | dataclasses.asdict(plan),
        "costs": [dataclasses.asdict(cost) for cost in costs],
    }
    write_json(out, result)


if __name__ == "__main__":
    long_edits()
