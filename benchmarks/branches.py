"""Forks of one prompt decoded in one group, against the same sessions decoded one after another.

Both ways start from the same forks and alternate, so that a machine that drifts affects both alike;
medians are reported with minimum and maximum.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.command import (
    INTERRUPTED,
    Measurement,
    check_outputs,
    dtype_option,
    model_option,
    out_option,
)
from benchmarks.machine import describe_machine
from benchmarks.prefill import Spread
from benchmarks.progress import bar
from kvkeep import Model, Session, SessionGroup, load_model
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import manual_text
from kvkeep.models.weights.packed import WEIGHT_FORMATS
from kvkeep.storage.files.atomic import write_json
from kvkeep.types import DtypeName, WeightFormat

OWN_TOKENS = 8  # distinct tokens that each branch is fed after the prompt


@dataclass(frozen=True)
class Round:
    """Seconds for all tokens of all branches, in one round.

    same: branches with the same tokens both ways; in bfloat16 near ties may be decided differently.
    branch_bytes: storage that a branch adds to the prompt's.
    """

    group_s: float
    alone_s: float
    same: int
    branch_bytes: int


@dataclass(frozen=True)
class Summary:
    """Summary of all rounds. ratio: median of alone_s / group_s within a round."""

    branches: int
    tokens: int
    rounds: int
    group_tokens_per_s: Spread
    alone_tokens_per_s: Spread
    group_step_ms: Spread
    ratio: float
    same: int
    prompt_bytes: int
    branch_bytes: int


def measure_branches(
    model: Model,
    prompt: list[int],
    endings: list[list[int]],
    tokens: int,
    rounds: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterator[Round]:
    """Decode `tokens` in each branch (the prompt and one ending) both ways; yield each round."""
    parent = model.session()
    parent.feed(prompt)
    ways = (_write_together, _write_alone)
    for index in range(rounds + 1):
        seconds, sessions_by_way = {}, {}
        for way in ways if index % 2 == 0 else reversed(ways):
            sessions_by_way[way] = _forks(parent, endings)
            start = time.perf_counter()
            way(sessions_by_way[way], tokens)
            seconds[way] = time.perf_counter() - start
            progress(len(endings) * tokens)
        if index == 0:
            continue  # a warm-up
        together, alone = sessions_by_way[_write_together], sessions_by_way[_write_alone]
        yield Round(
            group_s=seconds[_write_together],
            alone_s=seconds[_write_alone],
            same=sum(a.tokens == b.tokens for a, b in zip(together, alone, strict=True)),
            branch_bytes=(SessionGroup([parent, *together]).nbytes - parent.cache.nbytes)
            // len(endings),
        )


def _forks(parent: Session, endings: list[list[int]]) -> list[Session]:
    forks = [parent.fork() for _ in endings]
    for fork, ending in zip(forks, endings, strict=True):
        fork.feed(ending)
    return forks


def _write_together(sessions: list[Session], tokens: int) -> None:
    group = SessionGroup(sessions)
    for _ in range(tokens):
        group.next_tokens()


def _write_alone(sessions: list[Session], tokens: int) -> None:
    for session in sessions:
        for _ in range(tokens):
            session.next_token()


def summarise(rounds: list[Round], branches: int, tokens: int, prompt_bytes: int) -> Summary:
    total = branches * tokens
    return Summary(
        branches=branches,
        tokens=tokens,
        rounds=len(rounds),
        group_tokens_per_s=Spread.of([total / round_.group_s for round_ in rounds]),
        alone_tokens_per_s=Spread.of([total / round_.alone_s for round_ in rounds]),
        group_step_ms=Spread.of([1000 * round_.group_s / tokens for round_ in rounds]),
        ratio=median(round_.alone_s / round_.group_s for round_ in rounds),
        same=min(round_.same for round_ in rounds),
        prompt_bytes=prompt_bytes,
        branch_bytes=max(round_.branch_bytes for round_ in rounds),
    )


def table(summary: Summary) -> str:
    def speed(spread: Spread) -> str:
        return f"{spread.median:.1f} ({spread.least:.1f} to {spread.most:.1f})"

    return "\n".join(
        [
            f"{summary.branches} branches, {summary.tokens} tokens each, {summary.rounds} rounds",
            f"  in one group       {speed(summary.group_tokens_per_s)} tokens/s",
            f"  one after another  {speed(summary.alone_tokens_per_s)} tokens/s",
            f"  ratio              {summary.ratio:.2f}",
            f"  a group step       {speed(summary.group_step_ms)} ms",
            f"  same tokens        {summary.same} of {summary.branches} branches",
            f"  memory             {summary.prompt_bytes / 1e6:.1f} MB for the prompt, once; "
            f"{summary.branch_bytes / 1e6:.1f} MB for each branch",
        ]
    )


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--branches", "count", default=16, type=click.IntRange(1), help="Number of forks.")
@click.option(
    "--prompt-tokens", default=2000, type=click.IntRange(1), help="Length of the shared prompt."
)
@click.option("--tokens", default=32, type=click.IntRange(1), help="Tokens per branch and round.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Measurements of each way.")
@model_option
@dtype_option
@click.option(
    "--weights",
    type=click.Choice(WEIGHT_FORMATS),
    show_default="as the file has them",
    help="How weights are held in memory.",
)
@out_option
def branches(
    count: int,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    name: str,
    dtype: DtypeName,
    weights: WeightFormat | None,
    out: Path | None,
) -> None:
    """Fork one prompt and decode the forks: in a group, and one after another."""
    check_outputs(out)
    model = load_model(name, dtype=dtype, weights=weights, progress=True)
    ids = model.text.encode(manual_text())
    if prompt_tokens + count * OWN_TOKENS > len(ids):
        raise InvalidArgument(f"the text has {len(ids)} tokens: fewer branches or a shorter prompt")
    first = range(prompt_tokens, prompt_tokens + count * OWN_TOKENS, OWN_TOKENS)
    endings = [ids[start : start + OWN_TOKENS] for start in first]
    machine, measured, interrupted = describe_machine(), list[Round](), False
    try:
        with bar(2 * (rounds + 1) * count * tokens, "branches") as shown:
            for round_ in measure_branches(
                model, ids[:prompt_tokens], endings, tokens, rounds, shown
            ):
                measured.append(round_)
    except KeyboardInterrupt:
        interrupted = True
    if measured:
        layout = model.decoder.new_cache().layout
        summary = summarise(measured, count, tokens, prompt_tokens * layout.cell_bytes)
        click.echo(table(summary))
        result = {
            "machine": dataclasses.asdict(machine),
            "settings": {
                "model": name,
                "dtype": dtype,
                "weights": model.weights,
                "policy": "sliding",
                "prompt_tokens": prompt_tokens,
                "own_tokens": OWN_TOKENS,
            },
            "summary": dataclasses.asdict(summary),
            "measurements": [dataclasses.asdict(round_) for round_ in measured],
        }
        write_json(out, result)
    if interrupted:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    branches()
