"""The speed-up of generation by speculation: rewritten code and JSON against prose.

    python -m benchmarks.speculation --model llama-1b-Q4_K_M.gguf

A task's answer is given, and the model is made to write it, token by token, by a bias that follows
it: so a small or random model does what a large one would. Code is a file of kvkeep with some names
replaced, JSON a list of such files with some values changed, and prose a text that repeats nothing.
Each task runs with and without speculation in turn, and gives the same tokens: alone, with a window
that is smaller than the prompt, and in groups of an engine. Alone, the processor time counts, so
that other work on the machine has little influence.
"""

import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.command import Measurement, check_outputs, model_option, out_option, write_record
from benchmarks.figures import rounded
from kvkeep import Sampling, load_model
from kvkeep.engine import Engine, Finished, GenerationRequest
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.session.drafts import SpeculationOptions

SOURCES = ("session/answer_end.py", "cache/window.py", "session/drafts.py")
_TURN_TOKENS = 5  # of each answer, before it is the other's turn
PACKAGE = Path(__file__).parents[1] / "kvkeep"


class Written:
    """A constraint that makes the model write given tokens."""

    def __init__(self, ids: list[int]):
        self._ids, self._count = ids, 0

    @property
    def complete(self) -> bool:
        return self._count >= len(self._ids)

    def masked(self, logits: Tensor) -> Tensor:
        masked = torch.full_like(logits, -torch.inf)
        masked[self._ids[self._count]] = 0.0
        return masked

    def accept(self, token: int) -> None:
        assert token == self._ids[self._count]
        self._count += 1


@dataclass(frozen=True)
class Task:
    """A prompt and the answer to write. cells: of a sliding window; None to hold all tokens."""

    kind: str
    prompt: str
    answer: str
    cells: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A task's figures.

    tokens_per_s: alone, per second of processor time. ratio: of the time without speculation to
    that with it, the median of all rounds. least_ratio: of one round.
    """

    kind: str
    tokens: int
    accepted: int
    drafted: int
    tokens_per_s: float
    ratio: float
    least_ratio: float


def tasks() -> list[Task]:
    """Return the tasks, made from kvkeep's own files."""
    code = [(PACKAGE / name).read_text() for name in SOURCES]
    renamed = [re.sub(r"\bself\.", "this.", re.sub(r"\btokens\b", "items", text)) for text in code]
    records = [
        {"name": path.name, "lines": len(path.read_text().splitlines()), "checked": False}
        for path in sorted((PACKAGE / "session").glob("*.py"))
    ]
    edited = [r | {"checked": True} if i % 5 == 0 else r for i, r in enumerate(records)]
    prose = manual_text()
    rewritten = [Task("code", f"Rewrite:\n{a}\n", b) for a, b in zip(code, renamed, strict=True)]
    return [
        *rewritten,
        replace(rewritten[0], kind="code, ring wrapped", cells=256),
        Task("JSON", json.dumps(records, indent=1), json.dumps(edited, indent=1)),
        Task("prose", prose[:2000], prose[2000:4000]),
    ]


class Answer:
    """A task's answer while it is written. seconds: of processor time, of all threads, so far."""

    def __init__(self, model: Model, task: Task, limit: int, speculate: bool):
        policy: dict[str, Any] = {"policy": "full"} if task.cells is None else {"keep": 4}
        self.session = model.session(task.cells, **policy)
        self.session.feed(task.prompt)
        self.ids, self.seconds = model.text.encode(task.answer)[:limit], 0.0
        sampling = Sampling(constraint=Written(self.ids))
        self._first = len(self.session.tokens)
        self._stream = self.session.stream(limit, sampling, ignore_eos=True, speculate=speculate)

    def write(self, count: int) -> bool:
        """Write until `count` tokens of it are there; returns whether it goes on."""
        start, goes_on = time.process_time(), True
        while goes_on and len(self.session.tokens) - self._first < count:
            goes_on = next(self._stream, None) is not None
        self.seconds += time.process_time() - start
        return goes_on


def measure(model: Model, task: Task, limit: int, rounds: int) -> Outcome:
    """Write an answer with and without speculation, a few tokens each in turn.

    So other work on the machine slows both.
    """
    ratios, seconds, drafts = list[float](), list[float](), (0, 0)
    for _ in range(rounds):
        pair = [Answer(model, task, limit, speculate) for speculate in (False, True)]
        count, writing = 0, list(pair)
        while writing:
            count += _TURN_TOKENS
            writing = [answer for answer in reversed(writing) if answer.write(count)]
        plain, speculating = pair
        assert all(each.session.tokens[-len(each.ids) :] == each.ids for each in pair)
        ratios.append(plain.seconds / speculating.seconds)
        seconds.append(speculating.seconds)
        drafts = speculating.session.speculated
    tokens = min(limit, len(model.text.encode(task.answer)))
    speed = tokens / statistics.median(seconds)
    return Outcome(
        task.kind,
        tokens,
        *drafts,
        rounded(speed),
        rounded(statistics.median(ratios)),
        rounded(min(ratios)),
    )


def group_seconds(
    model: Model, group: Sequence[Task], limit: int, speculate: bool
) -> tuple[list[float], int, int]:
    """Return the decode seconds of each answer of a group, and the counts of drafts."""
    options = SpeculationOptions(speculate)
    with Engine(model, settings={"policy": "full"}, speculation=options) as engine:
        futures = []
        for index, task in enumerate(group):
            ids = model.text.encode(task.answer)[:limit]
            sampling = Sampling(constraint=Written(ids))
            prompt = tuple(model.text.encode(task.prompt))
            request = GenerationRequest(prompt, len(ids), sampling, ignore_eos=True)
            futures.append(engine.submit(request, owner=str(index)))
        events = [event for future in futures for event in future.result()[0]]
        usages = [event.usage for event in events if isinstance(event, Finished)]
        drafts = [usage.drafts for usage in usages]
    seconds = [usage.decode_seconds for usage in usages]
    return seconds, sum(each.accepted for each in drafts), sum(each.drafted for each in drafts)


def measure_group(
    model: Model, kind: str, group: Sequence[Task], limit: int, rounds: int
) -> Outcome:
    """Run a group with and without speculation; the ratio is that of its last answer's time.

    Which of the two is first alternates by round. One more round before is not counted.
    """
    times, drafts = list[tuple[float, float]](), (0, 0)
    for index in range(rounds + 1):
        seconds = dict[bool, float]()
        for speculate in (False, True) if index % 2 else (True, False):
            each, *counts = group_seconds(model, group, limit, speculate)
            seconds[speculate] = each[-1]
            drafts = (counts[0], counts[1]) if speculate else drafts
        if index:
            times.append((seconds[False], seconds[True]))
    tokens = min(limit, len(model.text.encode(group[-1].answer)))
    speed = tokens / statistics.median(speculating for _, speculating in times)
    ratios = [plain / speculating for plain, speculating in times]
    median, least = rounded(statistics.median(ratios)), rounded(min(ratios))
    return Outcome(kind, tokens, *drafts, rounded(speed), median, least)


@click.command(cls=Measurement)
@model_option
@click.option(
    "--tokens",
    default=300,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of each answer.",
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--kind", "kinds", multiple=True, help="Only this answer: code, JSON, prose ...")
@out_option
def main(name: str, tokens: int, rounds: int, kinds: Sequence[str], out: Path | None) -> None:
    """Measure speculation on code, JSON and prose."""
    check_outputs(out)
    model = load_model(name)
    outcomes = list[Outcome]()
    for task in tasks():
        if kinds and task.kind not in kinds:
            continue
        outcomes.append(measure(model, task, tokens, rounds))
        click.echo(str(outcomes[-1]))
    code, prose = tasks()[0], tasks()[-1]
    for kind, group in (("4 times code", [code] * 4), ("prose beside code", [code, prose])):
        if kinds and kind not in kinds:
            continue
        outcomes.append(measure_group(model, kind, group, tokens, rounds))
        click.echo(str(outcomes[-1]))
    write_record(out, name, rounds=rounds, outcomes=list(map(asdict, outcomes)))


if __name__ == "__main__":
    main()
