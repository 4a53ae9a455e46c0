"""Cost of editing a live session, and drift of its logits after many edits.

Drift is measured against a float32 session with the same weights, tokens and edits, so that only
rounding differs. (Tests compare the float32 session with a naive memory that rotates raw keys
anew.) If an edit rewrote keys, it would round them again, and the difference would grow with each
edit.
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
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.files.atomic import write_json


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurement, in tokens.

    context: length of the edited session. span: inserted or deleted by a timed edit. edits: number
    of scattered edits. drift_context: length of the session whose drift is measured. drift_tokens:
    compared after its edits. decode: timed. rounds: repeats of each timing.
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
    """Distance of logits from those in float32 after some edits, over the tokens that follow.

    mean_difference, max_difference: over all logits. kl: the mean
    Kullback-Leibler divergence from the float32 distribution, in nats.
    """

    edits: int
    mean_difference: float
    max_difference: float
    kl: float


@dataclass(frozen=True)
class Cost:
    """Median seconds of one edit. of_context: relative to evaluating the context. tokens_evaluated:
    by one edit.
    """

    what: str
    seconds: float
    of_context: float
    tokens_evaluated: int


@dataclass(frozen=True)
class Decode:
    """Decode time after some edits. segments: of the cache. median_ms: per token."""

    edits: int
    segments: int
    median_ms: float


def scattered(session: Session, edits: int, words: list[int]) -> Iterator[int]:
    """Make edits all over a session, of each kind in turn; yield the number made so far."""
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
    """Measure drift after no edit, one, a quarter of them and all."""
    count, drifts = plan.drift_context, []
    context, following = ids[:count], ids[count : count + plan.drift_tokens]
    words = ids[count + plan.drift_tokens :]
    pair = [session.session(policy="full") for session in (model, exact)]
    for session in pair:
        session.feed(context)
    drifts.append(_drift(0, pair, following))
    for edits_made, _ in zip(
        *(scattered(session, plan.edits, words) for session in pair), strict=True
    ):
        if edits_made in (1, plan.edits // 4, plan.edits):
            drifts.append(_drift(edits_made, pair, following))
    return drifts


def _drift(edits: int, pair: list[Session], following: list[int]) -> Drift:
    rounded, exact = (session.fork() for session in pair)
    mean_differences, largest, divergences = [], 0.0, []
    for token in following:
        for session in (rounded, exact):
            session.feed([token])
        logits, expected = rounded.logits, exact.logits
        assert logits is not None
        assert expected is not None
        difference = (logits - expected).abs()
        mean_differences.append(float(difference.mean()))
        largest = max(largest, float(difference.max()))
        p, q = expected.log_softmax(-1), logits.log_softmax(-1)
        divergences.append(float((p.exp() * (p - q)).sum()))
    return Drift(edits, mean(mean_differences), largest, mean(divergences))


def measure_costs(session: Session, ids: list[int], plan: Plan, context_s: float) -> list[Cost]:
    """Time edits of `plan.span` tokens in the middle of a session, each on a fork of it."""
    middle, span = plan.context // 2, plan.span
    new = ids[plan.context : plan.context + span]
    edits: list[tuple[str, Callable[[Session], int]]] = [
        ("delete", lambda s: s.delete(middle, middle + span).tokens_evaluated),
        ("insert", lambda s: s.insert(middle, new).tokens_evaluated),
        ("delete, suffix", lambda s: s.delete(middle, middle + span, "suffix").tokens_evaluated),
        ("insert, suffix", lambda s: s.insert(middle, new, "suffix").tokens_evaluated),
    ]
    costs = []
    for name, edit in edits:
        times, evaluated = [], 0
        for _ in range(plan.rounds):
            fork = session.fork()
            start = time.perf_counter()
            evaluated = edit(fork)
            times.append(time.perf_counter() - start)
        seconds = median(times)
        costs.append(Cost(name, rounded(seconds), rounded(seconds / context_s), evaluated))
    return costs


def measure_decode(session: Session, ids: list[int], plan: Plan) -> list[Decode]:
    """Time decoding of the unedited session and of an edited fork, token by token in turn."""
    edited = session.fork()
    for _ in scattered(edited, plan.edits, ids[plan.context :]):
        pass
    sessions = (session.fork(), edited)
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(plan.decode + 4):
        for timed_session, session_times in zip(sessions, times, strict=True):
            start = time.perf_counter()
            timed_session.next_token()
            if index >= 4:  # a warm-up
                session_times.append((time.perf_counter() - start) * 1e3)
    return [
        Decode(edits, len(timed_session.cache.segments), rounded(median(session_times)))
        for edits, timed_session, session_times in zip(
            (0, plan.edits), sessions, times, strict=True
        )
    ]


@dataclass(frozen=True)
class Edits:
    context_s: float
    drift: list[Drift]
    costs: list[Cost]
    decode: list[Decode]


def measure_edits(
    model: Model, exact: Model, ids: list[int], plan: Plan, progress: Callable[[int], None]
) -> Edits:
    """Run all measurements. Raises InvalidArgument if the text is too short for the plan."""
    needed = max(plan.context, plan.drift_context + plan.drift_tokens) + 4 * plan.span
    if len(ids) < needed:
        raise InvalidArgument(f"the text has {len(ids)} tokens; this plan needs {needed}")
    drift = measure_drift(model, exact, ids, plan)
    times, session = [], model.session(policy="full")
    for _ in range(max(1, plan.rounds // 2)):
        session = model.session(policy="full")
        times.append(session.feed(ids[: plan.context], progress).seconds)
    context_s = median(times)
    return Edits(
        rounded(context_s),
        drift,
        measure_costs(session, ids, plan, context_s),
        measure_decode(session, ids, plan),
    )


def table(result: Edits, plan: Plan) -> str:
    lines = [f"{'edits':>6}  {'mean |Δ logit|':>15}  {'max |Δ logit|':>14}  {'KL, nats':>10}"]
    lines += [
        f"{d.edits:>6}  {d.mean_difference:>15.4f}  {d.max_difference:>14.3f}  {d.kl:>10.2e}"
        for d in result.drift
    ]
    lines += [
        "",
        f"{f'{plan.span} tokens of {plan.context:,}':<22}  {'ms':>10}  {'of context':>10}",
    ]
    lines.append(f"{'evaluate the context':<22}  {result.context_s * 1e3:>10,.1f}  {1:>10.1%}")
    lines += [
        f"{c.what:<22}  {c.seconds * 1e3:>10,.1f}  {c.of_context:>10.1%}" for c in result.costs
    ]
    lines += ["", f"{'edits':>6}  {'segments':>8}  {'ms per token':>12}"]
    lines += [f"{d.edits:>6}  {d.segments:>8}  {d.median_ms:>12.2f}" for d in result.decode]
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--context", default=4000, type=click.IntRange(200), help="Tokens in the session.")
@click.option("--span", default=50, type=click.IntRange(1, 100), help="Tokens inserted or deleted.")
@click.option("--edits", "count", default=32, type=click.IntRange(1), help="Scattered edits.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Repeats of each timing.")
@model_option
@out_option
def edits(context: int, span: int, count: int, rounds: int, name: str, out: Path | None) -> None:
    """Time edits of a live session against evaluating it, and measure drift over many."""
    check_outputs(out)
    model, exact = load_model(name, progress=True), load_model(name, dtype="float32")
    machine = describe_machine()
    plan = Plan(context=context, span=span, edits=count, rounds=rounds)
    with bar(context * max(1, rounds // 2), "context") as progress:
        measured = measure_edits(model, exact, model.text.encode(manual_text()), plan, progress)
    click.echo(table(measured, plan))
    result = {
        "machine": dataclasses.asdict(machine),
        "settings": {"model": name, "dtype": "bfloat16", "reference": "float32"}
        | dataclasses.asdict(plan),
        **dataclasses.asdict(measured),
    }
    write_json(out, result)


if __name__ == "__main__":
    edits()
