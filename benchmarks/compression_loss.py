"""Measures how compression of a session changes predictions of the text that follows.

    python -m benchmarks.compression_loss --out docs/results/compression-loss.json

Passages of real text are prefilled; forks are compressed, and predict the tokens that follow. The
KL divergence from the uncompressed session's predictions is the mean over the next 256 tokens, and
perplexity is over the next 512. "window" keeps the first four tokens and the newest ones, as
StreamingLLM does, in place of a method. The result is written after each passage; the same command
continues a run that was ended.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, TypeAlias

import click
import torch
from torch import Tensor

from benchmarks.command import (
    Measurement,
    check_outputs,
    model_option,
    out_option,
    parse_lengths,
    require_text,
)
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import Calibration, Session, load_calibration, load_model
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import TEXTS
from kvkeep.evaluate.recall import parse_method
from kvkeep.model import Model
from kvkeep.session.evaluation import evaluate
from kvkeep.storage.files.atomic import write_json

WINDOW = "window"  # instead of a method: the first four tokens and the newest
UNCOMPRESSED = "uncompressed"  # the method of the baseline, at ratio 1
ANCHORS = 4
KL_TOKENS, PERPLEXITY_TOKENS = 256, 512

Setting: TypeAlias = tuple[str, float]  # method and ratio


@dataclass(frozen=True)
class CompressionLoss:
    """One method at one ratio after one passage.

    sample: the passage's index. cells: held afterwards. kl: in nats, the mean of the next tokens.
    log_likelihood: of all tokens that follow.
    """

    haystack: str
    tokens: int
    sample: int
    method: str
    ratio: float
    cells: int
    kl: float
    log_likelihood: float


@dataclass(frozen=True)
class Plan:
    """The settings of a run: seed of places and of random cells; following: tokens predicted."""

    model: str
    seed: int
    samples: int
    following: int
    calibration: str | None = None


@dataclass
class Results:
    """The results of a run and of those that it continues. machines: of each of them."""

    plan: Plan
    readings: list[CompressionLoss] = field(default_factory=list)
    machines: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path | None) -> None:
        about = dataclasses.asdict(self.plan)
        rows = [dataclasses.asdict(row) for row in self.readings]
        write_json(path, {"about": about, "machines": self.machines, "readings": rows})


@dataclass(frozen=True)
class _Prefilled:
    """A prefilled passage, the tokens that follow, and its predictions of them.

    log_probs: `[KL_TOKENS, vocab]` float32. log_likelihood: of all that follow.
    """

    session: Session
    following: list[int]
    log_probs: Tensor
    log_likelihood: float


def passages(ids: Sequence[int], tokens: int, plan: Plan) -> list[tuple[list[int], list[int]]]:
    """Return passages of so many tokens from random places, each with the tokens that follow."""
    random, result = Random(plan.seed), []
    for _ in range(plan.samples):
        start = random.randrange(len(ids) - tokens - plan.following)
        end = start + tokens
        result.append((list(ids[start:end]), list(ids[end : end + plan.following])))
    return result


@torch.inference_mode()
def predict(session: Session, following: list[int]) -> tuple[Tensor, float]:
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
    passage: tuple[list[int], list[int]],
    settings: Sequence[Setting],
    seed: int,
    calibration: Calibration | None = None,
) -> Iterator[tuple[Setting, int, float, float]]:
    """Yield each setting's cells, KL divergence and log-likelihood after a passage."""
    session = model.session(policy="full")
    session.feed(passage[0])
    following = passage[1]
    full = _Prefilled(session, following, *predict(session.fork(), following))
    for label, ratio in settings:
        if label == UNCOMPRESSED:
            yield (label, ratio), session.cache.cells, 0.0, full.log_likelihood
            continue
        fork = session.fork()
        _compress(fork, label, ratio, seed, calibration)
        cells = fork.cache.cells
        log_probs, log_likelihood = predict(fork, following)
        difference = full.log_probs.exp() * (full.log_probs - log_probs)
        yield (label, ratio), cells, float(difference.sum(-1).mean()), log_likelihood


def table(results: Sequence[CompressionLoss], following: int) -> str:
    """Return a Markdown table of means over the passages that all methods have."""
    lines = [
        "| Text | tokens | passages | Method | Ratio | cells | KL | Perplexity |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, int, str, float], list[CompressionLoss]] = {}
    for row in results:
        groups.setdefault((row.haystack, row.tokens, row.method, row.ratio), []).append(row)
    for (haystack, tokens, method, ratio), rows in groups.items():
        likelihood = {row.sample: row.log_likelihood for row in rows}
        full = groups[haystack, tokens, UNCOMPRESSED, 1.0]
        lost = mean(x.log_likelihood - likelihood[x.sample] for x in full if x.sample in likelihood)
        perplexity = math.exp(-mean(likelihood.values()) / following)
        change = "" if method == UNCOMPRESSED else f" ({math.expm1(lost / following):+.2%})"
        lines.append(
            f"| {haystack} | {tokens:,} | {len(rows)} | {method} | {ratio:g} | "
            f"{mean(row.cells for row in rows):.0f} | {mean(row.kl for row in rows):.4f} | "
            f"{perplexity:.2f}{change} |"
        )
    return "\n".join(lines)


def read_results(path: Path | None, plan: Plan) -> Results:
    """Return the results of an earlier run, or none. Raises InvalidArgument if settings differ."""
    if path is None or not path.exists():
        return Results(plan)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about, earlier_samples = content["about"], int(content["about"]["samples"])
        readings = [CompressionLoss(**row) for row in content["readings"]]
        # Files of earlier versions have the machine of the last run only.
        machines = content["machines"] if "machines" in content else [content["machine"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"{path} is no result of this benchmark: take another --out"
        ) from error
    if about != {**dataclasses.asdict(plan), "samples": earlier_samples}:
        raise InvalidArgument(
            f"{path} has results of other settings, {about}: write to another file"
        )
    most = max(plan.samples, earlier_samples)
    return Results(dataclasses.replace(plan, samples=most), readings, machines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default="1000,4000", type=parse_lengths, help="Lengths of passages.")
@click.option("--haystack", default="docstrings,manual", help=f"Of {', '.join(TEXTS)}.")
@click.option("--methods", default=f"kvzip,kvzip-exact,random:heads,{WINDOW}")
@click.option("--ratios", default="4,8")
@click.option("--samples", "count", default=10, type=click.IntRange(1))
@click.option(
    "--following",
    default=PERPLEXITY_TOKENS,
    type=click.IntRange(1),
    help="Tokens that are predicted.",
)
@click.option("--seed", default=71)
@click.option("--calibration", type=click.Path(exists=True, path_type=Path))
@out_option
def compression_loss(
    name: str,
    tokens: tuple[int, ...],
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
    plan = Plan(name, seed, count, following, calibration.name if calibration else None)
    results = read_results(out, plan)
    results.machines.append(dataclasses.asdict(describe_machine()))
    model = load_model(name)
    settings = [(UNCOMPRESSED, 1.0)]
    settings += [
        (label, float(ratio)) for ratio in ratios.split(",") for label in methods.split(",")
    ]
    statistics = load_calibration(calibration, model) if calibration else None
    groups = [(n, text) for n in tokens for text in haystack.split(",")]
    texts = {text: model.text.encode(TEXTS[text]()) for _, text in groups}
    for text, ids in texts.items():
        require_text(text, len(ids), max(tokens) + following + 1)
    readings = results.readings
    done = {(row.tokens, row.haystack, row.sample, row.method, row.ratio) for row in readings}
    with bar(len(groups) * count * len(settings), "compressions", " compressions") as advance:
        for index in range(count):
            for length, text in groups:
                missing = [x for x in settings if (length, text, index, *x) not in done]
                advance(len(settings) - len(missing))
                passage = passages(texts[text], length, plan)[index]
                measured = measure(model, passage, missing, seed + index, statistics)
                for setting, cells, kl, likelihood in measured if missing else ():
                    row = CompressionLoss(
                        *(text, length, index, *setting, cells),
                        kl=rounded(kl),
                        log_likelihood=round(likelihood, 3),
                    )
                    readings.append(row)
                    advance(1)
                results.write(out)
    readings.sort(key=lambda row: (row.tokens, row.haystack, row.sample))
    results.write(out)
    click.echo(table(readings, following))


if __name__ == "__main__":
    compression_loss()
