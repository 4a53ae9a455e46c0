"""Branches of one prompt that write in one group, against the same sessions one after another.

Both ways start from the same forks and alternate, so that a drifting machine meets both alike;
medians are reported beside the least and the most.
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
from kvkeep.evaluate.manual import manual_text
from kvkeep.models.weights.packed import WEIGHTS
from kvkeep.storage.files.atomic import write_json
from kvkeep.types import DtypeName, WeightsName

OWN = 8  # tokens of its own that each branch is fed after the prompt


@dataclass(frozen=True)
class Round:
    """Seconds for all tokens of all branches, each way.

    same: branches that wrote the same tokens both ways. In bfloat16 a near tie may fall otherwise.
    branch_bytes: storage that a branch adds to the prompt's.
    """

    group_s: float
    alone_s: float
    same: int
    branch_bytes: int


@dataclass(frozen=True)
class Summary:
    """Over all rounds. ratio: of the two ways' times in one round; the median of these."""

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
    """`tokens` for each branch, which is the prompt and one of the endings."""
    parent = model.session()
    parent.feed(prompt)
    ways = (_write_together, _write_alone)
    for index in range(rounds + 1):
        seconds, written = {}, {}
        for way in ways if index % 2 == 0 else reversed(ways):
            written[way] = _forks(parent, endings)
            begun = time.perf_counter()
            way(written[way], tokens)
            seconds[way] = time.perf_counter() - begun
            progress(len(endings) * tokens)
        if index == 0:
            continue  # the kernels were made in it
        together, alone = written[_write_together], written[_write_alone]
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


def summarise(found: list[Round], branches: int, tokens: int, prompt_bytes: int) -> Summary:
    total = branches * tokens
    return Summary(
        branches=branches,
        tokens=tokens,
        rounds=len(found),
        group_tokens_per_s=Spread.of([total / each.group_s for each in found]),
        alone_tokens_per_s=Spread.of([total / each.alone_s for each in found]),
        group_step_ms=Spread.of([1000 * each.group_s / tokens for each in found]),
        ratio=median(each.alone_s / each.group_s for each in found),
        same=min(each.same for each in found),
        prompt_bytes=prompt_bytes,
        branch_bytes=max(each.branch_bytes for each in found),
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
@click.option("--branches", "count", default=16, type=click.IntRange(1), help="Forks.")
@click.option("--prompt-tokens", default=2000, type=click.IntRange(1), help="That they share.")
@click.option("--tokens", default=32, type=click.IntRange(1), help="That each writes a round.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Measurements of each way.")
@model_option
@dtype_option
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    show_default="as the file has them",
    help="What is read of the model for each token.",
)
@out_option
def branches(
    count: int,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    name: str,
    dtype: DtypeName,
    weights: WeightsName | None,
    out: Path | None,
) -> None:
    """Fork one prompt and let the forks write: in a group, and one after another."""
    check_outputs(out)
    model = load_model(name, dtype=dtype, weights=weights, progress=True)
    ids = model.text.encode(manual_text())
    if prompt_tokens + count * OWN > len(ids):
        raise InvalidArgument(f"the text has {len(ids)} tokens: fewer branches or a shorter prompt")
    first = range(prompt_tokens, prompt_tokens + count * OWN, OWN)
    endings = [ids[start : start + OWN] for start in first]
    machine, found, interrupted = describe_machine(), list[Round](), False
    try:
        with bar(2 * (rounds + 1) * count * tokens, "branches") as shown:
            for each in measure_branches(
                model, ids[:prompt_tokens], endings, tokens, rounds, shown
            ):
                found.append(each)
    except KeyboardInterrupt:
        interrupted = True
    if found:
        layout = model.decoder.new_cache().layout
        summary = summarise(found, count, tokens, prompt_tokens * layout.cell_bytes)
        click.echo(table(summary))
        result = {
            "machine": dataclasses.asdict(machine),
            "settings": {
                "model": name,
                "dtype": dtype,
                "weights": model.weights,
                "policy": "sliding",
                "prompt_tokens": prompt_tokens,
                "own_tokens": OWN,
            },
            "summary": dataclasses.asdict(summary),
            "measurements": [dataclasses.asdict(each) for each in found],
        }
        write_json(out, result)
    if interrupted:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    branches()
