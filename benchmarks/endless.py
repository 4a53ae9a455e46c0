"""Whether the thousandth token and the twenty-thousandth cost the same time and memory.

A prompt several times as long as the budget is read, then tokens are written without end. The
time of each token, the cells held after it and the process's memory are recorded.

A shared machine drifts within minutes. So a second comparison is made at the end: a young session,
fed as far as the first one was after 2,000 tokens, decodes beside the old one, token by token in
turn, and drift meets both alike.
"""

import dataclasses
import sys
from pathlib import Path

import click

from benchmarks.command import (
    INTERRUPTED,
    Measurement,
    check_outputs,
    dtype_option,
    model_option,
    out_option,
)
from benchmarks.endless_plot import draw_endless
from benchmarks.endless_run import WRITING, Endless, Plan, measure_endless
from benchmarks.machine import Machine, describe_machine
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.evaluate.plot import check_plottable
from kvkeep.storage.files.atomic import write_atomic, write_json
from kvkeep.types import DtypeName


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=Plan.tokens, type=click.IntRange(1), help="Tokens to write.")
@click.option("--prompt-tokens", default=4096, type=click.IntRange(1), help="Tokens to read first.")
@click.option("--max-kv-size", default=512, type=click.IntRange(1), help="Most tokens held.")
@click.option("--keep", default=4, type=click.IntRange(0), help="First tokens never forgotten.")
@click.option(
    "--rounds",
    default=Plan.rounds,
    type=click.IntRange(1),
    help="How often the same tokens are written: what is slow each time is slow by itself.",
)
@model_option
@dtype_option
@click.option(
    "--plot", metavar="FILE.png", type=click.Path(path_type=Path), help="Draw time and memory."
)
@out_option
def endless(
    tokens: int,
    prompt_tokens: int,
    max_kv_size: int,
    keep: int,
    rounds: int,
    name: str,
    dtype: DtypeName,
    plot: Path | None,
    out: Path | None,
) -> None:
    """Write many tokens on a fixed budget: does a token's cost grow?"""
    check_outputs(out, plot)
    if plot is not None:
        check_plottable(plot)
    model = load_model(name, dtype=dtype, progress=True)
    prompt = model.text.encode(manual_text())[:prompt_tokens]
    plan, machine = Plan(tokens, rounds=rounds), describe_machine()
    with bar(plan.steps, "writing") as shown:
        result = measure_endless(model, prompt, plan, max_kv_size, keep, shown)
    click.echo(table(result))
    write_json(out, _as_json(result, machine, name, dtype, keep))
    if plot is not None and result.trace:
        write_atomic(plot, draw_endless(result, plot.suffix))
    if result.interrupted:
        sys.exit(INTERRUPTED)


def table(result: Endless) -> str:
    """The result for reading."""
    plan = result.plan
    rows = [
        ("read, then written", f"{result.prompt_tokens:,} and {result.tokens:,} tokens"),
        ("speed", f"{result.tokens_per_s:.1f} tokens/s, median {result.median_ms:.2f} ms"),
        (
            "slowest token",
            f"{result.slowest_ms:.2f} ms, {result.slowest_to_median:.1f} medians, "
            f"after {result.slowest_at:,}",
        ),
        *_recurring(result),
        (f"last {plan.group:,} / second", _or_dash(result.ratio)),
        ("old / young, in turn", _or_dash(result.paired.ratio if result.paired else None)),
        ("most cells", f"{result.max_cells} of {result.max_kv_size}"),
        ("keys and values", f"{result.kv_bytes / 1e6:.1f} MB"),
    ]
    if result.rss_young_bytes is not None:
        rows.append((f"process after {plan.young:,}", f"{result.rss_young_bytes / 1e6:.1f} MB"))
    rows.append(("process at the end", f"{result.rss_end_bytes / 1e6:.1f} MB"))
    return "\n".join(f"{name:<24}{value}" for name, value in rows)


def _recurring(result: Endless) -> list[tuple[str, str]]:
    if result.recurring_ms is None:
        return []
    medians = f"{result.recurring_to_median:.1f} medians, after {result.recurring_at:,}"
    return [(f"slowest in {result.plan.rounds} rounds", f"{result.recurring_ms:.2f} ms, {medians}")]


def _or_dash(ratio: float | None) -> str:
    return "- (too few tokens)" if ratio is None else f"{ratio:.3f}"


def _as_json(
    result: Endless, machine: Machine, model: str, dtype: DtypeName, keep: int
) -> dict[str, object]:
    settings = {"model": model, "dtype": dtype, "keep": keep, **dataclasses.asdict(WRITING)}
    return {
        "machine": dataclasses.asdict(machine),
        "settings": settings,
        **dataclasses.asdict(result),
    }


if __name__ == "__main__":
    endless()
