"""Facts found in a session that was compacted again and again, and in one that never was.

    python -m benchmarks.compaction --out docs/results/compaction.json

An agent's session: a system prompt, and turns with a user's message, reasoning, a tool result
(docstrings), and an answer. The facts are in the first messages of the user, or in the first tool
results, and the answer of their turn says them again, as agents do. Before a turn that would fill
more than 0.8 of its cells, the session is compacted. At the end each fact is asked for in a fork.

Half of the compactions are in one process, which saves the session, and half in another one, which
restores it. A fork of before the first compaction must have the same logits after each half.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import click

from benchmarks.apart import run_in_new_process
from benchmarks.command import Measurement, ResultFile, model_option, out_option
from kvkeep import Model, Session, Snapshot, load_model
from kvkeep.evaluate.haystack import SENTENCE_END, docstrings_text
from kvkeep.evaluate.recall import measure_recall
from kvkeep.evaluate.samples import Fact, random_key
from kvkeep.evaluate.words import NAMES
from kvkeep.session.compaction import CompactionReport
from kvkeep.session.compaction_plan import COMPACTION_STEPS, CompactionStep

FACTS_PER_TURN = 2
THRESHOLD = 0.8  # of max_kv_size
SYSTEM = "You are an agent. You call tools, read their results, and remember what users say."
# Each fact has its own subject and person: SmolLM2-135M confuses facts that share either.
SUBJECTS = """
lucky number, locker code, badge number, phone extension, flight number, hotel room, parking space,
invoice number, bank account, library card, postal code, tax number, ticket number, serial number,
pin code, customer number, order number, licence plate, desk number, member number
"""
MAX_FACTS = SUBJECTS.count(",") + 1
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
class Settings:
    """One measurement. target: of a compaction, as a part of `max_kv_size`."""

    model: str
    scenario: int  # of `SCENARIOS`
    max_kv_size: int
    target: float
    compactions: int
    fact_count: int
    seed: int


@dataclass(frozen=True)
class Half:
    """The result of one process: it compacts a session so often, and saves it.

    turns: in the session at the end. fork_is_intact: whether the fork of before the first
    compaction has the logits that it had.
    """

    compactions: int
    turns: int
    max_cells: int
    max_bytes: int
    tokens_evaluated: int
    seconds: float
    fork_is_intact: bool
    found: tuple[bool, ...] = ()  # of all facts, at the end
    uncompacted: tuple[bool, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class CompactionReading:
    """One session. found: of `findable`, the facts that the uncompacted session finds."""

    facts_in: Place
    steps: tuple[CompactionStep, ...]
    seed: int
    max_kv_size: int
    target: float
    compactions: int
    turns: int
    tokens: int  # read, those that were removed later included
    max_cells: int
    max_bytes: int
    facts: int
    findable: int
    found: int
    newly_found: int  # that the uncompacted session does not find
    fork_is_intact: bool
    tokens_evaluated: int  # by the compactions, those of reconstruction scores not counted
    seconds: float  # of the compactions


def draw_facts(rng: Random, count: int) -> list[Fact]:
    """Return facts about different people and things."""
    facts, subjects = list[Fact](), [" ".join(each.split()) for each in SUBJECTS.split(",")]
    for name, subject in zip(rng.sample(NAMES, count), subjects, strict=False):
        key, phrase = random_key("number", rng), f"The {subject} of {name} is"
        question = f"\n\nWhat is the {subject} of {name}? {phrase}"
        facts.append(Fact(f"{phrase} {key}.", question, key))
    return facts


@cache
def _sentences() -> list[str]:
    return SENTENCE_END.split(docstrings_text())


def passages(rng: Random) -> Iterator[str]:
    """Yield passages of docstrings, of 150 to 350 characters."""
    sentences = _sentences()
    index = rng.randrange(len(sentences))
    while True:
        size, passage = rng.choice((150, 250, 350)), ""
        while len(passage) < size:
            passage += sentences[index % len(sentences)]
            index += 1
        yield passage[:size].strip()


@dataclass(frozen=True)
class Turn:
    """The texts of a turn."""

    number: int
    said: str
    result: str
    answer: str

    @property
    def parts(self) -> tuple[tuple[str, str, str], ...]:
        """The role, name and text of each part."""
        return (
            ("user", "question", self.said),
            ("assistant", "reasoning", f"I should call the tool for step {self.number}."),
            ("tool", "result 1", self.result),
            ("assistant", "answer", self.answer),
        )

    def count_tokens(self, model: Model) -> int:
        texts = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, _, text in self.parts)
        return len(model.text.encode("".join(texts)))

    def add_to(self, session: Session) -> None:
        """Feed the turn; its parts get the names that compaction knows."""
        start = len(session.tokens)
        for role, name, text in self.parts:
            session.feed(f"<|im_start|>{role}\n", special=True)
            with session.span(f"turn {self.number} {name}"):
                session.feed(text)
            session.feed("<|im_end|>\n", special=True)
        session.name(f"turn {self.number}", start, len(session.tokens))


def turns(scenario: Scenario, facts: Sequence[Fact], rng: Random) -> Iterator[Turn]:
    """Yield turns, with the facts in the first ones."""
    for index, passage in enumerate(passages(rng)):
        told = facts[index * FACTS_PER_TURN : (index + 1) * FACTS_PER_TURN]
        text, step = " ".join(fact.sentence for fact in told), f"step {index + 1}"
        said, result = f"Please continue with {step}.", passage
        if scenario.facts_in == "user":
            said = f"{text} {said}".strip()
        else:
            result = f"{text} {result}".strip()
        yield Turn(index + 1, said, result, f"Step {index + 1} is done. {text}".strip())


def new_session(model: Model, max_kv_size: int | None = None) -> Session:
    """Return a session that holds the system prompt."""
    session = model.session(max_kv_size=max_kv_size, policy="full")
    session.feed(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", special=True)
    session.name("system", 0, len(session.tokens))
    return session


def run_half(settings: Settings, folder: Path, is_last: bool) -> Half:
    """Continue the session in the folder, or begin it; at the end save it, or ask for the facts."""
    model, scenario, rng = load_model(settings.model), SCENARIOS[settings.scenario], Random()
    rng.seed(settings.seed)
    facts = draw_facts(rng, settings.fact_count)
    files = [folder / f"{name}.kvkeep" for name in ("session", "fork", "logits")]
    number, fork, logits = 0, None, ""
    session = new_session(model, settings.max_kv_size)
    if is_last:
        session, fork = (model.restore(Snapshot.load(file)) for file in files[:2])
        number, logits = json.loads(files[2].read_text())
    reports: list[CompactionReport] = []
    max_cells = max_bytes = 0
    wanted = settings.compactions // 2
    wanted = settings.compactions - wanted if is_last else wanted
    for turn in islice(turns(scenario, facts, rng), number, None):
        if session.cache.cells + turn.count_tokens(model) > THRESHOLD * settings.max_kv_size:
            if len(reports) >= wanted:
                break
            if fork is None:
                fork, logits = session.fork(), _logits(session)
            reports.append(session.compact(settings.target, steps=scenario.steps, keep_results=1))
        number = turn.number
        turn.add_to(session)
        max_cells = max(max_cells, session.cache.cells)
        max_bytes = max(max_bytes, session.nbytes)
    assert fork is not None
    half = Half(
        len(reports),
        number,
        max_cells,
        max_bytes,
        tokens_evaluated=sum(report.tokens_evaluated for report in reports),
        seconds=round(sum(report.seconds for report in reports), 1),
        fork_is_intact=_logits(fork) == logits,
    )
    if not is_last:
        session.snapshot().save(files[0])
        fork.snapshot().save(files[1])
        files[2].write_text(json.dumps((number, logits)))
        return half
    uncompacted = uncompacted_session(model, scenario, settings, number)
    found, findable = (
        tuple(answer.found for answer in measure_recall(each, facts).answers)
        for each in (session, uncompacted)
    )
    tokens = len(uncompacted.tokens)
    return dataclasses.replace(half, found=found, uncompacted=findable, tokens=tokens)


def uncompacted_session(
    model: Model, scenario: Scenario, settings: Settings, num_turns: int
) -> Session:
    """Return a session with the same turns that was never compacted."""
    rng, session = Random(settings.seed), new_session(model)
    facts = draw_facts(rng, settings.fact_count)
    for turn in islice(turns(scenario, facts, rng), num_turns):
        turn.add_to(session)
    return session


def _logits(session: Session) -> str:
    """Return a digest of the bits of the logits after a question."""
    fork = session.fork()
    fork.feed("\n\nWhat did I say first?")
    assert fork.logits is not None
    return blake2b(fork.logits.float().numpy().tobytes()).hexdigest()


def run(settings: Settings) -> CompactionReading:
    """Drive a session past its threshold, in two processes, and ask for the facts."""
    scenario = SCENARIOS[settings.scenario]
    with tempfile.TemporaryDirectory() as folder:
        first, last = (_half_in_new_process(settings, folder, is_last) for is_last in (False, True))
    pairs = list(zip(last.uncompacted, last.found, strict=True))
    return CompactionReading(
        scenario.facts_in,
        scenario.steps,
        settings.seed,
        settings.max_kv_size,
        settings.target,
        compactions=first.compactions + last.compactions,
        turns=last.turns,
        tokens=last.tokens,
        max_cells=max(first.max_cells, last.max_cells),
        max_bytes=max(first.max_bytes, last.max_bytes),
        facts=len(pairs),
        findable=sum(old for old, _ in pairs),
        found=sum(old and new for old, new in pairs),
        newly_found=sum(new and not old for old, new in pairs),
        fork_is_intact=first.fork_is_intact and last.fork_is_intact,
        tokens_evaluated=first.tokens_evaluated + last.tokens_evaluated,
        seconds=round(first.seconds + last.seconds, 1),
    )


def _half_in_new_process(settings: Settings, folder: str, is_last: bool) -> Half:
    arguments = json.dumps([dataclasses.asdict(settings), folder, is_last])
    fields: dict[str, Any] = json.loads(
        run_in_new_process("benchmarks.compaction", "--half", arguments)
    )
    return Half(**fields)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--max-kv-size", default=768, help="Cells of the compacted session.")
@click.option("--target", default=0.6, help="Part of them that a compaction leaves.")
@click.option(
    "--compactions", default=10, type=click.IntRange(2), help="How often it passes the threshold."
)
@click.option(
    "--facts",
    "fact_count",
    default=MAX_FACTS,
    type=click.IntRange(1, MAX_FACTS),
    help="Facts told at the beginning.",
)
@click.option("--facts-in", type=click.Choice(["user", "result"]), help="[default: both]")
@click.option("--seeds", default=2, help="Sessions of each kind.")
@click.option("--half", hidden=True, help="Arguments of `run_half`, as JSON.")
@out_option
def compaction(
    name: str,
    max_kv_size: int,
    target: float,
    compactions: int,
    fact_count: int,
    facts_in: Place | None,
    seeds: int,
    half: str | None,
    out: Path | None,
) -> None:
    """Ask a session that was compacted ten times for 20 facts that it was told before."""
    if half is not None:
        fields, folder, is_last = json.loads(half)
        click.echo(
            json.dumps(dataclasses.asdict(run_half(Settings(**fields), Path(folder), is_last)))
        )
        return
    result = ResultFile(
        out,
        settings={
            "model": name,
            "max_kv_size": max_kv_size,
            "target": target,
            "compactions": compactions,
            "facts": fact_count,
            "seeds": seeds,
        },
    )
    readings = list[CompactionReading]()
    for scenario, kind in enumerate(SCENARIOS):
        for seed in range(seeds if facts_in in (None, kind.facts_in) else 0):
            settings = (name, scenario, max_kv_size, target, compactions, fact_count, seed)
            readings.append(reading := run(Settings(*settings)))
            result.write(readings=readings)
            fork = "intact" if reading.fork_is_intact else "CHANGED"
            click.echo(
                f"facts in {reading.facts_in} messages, {'+'.join(reading.steps)}: found "
                f"{reading.found} of {reading.findable} that the uncompacted session finds (and "
                f"{reading.newly_found} others), after {reading.compactions} compactions of "
                f"{reading.tokens:,} tokens in at most {reading.max_cells:,} cells; the fork of "
                f"before is {fork} ({reading.seconds} s)"
            )


if __name__ == "__main__":
    compaction()
