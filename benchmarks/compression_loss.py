"""Measures how compression of a session changes predictions of the text that follows.

    python -m benchmarks.compression_loss --tokens 1000 --out docs/results/compression-loss.json

Passages of real text are prefilled; forks are compressed, and predict the tokens that follow. The
KL divergence from the uncompressed session's predictions is the mean over the next 256 tokens, and
perplexity is over the next 512. "window" keeps the first four tokens and the newest ones, as
StreamingLLM does, in place of a method.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

import click
import torch
from torch import Tensor

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import Calibration, Session, load_calibration, load_model
from kvkeep.evaluate.haystack import docstrings_text, manual_text
from kvkeep.evaluate.recall import parse_method
from kvkeep.model import Model
from kvkeep.session.evaluation import evaluate
from kvkeep.storage.files.atomic import write_json

HAYSTACKS: dict[str, Callable[[], str]] = {"docstrings": docstrings_text, "manual": manual_text}
WINDOW = "window"  # instead of a method: the first four tokens and the newest
ANCHORS = 4
KL_TOKENS, PERPLEXITY_TOKENS = 256, 512


@dataclass(frozen=True)
class CompressionLoss:
    """One method at one ratio, over all samples.

    kl: in nats, the mean of the next tokens; kl_samples: of each sample. perplexity: of the next
    tokens; uncompressed: the same of the uncompressed session. cells: held afterwards, the mean.
    """

    haystack: str
    tokens: int
    method: str
    ratio: float
    cells: float
    kl: float
    kl_samples: tuple[float, ...]
    perplexity: float
    uncompressed: float


@dataclass(frozen=True)
class _Sample:
    """A prefilled passage, the tokens that follow, and its predictions of them.

    log_probs: `[KL_TOKENS, vocab]` float32. log_likelihood: of all that follow.
    """

    session: Session
    following: list[int]
    log_probs: Tensor
    log_likelihood: float


def samples(
    model: Model, haystack: str, tokens: int, count: int, seed: int, following: int
) -> Iterator[_Sample]:
    """Prefill passages of so many tokens from random places of a text."""
    ids = model.text.encode(HAYSTACKS[haystack]())
    random = Random(seed)
    for _ in range(count):
        start = random.randrange(len(ids) - tokens - following)
        session = model.session(policy="full")
        session.feed(ids[start : start + tokens])
        rest = ids[start + tokens : start + tokens + following]
        yield _Sample(session, rest, *_predict(session.fork(), rest))


@torch.inference_mode()
def _predict(session: Session, following: list[int]) -> tuple[Tensor, float]:
    """Return the predictions of the first tokens that follow, and the log-likelihood of all."""
    memory, parts, log_likelihood = session.core.memory.fork(), list[Tensor](), 0.0
    decoder, last_hidden = memory.decoder, memory.hidden
    assert last_hidden is not None
    for start in range(0, len(following), KL_TOKENS):
        step_ids = following[start : start + KL_TOKENS]
        for result in evaluate(memory, step_ids, KL_TOKENS):
            hidden = torch.cat((last_hidden, result.hidden[:-1]))
            last_hidden = result.hidden[-1:]
            log_probs = decoder.logits(hidden).log_softmax(-1)
            targets = torch.tensor(step_ids, dtype=torch.int64)
            log_likelihood += float(log_probs.gather(1, targets[:, None]).double().sum())
            if not start:
                parts.append(log_probs)
    return torch.cat(parts), log_likelihood


def _compress(
    session: Session, label: str, ratio: float, seed: int, calibration: Calibration | None
) -> None:
    """Compress a session by a method such as "kvzip" or "random:heads", or to a window."""
    if label == WINDOW:
        cells = session.cache.cells
        session.delete(ANCHORS, cells - math.ceil(cells / ratio) + ANCHORS)
        return
    method, budget = parse_method(label)
    session.compress(ratio, method, seed=seed, calibration=calibration, budget=budget)


def measure(
    model: Model,
    haystack: str,
    tokens: int,
    settings: Sequence[tuple[str, float]],
    count: int,
    seed: int,
    following: int,
    calibration: Calibration | None = None,
) -> list[CompressionLoss]:
    """Measure each setting (method, ratio) on the same samples."""
    kl: dict[tuple[str, float], list[float]] = {setting: [] for setting in settings}
    likelihoods: dict[tuple[str, float], list[float]] = {setting: [] for setting in settings}
    cells: dict[tuple[str, float], list[int]] = {setting: [] for setting in settings}
    full = list[float]()
    with bar(count * len(settings), f"{haystack}, {tokens} tokens") as advance:
        for index, each in enumerate(samples(model, haystack, tokens, count, seed, following)):
            full.append(each.log_likelihood)
            for label, ratio in settings:
                fork, key = each.session.fork(), (label, ratio)
                _compress(fork, label, ratio, seed + index, calibration)
                cells[key].append(fork.cache.cells)
                log_probs, log_likelihood = _predict(fork, each.following)
                difference = each.log_probs.exp() * (each.log_probs - log_probs)
                kl[key].append(float(difference.sum(-1).mean()))
                likelihoods[key].append(log_likelihood)
                advance(1)
    scored = count * following
    return [
        CompressionLoss(
            *(haystack, tokens, label, ratio),
            cells=rounded(mean(cells[label, ratio])),
            kl=rounded(mean(kl[label, ratio])),
            kl_samples=tuple(rounded(value) for value in kl[label, ratio]),
            perplexity=round(math.exp(-sum(likelihoods[label, ratio]) / scored), 4),
            uncompressed=round(math.exp(-sum(full) / scored), 4),
        )
        for label, ratio in settings
    ]


def table(results: Sequence[CompressionLoss]) -> str:
    lines = [
        "| Text | tokens | Method | Ratio | cells | KL | Perplexity |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.haystack} | {r.tokens:,} | {r.method} | {r.ratio:g} | {r.cells:.0f} | {r.kl:.4f} | "
        f"{r.perplexity / r.uncompressed - 1:+.2%} |"
        for r in results
    ]
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default=1000)
@click.option("--haystack", default="docstrings", type=click.Choice(list(HAYSTACKS)))
@click.option("--methods", default=f"kvzip,kvzip-exact,random:heads,{WINDOW}")
@click.option("--ratios", default="4,8")
@click.option("--samples", "count", default=10)
@click.option("--following", default=PERPLEXITY_TOKENS, help="Tokens that are predicted.")
@click.option("--seed", default=71)
@click.option("--calibration", type=click.Path(exists=True, path_type=Path))
@out_option
def compression_loss(
    name: str,
    tokens: int,
    haystack: str,
    methods: str,
    ratios: str,
    count: int,
    following: int,
    seed: int,
    calibration: Path | None,
    out: Path | None,
) -> None:
    """Measure KL divergence and perplexity after compression."""
    check_outputs(out)
    model = load_model(name)
    settings = [
        (label, float(ratio)) for ratio in ratios.split(",") for label in methods.split(",")
    ]
    statistics = load_calibration(calibration, model) if calibration else None
    results = measure(model, haystack, tokens, settings, count, seed, following, statistics)
    click.echo(table(results))
    about = {"model": name, "seed": seed, "samples": count, "following": following}
    machine = dataclasses.asdict(describe_machine())
    rows = [dataclasses.asdict(result) for result in results]
    write_json(out, {"about": about, "machine": machine, "readings": rows})


if __name__ == "__main__":
    compression_loss()
