"""Time and memory per token of an endless generation in a fixed KV budget.

A prompt several times as long as the budget is prefilled, then tokens are generated. The time of
each token, the cells held after it and the memory of the process are recorded.

A shared machine drifts within minutes. So a second comparison is made at the end: a young session,
fed the first 2,000 generated tokens, decodes alternately with the old one, token by token.
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
from benchmarks.endless_run import SAMPLING, Endless, Plan, measure_endless
from benchmarks.machine import Machine, describe_machine
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.evaluate.plots import check_plottable
from kvkeep.storage.files.atomic import write_atomic, write_json
from kvkeep.types import DtypeName


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=Plan.tokens, type=click.IntRange(1), help="Tokens to generate.")
@click.option("--prompt-tokens", default=4096, type=click.IntRange(1), help="Tokens to prefill.")
@click.option("--max-kv-size", default=512, type=click.IntRange(1), help="KV budget in tokens.")
@click.option("--keep", default=4, type=click.IntRange(0), help="First tokens never evicted.")
@click.option(
    "--rounds",
    default=Plan.rounds,
    type=click.IntRange(1),
    help="How often the same tokens are generated, to tell slow tokens from noise.",
)
@model_option
@dtype_option
@click.option(
    "--plot", metavar="FILE.png", type=click.Path(path_type=Path), help="Plot time and memory."
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
    """Generate many tokens in a fixed budget: does the cost of a token grow?"""
    check_outputs(out, plot)
    if plot is not None:
        check_plottable(plot)
    model = load_model(name, dtype=dtype, progress=True)
    prompt = model.text.encode(manual_text())[:prompt_tokens]
    plan, machine = Plan(tokens, rounds=rounds), describe_machine()
    with bar(plan.steps, "writing") as progress:
        result = measure_endless(model, prompt, plan, max_kv_size, keep, progress)
    click.echo(table(result))
    write_json(out, _as_json(result, machine, name, dtype, keep))
    if plot is not None and result.trace:
        write_atomic(plot, draw_endless(result, plot.suffix))
    if result.interrupted:
        sys.exit(INTERRUPTED)


def table(result: Endless) -> str:
    """Return the result as text."""
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
    settings = {"model": model, "dtype": dtype, "keep": keep, **dataclasses.asdict(SAMPLING)}
    return {
        "machine": dataclasses.asdict(machine),
        "settings": settings,
        **dataclasses.asdict(result),
    }


if __name__ == "__main__":
    endless()
