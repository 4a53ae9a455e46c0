"""Measures what eviction from a model's own reasoning loses while the prompt stays exact.

    python -m benchmarks.reasoning_traces --out docs/results/reasoning-traces.json

The model reasons about a word problem for many tokens. The prompt is pinned, the cells of the
reasoning are compressed, and forks predict how the uncompressed session went on: the KL divergence
is the mean over the next 256 tokens. "random" keeps random cells, as many in each KV head, which
arXiv:2609.03430 and arXiv:2606.03928 report to be better than scores.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, stdev

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.compression_loss import KL_TOKENS, predict
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import Sampling, Session, load_model
from kvkeep.evaluate.recall import parse_method
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json

PEOPLE = "Emma", "Noah", "Mia", "Leo", "Ada", "Finn", "Ivy", "Max"
THINGS = "apples", "coins", "books", "stamps", "shells"
TEMPERATURE = 0.8


@dataclass(frozen=True)
class TraceLoss:
    """One method at one ratio on one trace. ratio: of the cells of the reasoning.

    kl: in nats. log_likelihood: of the tokens by which the trace went on.
    """

    sample: int
    prompt_tokens: int
    trace_tokens: int
    method: str
    ratio: float
    cells: int
    kl: float
    log_likelihood: float


def word_problem(random: Random) -> str:
    """Return a prompt with a word problem about what eight people have and give away."""
    thing, lines = random.choice(THINGS), list[str]()
    for person in PEOPLE:
        lines.append(f"{person} has {random.randint(11, 99)} {thing}.")
    for _ in range(6):
        giver, taker = random.sample(PEOPLE, 2)
        lines.append(f"{giver} gives {random.randint(2, 9)} {thing} to {taker}.")
    return (
        f"Problem: {' '.join(lines)} How many {thing} does each of them have in the end, and who "
        "has the most?\n\nLet us think step by step, check each step, and try another way.\n\n"
        "Step 1:"
    )


def measure(
    model: Model, sample: int, seed: int, tokens: int, settings: Sequence[tuple[str, float]]
) -> Iterator[TraceLoss]:
    """Yield the loss of each method and ratio on one trace."""
    random = Random(f"{seed} {sample}")
    session = model.session(policy="full")
    prompt = session.feed(word_problem(random)).tokens
    sampling = Sampling(temperature=TEMPERATURE, seed=random.randrange(2**31))
    for _ in session.stream(tokens, sampling, ignore_eos=True):
        pass
    session.pin(0, prompt)
    following = _continuation(session, sampling)
    log_probs, log_likelihood = predict(session, following)
    cells = session.cache.cells
    yield TraceLoss(sample, prompt, tokens, "uncompressed", 1.0, cells, 0.0, log_likelihood)
    for label, ratio in settings:
        fork, (method, budget) = session.fork(), parse_method(label)
        remaining = prompt + tokens / ratio
        fork.compress(cells / remaining, method, seed=seed + sample, budget=budget)
        compressed, log_likelihood = predict(fork, following)
        kl = float((log_probs.exp() * (log_probs - compressed)).sum(-1).mean())
        held = fork.cache.cells
        yield TraceLoss(
            sample, prompt, tokens, label, ratio, held, rounded(kl), round(log_likelihood, 3)
        )


def _continuation(session: Session, sampling: Sampling) -> list[int]:
    """Return the tokens that the session would sample next; it does not change."""
    fork = session.fork()
    start = len(fork.tokens)
    for _ in fork.stream(KL_TOKENS, sampling, ignore_eos=True):
        pass
    return list(fork.tokens[start:])


def table(results: Sequence[TraceLoss]) -> str:
    """Return a Markdown table of means over traces, with the standard error of the KL."""
    lines = ["| Method | Ratio | traces | cells | KL |", "|---|---:|---:|---:|---:|"]
    groups: dict[tuple[str, float], list[TraceLoss]] = {}
    for row in results:
        groups.setdefault((row.method, row.ratio), []).append(row)
    for (method, ratio), rows in groups.items():
        values = [row.kl for row in rows]
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        lines.append(
            f"| {method} | {ratio:g} | {len(rows)} | {mean(row.cells for row in rows):.0f} | "
            f"{mean(values):.4f} ± {error:.4f} |"
        )
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default=1000, help="Tokens of reasoning.")
@click.option("--methods", default="random,random:heads,kvzip,snapkv,h2o")
@click.option("--ratios", default="4,8")
@click.option("--samples", "count", default=8)
@click.option("--seed", default=81)
@out_option
def reasoning_traces(
    name: str, tokens: int, methods: str, ratios: str, count: int, seed: int, out: Path | None
) -> None:
    """Measure KL divergence after eviction from generated reasoning."""
    check_outputs(out)
    model, results = load_model(name), list[TraceLoss]()
    settings = [(label, float(x)) for x in ratios.split(",") for label in methods.split(",")]
    about = {"model": name, "tokens": tokens, "seed": seed, "temperature": TEMPERATURE}
    machine = dataclasses.asdict(describe_machine())
    with bar(count * (len(settings) + 1), "compressions", " compressions") as advance:
        for sample in range(count):
            for result in measure(model, sample, seed, tokens, settings):
                results.append(result)
                advance(1)
            rows = [dataclasses.asdict(row) for row in results]
            write_json(out, {"about": about, "machine": machine, "readings": rows})
    click.echo(table(results))


if __name__ == "__main__":
    reasoning_traces()
