"""What editing a live session costs, and whether many edits make its logits drift.

Drift is measured against the same session in float32: the same weights, tokens and edits, so that
all that differs is rounding, that of keys and values included. (Tests hold the float32 session to a
naive memory that rotates raw keys anew.) If an edit rewrote keys, each would round them once more,
and the difference would grow with the number of edits.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.manual import manual_text
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.files.atomic import write_json


@dataclass(frozen=True)
class Plan:
    """context: tokens of the session that is edited. span: tokens put in or taken out where time is
    measured. edits: scattered ones. drift_context, drift_tokens: the session whose drift is
    measured, and how many tokens are compared after its edits. decode: tokens timed. rounds: of
    each timing.
    """

    context: int = 4000
    span: int = 50
    edits: int = 32
    drift_context: int = 1000
    drift_tokens: int = 128
    decode: int = 32
    rounds: int = 5


@dataclass(frozen=True)
class Drift:
    """After some edits: how far logits are from those in float32, over the tokens that follow.

    mean_difference: of all logits. max_difference: the largest of all. kl: the mean
    Kullback-Leibler divergence from the float32 distribution, in nats.
    """

    edits: int
    mean_difference: float
    max_difference: float
    kl: float


@dataclass(frozen=True)
class Cost:
    """Median seconds, and that against evaluating the context. tokens_evaluated: by one."""

    what: str
    seconds: float
    of_context: float
    tokens_evaluated: int


@dataclass(frozen=True)
class Decode:
    """segments: that the cache is made of. median_ms: per token."""

    edits: int
    segments: int
    median_ms: float


def scattered(session: Session, edits: int, words: list[int]) -> Iterator[int]:
    """Makes edits all over a session, of each kind in turn; yields how many were made."""
    for index in range(edits):
        size = 3 + index % 5
        # The golden ratio spreads places evenly, however many there are.
        start = int((index * 0.618034 % 1) * (len(session.tokens) - 2 * size))
        new = words[index * size % (len(words) - size) :][:size]
        if index % 3 == 0:
            session.delete(start, start + size)
        elif index % 3 == 1:
            session.insert(start, new)
        else:
            session.replace(start, start + size + 1, new)
        yield index + 1


def measure_drift(model: Model, exact: Model, ids: list[int], plan: Plan) -> list[Drift]:
    """After no edit, one, a quarter of them and all."""
    count, found = plan.drift_context, []
    context, following = ids[:count], ids[count : count + plan.drift_tokens]
    words = ids[count + plan.drift_tokens :]
    pair = [each.session(policy="full") for each in (model, exact)]
    for session in pair:
        session.feed(context)
    found.append(_drift(0, pair, following))
    for done, _ in zip(*(scattered(each, plan.edits, words) for each in pair), strict=True):
        if done in (1, plan.edits // 4, plan.edits):
            found.append(_drift(done, pair, following))
    return found


def _drift(edits: int, pair: list[Session], following: list[int]) -> Drift:
    rounded, exact = (session.fork() for session in pair)
    means, most, divergences = [], 0.0, []
    for token in following:
        for session in (rounded, exact):
            session.feed([token])
        found, expected = rounded.logits, exact.logits
        assert found is not None
        assert expected is not None
        difference = (found - expected).abs()
        means.append(float(difference.mean()))
        most = max(most, float(difference.max()))
        p, q = expected.log_softmax(-1), found.log_softmax(-1)
        divergences.append(float((p.exp() * (p - q)).sum()))
    return Drift(edits, mean(means), most, mean(divergences))


def measure_costs(session: Session, ids: list[int], plan: Plan, context_s: float) -> list[Cost]:
    """Edits of `plan.span` tokens in the middle of a session, each on a fork of it."""
    middle, span = plan.context // 2, plan.span
    new = ids[plan.context : plan.context + span]
    edits: list[tuple[str, Callable[[Session], int]]] = [
        ("delete", lambda s: s.delete(middle, middle + span).tokens_evaluated),
        ("insert", lambda s: s.insert(middle, new).tokens_evaluated),
        ("delete, suffix", lambda s: s.delete(middle, middle + span, "suffix").tokens_evaluated),
        ("insert, suffix", lambda s: s.insert(middle, new, "suffix").tokens_evaluated),
    ]
    costs = []
    for what, do in edits:
        times, evaluated = [], 0
        for _ in range(plan.rounds):
            fork = session.fork()
            begun = time.perf_counter()
            evaluated = do(fork)
            times.append(time.perf_counter() - begun)
        seconds = median(times)
        costs.append(Cost(what, rounded(seconds), rounded(seconds / context_s), evaluated))
    return costs


def measure_decode(session: Session, ids: list[int], plan: Plan) -> list[Decode]:
    """The untouched session and one edited all over, token by token in turn."""
    edited = session.fork()
    for _ in scattered(edited, plan.edits, ids[plan.context :]):
        pass
    sessions = (session.fork(), edited)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(plan.decode + 4):
        for each, mine in zip(sessions, times, strict=True):
            begun = time.perf_counter()
            each.next_token()
            if index >= 4:  # the first ones make kernels and storage
                mine.append((time.perf_counter() - begun) * 1e3)
    return [
        Decode(edits, len(each.cache.segments), rounded(median(mine)))
        for edits, each, mine in zip((0, plan.edits), sessions, times, strict=True)
    ]


@dataclass(frozen=True)
class Edits:
    context_s: float
    drift: list[Drift]
    costs: list[Cost]
    decode: list[Decode]


def measure_edits(
    model: Model, exact: Model, ids: list[int], plan: Plan, shown: Callable[[int], None]
) -> Edits:
    """Raises InvalidArgument where the text is too short for the plan."""
    needed = max(plan.context, plan.drift_context + plan.drift_tokens) + 4 * plan.span
    if len(ids) < needed:
        raise InvalidArgument(f"the text has {len(ids)} tokens; this plan needs {needed}")
    drift = measure_drift(model, exact, ids, plan)
    times, session = [], model.session(policy="full")
    for _ in range(max(1, plan.rounds // 2)):
        session = model.session(policy="full")
        times.append(session.feed(ids[: plan.context], shown).seconds)
    context_s = median(times)
    return Edits(
        rounded(context_s),
        drift,
        measure_costs(session, ids, plan, context_s),
        measure_decode(session, ids, plan),
    )


def table(found: Edits, plan: Plan) -> str:
    lines = [f"{'edits':>6}  {'mean |Δ logit|':>15}  {'max |Δ logit|':>14}  {'KL, nats':>10}"]
    lines += [
        f"{d.edits:>6}  {d.mean_difference:>15.4f}  {d.max_difference:>14.3f}  {d.kl:>10.2e}"
        for d in found.drift
    ]
    lines += [
        "",
        f"{f'{plan.span} tokens of {plan.context:,}':<22}  {'ms':>10}  {'of context':>10}",
    ]
    lines.append(f"{'evaluate the context':<22}  {found.context_s * 1e3:>10,.1f}  {1:>10.1%}")
    lines += [
        f"{c.what:<22}  {c.seconds * 1e3:>10,.1f}  {c.of_context:>10.1%}" for c in found.costs
    ]
    lines += ["", f"{'edits':>6}  {'segments':>8}  {'ms per token':>12}"]
    lines += [f"{d.edits:>6}  {d.segments:>8}  {d.median_ms:>12.2f}" for d in found.decode]
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--context", default=4000, type=click.IntRange(200), help="Tokens in the session.")
@click.option("--span", default=50, type=click.IntRange(1, 100), help="Tokens put in, taken out.")
@click.option("--edits", "count", default=32, type=click.IntRange(1), help="Scattered edits.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Measurements of each time.")
@model_option
@out_option
def edits(context: int, span: int, count: int, rounds: int, name: str, out: Path | None) -> None:
    """Time edits of a live session against evaluating it, and measure drift over many."""
    check_outputs(out)
    model, exact = load_model(name, progress=True), load_model(name, dtype="float32")
    machine = describe_machine()
    plan = Plan(context=context, span=span, edits=count, rounds=rounds)
    with bar(context * max(1, rounds // 2), "context") as shown:
        found = measure_edits(model, exact, model.text.encode(manual_text()), plan, shown)
    click.echo(table(found, plan))
    result = {
        "machine": dataclasses.asdict(machine),
        "settings": {"model": name, "dtype": "bfloat16", "reference": "float32"}
        | dataclasses.asdict(plan),
        **dataclasses.asdict(found),
    }
    write_json(out, result)


if __name__ == "__main__":
    edits()
