"""`kvkeep perplexity`: the perplexity of a text under a bounded memory."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli import options
from kvkeep.cli.memory import MEMORY_SECTION, MemoryOptions
from kvkeep.cli.output import say
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import write_atomic

if TYPE_CHECKING:
    from kvkeep.cli.run import SessionRun
    from kvkeep.evaluate.perplexity import PerplexityPoint


@options.command(short_help="Measure the perplexity of a text.")
@click.argument("file")
def perplexity(
    file: str,
    first: int = options.integer_option(
        "--from", default=1, help="First token to score; those before are context."
    ),
    end: int | None = options.integer_option(
        "--to", minimum=2, show_default="all", help="Stop before this token."
    ),
    memory: MemoryOptions = options.option_group(MemoryOptions, section=MEMORY_SECTION),
    token_by_token: bool = options.option(
        "--token-by-token",
        "--written",  # its earlier name
        is_flag=True,
        help="Evaluate tokens one by one, as in decode: with packed weights.",
    ),
    plot: Path | None = options.file_option(
        metavar="FILE.png", help="Plot perplexity and memory over tokens."
    ),
    output: options.OutputOptions = options.OUTPUT_OPTIONS,
) -> None:
    """Measure the perplexity of the text in FILE ("-": standard input).

    Each token is predicted from the cells that the cache holds at that point, as in streaming.
    Compare budgets and policies with the same --from and --to.
    """
    text = options.read_nonempty_text(file)
    if end is not None and first >= end:
        raise InvalidArgument(f"--from must be below --to; found {first} and {end}")
    output.check()
    if plot is not None:
        from kvkeep.evaluate.plots import check_plottable

        check_plottable(plot)
    memory.check()

    from kvkeep.cli.run import SessionRun
    from kvkeep.cli.session_file import OpenedSession

    model = memory.load(output.progress)
    ids = model.text.encode(text)
    if end is not None and end > len(ids):
        raise InvalidArgument(f"--to must be at most {len(ids)}, the tokens in {file}; found {end}")
    run = SessionRun("perplexity", OpenedSession(model, memory.new_session(model)), output)
    run.details = {
        "from": first,
        "to": len(ids[:end]),
        "token_by_token": token_by_token,
        "prefill_step": run.session.prefill_step,
        "scored_tokens": 0,
    }
    points: list[PerplexityPoint] = []
    with run.reporting():
        try:
            _score(run, ids[:end], first, token_by_token, points)
        finally:
            if points:
                _report_result(run, points, plot)
    run.close("end")


def _score(
    run: "SessionRun", ids: list[int], first: int, one_by_one: bool, points: list["PerplexityPoint"]
) -> None:
    """Score tokens from `first` on. Points are appended as they come: an interrupt loses none."""
    from kvkeep.evaluate.perplexity import perplexity_points

    with run.token_progress_bar(len(ids), "scoring") as bar, run.measuring(run.prefill):
        for point in perplexity_points(run.session, ids, first, one_by_one):
            bar.update(point.tokens - bar.n)
            points.append(point)
            run.details["scored_tokens"] = point.scored
            if not math.isnan(point.perplexity):
                run.perplexity = point.perplexity
                bar.set_postfix_str(f"perplexity {point.perplexity:.2f}", refresh=False)


def _report_result(run: "SessionRun", points: list["PerplexityPoint"], plot: Path | None) -> None:
    """Draw the plot, if requested, and print the last perplexity."""
    session, name = run.session, run.model.name
    if plot is not None:
        from kvkeep.evaluate.plots import draw_perplexity

        title = f"{name}, {session.policy}, {session.max_kv_size} cells, {session.keep} kept"
        write_atomic(plot, draw_perplexity(points, title, plot.suffix))
        if len(points) == 1:
            say(f"{plot} has only one point, since the text was one step: lower --prefill-step")
    if run.perplexity is not None:
        click.echo(f"perplexity {run.perplexity:.4f} of {points[-1].scored} tokens")
