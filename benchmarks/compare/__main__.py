"""`python -m benchmarks.compare`: kvkeep against llama.cpp, transformers and mlx-lm, in one run."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.command import INTERRUPTED, Measurement, model_option
from benchmarks.compare.plan import PARTS, PEERS, QUICK, Plan
from kvkeep.cli.options import is_in_command_line
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.storage.files.atomic import check_writable, write_atomic, write_json

if TYPE_CHECKING:
    from benchmarks.compare.results import Result

MIN_ENDLESS_TOKENS = 200  # fewer are not meaningful
_MEASURING = ("peers", "name", "gguf", "device", "rounds", "endless_tokens", "quick")


def peer_names(value: str) -> tuple[str, ...]:
    """Parse the comma-separated peer names of an option."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in value.split(",")))
    for name in names:
        if name not in PEERS:
            raise click.BadParameter(f"expected names of {', '.join(PEERS)}; found {name!r}")
    return names


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.argument("parts", nargs=-1, type=click.Choice(PARTS), metavar="[PART]...")
@click.option(
    "--peers",
    metavar="NAME,...",
    type=peer_names,
    default=",".join(PEERS),
    help="Programs to measure.",
)
@model_option
@click.option(
    "--gguf",
    metavar="FILE.gguf",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    show_default="that of a known model",
    help="The same model for llama.cpp.",
)
@click.option("--device", metavar="NAME", default="cpu", help="Device of kvkeep and transformers.")
@click.option(
    "--rounds",
    metavar="N",
    type=click.IntRange(1),
    show_default=f"{Plan.rounds}",
    help="Repeats of each figure.",
)
@click.option(
    "--endless-tokens",
    metavar="N",
    type=click.IntRange(MIN_ENDLESS_TOKENS),
    show_default=f"{Plan.endless:,}",
    help="Tokens of the endless run.",
)
@click.option("--profile", is_flag=True, help="Only show a profile of kvkeep's decode step.")
@click.option("--quick", is_flag=True, help="Small sizes: a first look, not for publication.")
@click.option(
    "--out",
    metavar="FILE.json",
    type=click.Path(path_type=Path),
    help="Write all readings to this file.",
)
@click.option(
    "--plots",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write PNG plots to this folder.",
)
@click.option(
    "--table",
    "earlier",
    metavar="FILE.json",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measure nothing: print an earlier --out as Markdown.",
)
@click.option(
    "--into",
    "page",
    metavar="FILE.md",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Write the Markdown between the markers of this page.",
)
def compare(
    parts: tuple[str, ...],
    peers: tuple[str, ...],
    name: str,
    gguf: Path | None,
    device: str,
    rounds: int | None,
    endless_tokens: int | None,
    profile: bool,
    quick: bool,
    out: Path | None,
    plots: Path | None,
    earlier: Path | None,
    page: Path | None,
) -> None:
    """Measure kvkeep and its peers alternately, with the same weights and number of threads.

    PART: prefill, steps, decode, endless, memory, startup; default: all. Peers that are not
    installed are skipped with a message (`pip install -e '.[bench]'`). OMP_NUM_THREADS sets the
    number of threads. Ctrl-C ends the run and reports what was measured.
    """
    if profile:
        if parts or out or plots or earlier or page:
            raise InvalidArgument("--profile takes no parts and writes no files")
        _refuse_options("--profile", "peers", "gguf", "rounds", "endless_tokens")
        click.echo(_profile(name, device, QUICK if quick else Plan()))
        return
    _check_outputs(out, plots, page)
    if earlier is not None:
        if parts or out:
            raise InvalidArgument("--table takes no parts and no --out")
        _refuse_options("--table", *_MEASURING)
        result = _read_result(earlier)
    else:
        plan = _plan(quick, rounds, endless_tokens)
        result = _measure(parts or PARTS, peers, name, device, gguf, plan, quick)
    _show(result, as_markdown=earlier is not None and page is None)
    if result.readings:
        _write(result, out, plots, page)
    if earlier is None and result.ended == "interrupted":
        sys.exit(INTERRUPTED)
    if earlier is None and result.ended != "whole":
        raise KvkeepError(result.ended)


def _refuse_options(flag: str, *parameters: str) -> None:
    """Raise InvalidArgument if one of the options was passed, since `flag` does not use it."""
    for parameter in parameters:
        if is_in_command_line(parameter):
            option = parameter.replace("name", "model").replace("_", "-")
            raise InvalidArgument(f"{flag} does not use --{option}: leave it out")


def _profile(name: str, device: str, plan: Plan) -> str:
    from benchmarks.profile_step import profile_step, table
    from benchmarks.progress import bar
    from kvkeep import load_model
    from kvkeep.evaluate.haystack import manual_text

    model = load_model(name, device=device, progress=True)
    prompt = model.text.encode(manual_text())
    with bar(len(plan.contexts) * plan.profiled, "decoding") as progress:
        return table(
            [profile_step(model, prompt, n, plan.profiled, progress) for n in plan.contexts]
        )


def _plan(quick: bool, rounds: int | None, endless_tokens: int | None) -> Plan:
    plan = QUICK if quick else Plan()
    if rounds is not None:
        plan = dataclasses.replace(plan, rounds=rounds)
    if endless_tokens is not None:
        plan = dataclasses.replace(plan, endless=endless_tokens)
    return plan


def _check_outputs(out: Path | None, plots: Path | None, page: Path | None) -> None:
    """Raise before an hour of measurement if a result could not be written after it."""
    if out is not None:
        check_writable(out)
    if page is not None:
        from benchmarks.compare.tables import fill_page

        check_writable(page)
        fill_page(page, None)
    if plots is not None:
        from kvkeep.evaluate.plots import check_plottable

        plots.mkdir(parents=True, exist_ok=True)
        check_plottable(plots / "decode.png")
        check_writable(plots / "decode.png")


def _measure(
    parts: tuple[str, ...],
    peers: tuple[str, ...],
    model: str,
    device: str,
    gguf: Path | None,
    plan: Plan,
    quick: bool,
) -> "Result":
    from benchmarks.compare.run import BenchmarkOptions, run_benchmark

    def starting(part: str) -> None:
        click.echo(f"measuring: {part}", err=True)

    return run_benchmark(BenchmarkOptions(parts, peers, model, device, gguf, plan, quick), starting)


def _read_result(path: Path) -> "Result":
    from benchmarks.compare.results import Result

    try:
        return Result.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is not a result of `--out`") from error


def _show(result: "Result", as_markdown: bool) -> None:
    from benchmarks.compare.tables import markdown, text_table

    click.echo(markdown(result) if as_markdown else text_table(result))


def _write(result: "Result", out: Path | None, plots: Path | None, page: Path | None) -> None:
    from benchmarks.compare.plots import draw_plots
    from benchmarks.compare.summary import summary_json
    from benchmarks.compare.tables import fill_page

    write_json(out, {**result.as_json(), **summary_json(result)})
    if plots is not None:
        for name, content in draw_plots(result).items():
            write_atomic(plots / name, content)
    if page is not None:
        write_atomic(page, fill_page(page, result))


if __name__ == "__main__":
    compare()
