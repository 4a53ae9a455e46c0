"""The time to sample a token, by filters and size of the vocabulary.

    python -m benchmarks.sampling --out docs/results/sampling.json

The logits are drawn from a normal distribution with a standard deviation of 3.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import click
import torch
from torch import Tensor

from benchmarks.command import Measurement, ResultFile, out_option, parse_lengths
from benchmarks.figures import rounded
from kvkeep import Sampling
from kvkeep.session.default_sampling import DEFAULT_SAMPLING
from kvkeep.session.sampler import Sampler

_SPREAD = 3.0  # standard deviation of the logits
_RECENT = list(range(1000))  # tokens so far, for the penalties
SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": Sampling(),
    "temperature": Sampling(1.0),
    "top_p 0.95": Sampling(1.0, top_p=0.95),
    "min_p 0.05": Sampling(1.0, min_p=0.05),
    "default": DEFAULT_SAMPLING,
    "10,000 biases": Sampling(1.0, min_p=0.05, logit_bias=tuple((i, -1.0) for i in range(10_000))),
}


@dataclass(frozen=True)
class SamplingTime:
    """Median milliseconds to sample a token."""

    vocabulary: int
    sampling: str
    milliseconds: float


def measure(logits: Tensor, sampling: Sampling, rounds: int) -> float:
    """Return the median milliseconds of sampling from logits `[vocab]`."""
    sampler, seeded = Sampler(), replace(sampling, seed=1)
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        start = time.perf_counter()
        sampler.sample(logits, _RECENT, seeded)
        seconds.append(time.perf_counter() - start)
    return rounded(1000 * median(seconds[1:]))


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option(
    "--vocabularies",
    default="49152,151936,262144",
    type=parse_lengths,
    help="Numbers of tokens in the vocabulary.",
)
@click.option("--rounds", default=100, type=click.IntRange(1), help="Samples of each kind.")
@out_option
def sampling(vocabularies: tuple[int, ...], rounds: int, out: Path | None) -> None:
    """Measure the time to sample a token."""
    result = ResultFile(out, settings={"rounds": rounds, "spread": _SPREAD})
    random, rows = torch.Generator().manual_seed(0), list[SamplingTime]()
    for vocabulary in vocabularies:
        logits = torch.randn(vocabulary, generator=random, dtype=torch.float32, device="cpu")
        for name, parameters in SAMPLINGS.items():
            milliseconds = measure(logits * _SPREAD, parameters, rounds)
            rows.append(SamplingTime(vocabulary, name, milliseconds))
            click.echo(f"{vocabulary:,} tokens, {name}: {milliseconds:.2f} ms")
        result.write(rows=rows)


if __name__ == "__main__":
    sampling()
