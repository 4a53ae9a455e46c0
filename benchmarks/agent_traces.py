"""Reuse in sessions of coding agents, by trace and turn, against a cold evaluation.

    python -m benchmarks.agent_traces --random-weights --check --out docs/results/agent-traces.json

The agents of `benchmarks.agent_clients` talk to kvkeep's server in this process. What the model
answers is given, token by token, so that it calls tools as a larger model would. How many tokens
are evaluated depends on the tokenizer and the chat template alone: `--random-weights` takes a small
model with those of `--model`, which is some hundred times faster.

`--check` compares the logits of each answer with those of sessions without any reuse, which
evaluate the prompt in the steps that the engine promises.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Self

import click
import torch
from starlette.testclient import TestClient
from torch import Tensor

from benchmarks.agent_clients import AGENTS, AgentRequest, Change
from benchmarks.agent_texts import Sizes
from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from kvkeep import Model, load_model
from kvkeep.chat.prompt_rules import select_rules
from kvkeep.engine import Engine, Generation, GenerationRequest
from kvkeep.engine.request import Listener, RequestLike
from kvkeep.engine.steps import DEFAULT_PREFILL_STEP, StepGrid, prefill_step_at
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.app import application
from kvkeep.server.keys import ApiKeys
from kvkeep.server.service import Service
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.evaluation import step_end
from kvkeep.session.sampling import Sampling
from kvkeep.session.token_diff import equal_runs
from kvkeep.storage.files.atomic import write_json

_MIN_RUN = 8  # equal tokens that count as known already


@dataclass(frozen=True)
class TraceMode:
    """How the server reuses cells. rules: see `kvkeep serve --prompt-rules`."""

    name: str
    alignment: AlignmentOptions = AlignmentOptions()  # noqa: RUF009 (frozen)
    rules: str = "default"


def _in_place(reread: int) -> TraceMode:
    return TraceMode(f"in place, reread {reread}", AlignmentOptions("in_place", 0, reread))


MODES = (
    TraceMode("exact"),
    TraceMode("exact, all rules", rules="all"),
    *map(_in_place, (0, 16, 64)),
)


@dataclass(frozen=True)
class TurnReading:
    """One request of a trace.

    change: of what the prompt had before. new: tokens that neither the prompt before nor its answer
    had, in runs of eight. evaluated: prompt tokens that were not reused. reason, differs_at: as of
    `/v1/prefix/explain`. Against a cold evaluation, or None: equal: whether all logits of the
    answer are equal to the bit; agreement: the share of its tokens with the same greedy choice; kl:
    in nats, the mean over them.
    """

    agent: str
    mode: str
    turn: int
    change: Change
    prompt: int
    new: int
    evaluated: int
    reason: str
    differs_at: int | None
    resumed: bool
    seams: int
    moved: int
    equal: bool | None = None
    agreement: float | None = None
    kl: float | None = None

    @property
    def share(self) -> float:
        return self.evaluated / self.prompt


class GivenAnswer:
    """A constraint that allows only the next token of an answer, and notes the logits of each."""

    complete = False

    def __init__(self, ids: Sequence[int]):
        self._ids, self.logits = list(ids), list[Tensor]()

    def masked(self, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        masked = torch.full_like(logits, -torch.inf)
        masked[self._ids[0]] = 0.0
        return masked

    def accept(self, token: int) -> None:
        del self._ids[0]


class GivenAnswers(Engine):
    """An engine whose next generation writes the given answer, and which notes that generation."""

    answer: Sequence[int] = ()
    given = GivenAnswer(())
    submitted: Future[list[Generation]]

    def give(self, answer: str) -> None:
        """Have the next generation write an answer and end its turn."""
        self.answer = [*self.model.text.encode(answer, special=True), self.model.end_token_ids[0]]

    def __enter__(self) -> Self:
        return self

    def _constrained(self, sampling: Sampling) -> Sampling:
        self.given = GivenAnswer(self.answer)
        return replace(sampling, constraint=self.given)

    def submit(
        self,
        request: RequestLike,
        session: str | None = None,
        owner: str = "0",
        listener: Listener | None = None,
        revision: int | None = None,
    ) -> Future[list[Generation]]:
        assert isinstance(request, GenerationRequest), "no request of a chat depends on a session"
        request = replace(request, sampling=self._constrained(request.sampling))
        self.submitted = super().submit(request, session, owner, listener, revision)
        return self.submitted

    def submit_many(
        self,
        request: GenerationRequest,
        samplings: Sequence[Sampling],
        owner: str = "0",
        listeners: Sequence[Listener | None] | None = None,
    ) -> Future[list[Generation]]:
        samplings = [self._constrained(sampling) for sampling in samplings]
        self.submitted = super().submit_many(request, samplings, owner, listeners)
        return self.submitted


class ColdEvaluation:
    """Sessions without reuse, which evaluate prompts in the steps that the engine promises.

    A prompt that resumes an answer is evaluated behind that answer, whose tokens take a step each.
    """

    def __init__(self, model: Model):
        self._model = model
        self._last = model.session(policy="full")  # the last prompt, with its answer

    def logits(self, generation: Generation) -> list[Tensor]:
        """Evaluate a generation's prompt and answer; return the logits before each token of it."""
        prompt, reuse = list(generation.request.prompt), generation.reuse
        if reuse.resumed:
            session, start = self._last, reuse.tokens
            if len(session.tokens) > start:
                session.take_back(len(session.tokens) - start)
            if list(session.tokens) != prompt[:start]:
                raise RuntimeError("the prompt resumes an older answer than the last")
            while start < len(prompt):
                done = start - reuse.tokens
                size = step_end(done, prefill_step_at(session.prefill_step, start)) - done
                session.feed(prompt[start : start + size])
                start += size
        else:
            session = self._model.session(policy="full", prefill_step=DEFAULT_PREFILL_STEP)
            grid, start = StepGrid.of(session), 0
            while start < len(prompt):
                end = grid.next_end(prompt, start)
                session.feed(prompt[start:end])
                start = end
        self._last, given = session, GivenAnswer(generation.generated)
        for _ in generation.generated:
            session.next_token(Sampling(constraint=given))
        return given.logits


def random_model(model: Model) -> Model:
    """Return a small random model with the tokenizer and the template of another one."""
    size = model.spec.head_dim
    spec = replace(
        model.spec, layers=2, hidden_size=size, intermediate_size=size, heads=1, kv_heads=1
    )
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.1
        for name, shape in tensor_shapes(spec).items()
    }
    folder = model.text.folder
    return Model("random", folder, Decoder(spec, tensors), TextCodec.open(folder))


def run_trace(
    model: Model, agent: str, mode: TraceMode, sizes: Sizes, check: bool
) -> list[TurnReading]:
    """Run one session of an agent against a server of its own."""
    settings = {"max_kv_size": model.spec.max_positions, "policy": "full"}
    readings, cold, known = list[TurnReading](), ColdEvaluation(model), list[int]()
    with GivenAnswers(model, settings=settings, alignment=mode.alignment) as engine:
        service = Service(engine, "model", ApiKeys(), prompt_rules=select_rules(mode.rules))
        client = TestClient(application(service), base_url="http://127.0.0.1")
        client.headers["content-type"] = "application/json"
        session = AGENTS[agent](sizes)
        request = next(session)
        for turn in range(1, sizes.turns + 1):
            answer = _send(client, engine, request)
            (generation,) = engine.submitted.result()
            prompt = list(generation.request.prompt)
            reading = _reading(generation, agent, mode, turn, request.change, known)
            if check:
                logits = cold.logits(generation)
                reading = replace(reading, **compare_logits(engine.given.logits, logits))
            readings.append(reading)
            known = [*prompt, *generation.generated]
            if turn < sizes.turns:
                request = session.send(answer)
    return readings


def _send(client: TestClient, engine: GivenAnswers, request: AgentRequest) -> dict[str, Any]:
    engine.give(request.writes)
    body = {"model": "model", "temperature": 0, **request.body}
    response = client.post(request.path, json=body)
    if response.status_code != 200:
        raise click.ClickException(f"status {response.status_code}: {response.text:.500}")
    answer: dict[str, Any] = response.json()
    return answer


def _reading(
    generation: Generation,
    agent: str,
    mode: TraceMode,
    turn: int,
    change: Change,
    known: Sequence[int],
) -> TurnReading:
    prompt, reuse = generation.request.prompt, generation.reuse
    runs = equal_runs(known, prompt, _MIN_RUN) if known else []
    return TurnReading(
        agent,
        mode.name,
        turn,
        change,
        len(prompt),
        len(prompt) - sum(run.length for run in runs),
        generation.usage.evaluated,
        reuse.reason,
        reuse.differs_at,
        reuse.resumed,
        reuse.seams,
        reuse.moved,
    )


def compare_logits(logits: Sequence[Tensor], cold: Sequence[Tensor]) -> dict[str, Any]:
    """Compare the logits before each token of an answer with those of a cold evaluation."""
    pairs = list(zip(logits, cold, strict=True))
    kl = [_divergence(ours, expected) for ours, expected in pairs]
    return {
        "equal": all(torch.equal(ours, expected) for ours, expected in pairs),
        "agreement": rounded(mean(float(a.argmax() == b.argmax()) for a, b in pairs)),
        "kl": rounded(mean(kl)),
    }


def _divergence(logits: Tensor, cold: Tensor) -> float:
    expected, ours = cold.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((expected.exp() * (expected - ours)).sum())


def turn_table(readings: Sequence[TurnReading]) -> str:
    """Return the turns of one trace in one mode."""
    lines = [f"{readings[0].agent}, {readings[0].mode}"]
    for r in readings:
        check = "" if r.equal is None else ("equal" if r.equal else f"top-1 {r.agreement:.1%}")
        lines.append(
            f"  turn {r.turn}: {r.evaluated:>5,} of {r.prompt:>5,} ({r.share:>6.1%}), new "
            f"{r.new:>5,}; {r.change or '-':<9} {'resumed' if r.resumed else '':<8} {r.reason:<8} "
            f"{r.seams} seams {check}"
        )
    return "\n".join(lines)


def summary_table(readings: Sequence[TurnReading]) -> str:
    """Return a table in Markdown: a line for each trace and mode, over all turns but the first."""
    lines = [
        "| Agent | Mode | new | evaluated, median | most | where | equal bits | top-1 | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for agent, mode in dict.fromkeys((r.agent, r.mode) for r in readings):
        later = [r for r in readings if (r.agent, r.mode) == (agent, mode) and r.turn > 1]
        most = max(later, key=lambda r: r.share)
        new = median(r.new / r.prompt for r in later)
        cells = [
            agent,
            mode,
            f"{new:.1%}",
            f"{median(r.share for r in later):.1%}",
            f"{most.share:.1%}",
            f"turn {most.turn}{f', {most.change}' if most.change else ''}",
        ]
        if later[0].equal is not None:
            cells += [f"{sum(bool(r.equal) for r in later)} of {len(later)}"]
            cells += [f"{mean(r.agreement or 0.0 for r in later):.1%}"]
            cells += [f"{mean(r.kl or 0.0 for r in later):.3f}"]
        else:
            cells += ["-"] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--agent", "agents", multiple=True, type=click.Choice(list(AGENTS)))
@click.option("--mode", "modes", multiple=True, type=click.Choice([m.name for m in MODES]))
@click.option("--turns", default=Sizes.turns, type=click.IntRange(2), help="Requests of a session.")
@click.option("--random-weights", is_flag=True, help="Of a small model with the same tokenizer.")
@click.option("--check", is_flag=True, help="Compare with a cold evaluation.")
@out_option
def agent_traces(
    name: str,
    agents: tuple[str, ...],
    modes: tuple[str, ...],
    turns: int,
    random_weights: bool,
    check: bool,
    out: Path | None,
) -> None:
    """Measure how much of each prompt of coding agents is evaluated."""
    check_outputs(out)
    model, machine, readings = load_model(name), describe_machine(), list[TurnReading]()
    sizes, model = Sizes(turns=turns), random_model(model) if random_weights else model
    for agent in agents or AGENTS:
        for mode in MODES:
            if not modes or mode.name in modes:
                trace = run_trace(model, agent, mode, sizes, check)
                readings += trace
                click.echo(turn_table(trace))
    click.echo(summary_table(readings))
    entries = [dataclasses.asdict(reading) for reading in readings]
    settings = {"model": name, "random_weights": random_weights, **dataclasses.asdict(sizes)}
    write_json(
        out, {"machine": dataclasses.asdict(machine), "settings": settings, "readings": entries}
    )


if __name__ == "__main__":
    agent_traces()
