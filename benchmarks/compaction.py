"""Facts found in a session that was compacted again and again, and in one that never was.

    python -m benchmarks.compaction --out docs/results/compaction.json

An agent's session: a system prompt, and turns with a user's message, a tool result of a few hundred
tokens (docstrings), reasoning, and an answer. The facts are in the first messages of the user, or
in the first tool results. Whenever the session has more than 0.8 of its cells, it is compacted to
half of them. At the end each fact is asked for in a fork; the session is saved and restored once.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.machine import describe_machine
from kvkeep import Model, Session, Snapshot, load_model
from kvkeep.evaluate.haystack import SENTENCE_END, docstrings_text
from kvkeep.evaluate.recall import measure_recall
from kvkeep.evaluate.samples import Fact, random_key
from kvkeep.evaluate.words import FACTS_TOML, NAMES
from kvkeep.session.compaction import COMPACTION_STEPS, CompactionReport, CompactionStep
from kvkeep.storage.files.atomic import write_json

FACT_COUNT = 20
FACTS_PER_TURN = 2
THRESHOLD, TARGET = 0.8, 0.5  # of max_kv_size
_TURN_TOKENS = 600  # of a turn and the questions at the end, at most
SYSTEM = "You are an agent. You call tools, read their results, and remember what users say."
Place = Literal["user", "result"]


@dataclass(frozen=True)
class Scenario:
    """A way to drive a session: the messages that hold the facts, and the steps of compaction."""

    facts_in: Place
    steps: tuple[CompactionStep, ...] = COMPACTION_STEPS


SCENARIOS = (
    Scenario("user"),
    Scenario("user", ("compress",)),
    Scenario("result"),
    Scenario("result", ("compress",)),
)


@dataclass(frozen=True)
class CompactionReading:
    """One session. found: of `findable`, the facts that the uncompacted session finds."""

    facts_in: Place
    steps: tuple[CompactionStep, ...]
    seed: int
    compactions: int
    turns: int
    tokens: int  # read, those that were removed later included
    max_cells: int
    facts: int
    findable: int
    found: int
    tokens_evaluated: int  # by the compactions, those of reconstruction scores not counted
    seconds: float  # of the compactions


def draw_facts(rng: Random, count: int) -> list[Fact]:
    """Return facts about different people."""
    template = FACTS_TOML["facts"][0]
    facts = []
    for name in rng.sample(NAMES, count):
        subject, key = rng.choice(FACTS_TOML["subjects"]["number"]), random_key("number", rng)
        fields = {"name": name, "subject": subject, "key": key}
        question = f"\n\n{template['question'].format(**fields)}"
        facts.append(Fact(template["sentence"].format(**fields), question, key))
    return facts


def passages(rng: Random) -> Iterator[str]:
    """Yield passages of docstrings, of 400 to 1,200 characters."""
    sentences = SENTENCE_END.split(docstrings_text())
    index = rng.randrange(len(sentences))
    while True:
        size, passage = rng.choice((400, 800, 1200)), ""
        while len(passage) < size:
            passage += sentences[index % len(sentences)]
            index += 1
        yield passage[:size].strip()


def add_turn(session: Session, number: int, said: str, result: str) -> None:
    """Add a turn whose parts have the names that compaction knows."""
    start = len(session.tokens)
    parts = (
        ("user", "question", said),
        ("assistant", "reasoning", f"I should call the tool for step {number}, then summarise."),
        ("tool", "result 1", result),
        ("assistant", "answer", f"Step {number} is done. I noted what you told me."),
    )
    for role, name, text in parts:
        session.feed(f"<|im_start|>{role}\n", special=True)
        with session.span(f"turn {number} {name}"):
            session.feed(text)
        session.feed("<|im_end|>\n", special=True)
    session.name(f"turn {number}", start, len(session.tokens))


def turn_texts(scenario: Scenario, facts: Sequence[Fact], rng: Random) -> Iterator[tuple[str, str]]:
    """Yield what the user says and what the tool returns, with the facts in the first turns."""
    for number, passage in enumerate(passages(rng)):
        told = facts[number * FACTS_PER_TURN : (number + 1) * FACTS_PER_TURN]
        text = " ".join(fact.sentence for fact in told)
        if scenario.facts_in == "user":
            yield f"{text} Please continue with step {number + 1}.".strip(), passage
        else:
            yield f"Please continue with step {number + 1}.", f"{text} {passage}".strip()


def run(
    model: Model, scenario: Scenario, max_kv_size: int, compactions: int, fact_count: int, seed: int
) -> CompactionReading:
    """Drive a session past its threshold `compactions` times, and ask for the facts."""
    rng = Random(seed)
    facts = draw_facts(rng, fact_count)
    session = model.session(max_kv_size, policy="full")
    uncompacted = model.session(policy="full")
    for each in (session, uncompacted):
        each.feed(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", special=True)
        each.name("system", 0, len(each.tokens))
    reports: list[CompactionReport] = []
    max_cells = 0
    for number, (said, result) in enumerate(turn_texts(scenario, facts, rng), 1):
        for each in (session, uncompacted):
            add_turn(each, number, said, result)
        max_cells = max(max_cells, session.cache.cells)
        if session.cache.cells > THRESHOLD * max_kv_size:
            reports.append(session.compact(TARGET, steps=scenario.steps, keep_results=1))
            if len(reports) == compactions // 2:
                session = restarted(model, session)
        if len(reports) >= compactions or (uncompacted.room or 0) < _TURN_TOKENS:
            break
    before = measure_recall(uncompacted, facts)
    after = measure_recall(session, facts)
    pairs = list(zip(before.answers, after.answers, strict=True))
    return CompactionReading(
        scenario.facts_in,
        scenario.steps,
        seed,
        compactions=len(reports),
        turns=number,
        tokens=len(uncompacted.tokens),
        max_cells=max_cells,
        facts=len(facts),
        findable=sum(old.found for old, _ in pairs),
        found=sum(old.found and new.found for old, new in pairs),
        tokens_evaluated=sum(report.tokens_evaluated for report in reports),
        seconds=round(sum(report.seconds for report in reports), 1),
    )


def restarted(model: Model, session: Session) -> Session:
    """Save a session to a file and restore it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.kvkeep"
        session.snapshot().save(path)
        return model.restore(Snapshot.load(path))


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--max-kv-size", default=2048, help="Cells of the compacted session.")
@click.option("--compactions", default=10, help="How often it passes the threshold.")
@click.option("--facts", "fact_count", default=FACT_COUNT, help="Facts told at the beginning.")
@click.option("--seeds", default=1, help="Sessions of each kind.")
@out_option
def compaction(
    name: str, max_kv_size: int, compactions: int, fact_count: int, seeds: int, out: Path | None
) -> None:
    """Ask a session that was compacted ten times for 20 facts that it was told before."""
    check_outputs(out)
    model, readings = load_model(name), list[CompactionReading]()
    for scenario in SCENARIOS:
        for seed in range(seeds):
            reading = run(model, scenario, max_kv_size, compactions, fact_count, seed)
            readings.append(reading)
            click.echo(
                f"facts in {reading.facts_in} messages, {'+'.join(reading.steps)}: found "
                f"{reading.found} of {reading.findable} that the uncompacted session finds, after "
                f"{reading.compactions} compactions of {reading.tokens:,} tokens in at most "
                f"{reading.max_cells:,} cells ({reading.seconds} s)"
            )
    machine = dataclasses.asdict(describe_machine())
    readings_json = [dataclasses.asdict(reading) for reading in readings]
    write_json(out, {"machine": machine, "readings": readings_json})


if __name__ == "__main__":
    compaction()
