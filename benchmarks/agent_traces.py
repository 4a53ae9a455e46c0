"""Reuse in sessions of coding agents, by trace and request, against a cold evaluation.

    python -m benchmarks.agent_traces --random-weights --out docs/results/agent-traces.json

The agents of `benchmarks.agent_clients` talk to kvkeep's server in this process. What the model
answers is given, token by token, so that it calls tools as a larger model would. How many tokens
are evaluated depends on the tokenizer and the chat template alone: `--random-weights` takes a small
model with those of `--model`, which is some hundred times faster.

`--check` compares the logits of each answer with those of sessions without any reuse, which
evaluate the prompt in the steps that the engine promises.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Self

import click
import torch
from starlette.testclient import TestClient
from torch import Tensor

from benchmarks.agent_clients import AgentRequest, AgentShape, load_shapes, replay
from benchmarks.command import Measurement, ResultFile, model_option, out_option
from benchmarks.figures import rounded
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
from kvkeep.session.session import Session
from kvkeep.session.token_diff import equal_runs

_MIN_RUN = 8  # equal tokens that count as known already
MUCH = 0.1  # of a prompt that is evaluated again: something far before its end changed
_LAST_PROMPTS = 4  # among which a prompt's known text is looked for
_RANDOM_CONTEXT = 65_536  # tokens, of a model with random weights


@dataclass(frozen=True)
class TraceMode:
    """The reuse of cells by the server. rules: see `kvkeep serve --prompt-rules`."""

    name: str
    alignment: AlignmentOptions = AlignmentOptions()  # noqa: RUF009 (frozen)
    rules: str = "default"


def _in_place(reread: int) -> TraceMode:
    return TraceMode(f"in place, reread {reread}", AlignmentOptions("in_place", 0, reread))


MODES = (
    TraceMode("exact"),
    TraceMode("exact, all rules", rules="all,-late-tools"),  # which came after the measurements
    *map(_in_place, (0, 16, 64)),
    TraceMode("exact, late tools", rules="late-tools"),
)


@dataclass(frozen=True)
class TurnReading:
    """One request of a trace.

    event, aside: see `AgentRequest`. new: tokens that no one of the last prompts had, nor its
    answer, in runs of eight. evaluated: prompt tokens that were not reused. reason, differs_at: as
    of `/v1/prefix/explain`. Against a cold evaluation, or None: equal: whether all logits of the
    answer are equal to the bit; agreement: the share of its tokens with the same greedy choice; kl:
    in nats, the mean over them.
    """

    agent: str
    mode: str
    request: int
    event: str
    aside: bool
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

    @property
    def again(self) -> float:
        """The share of the prompt that is evaluated although a prompt before had it."""
        return max(0, self.evaluated - self.new) / self.prompt

    @property
    def is_later(self) -> bool:
        """Whether it is one of the conversation's requests, and not the first."""
        return self.event != "task" and not self.aside


class GivenAnswer:
    """A constraint that allows only the next token of an answer, and notes the logits of each."""

    complete = False

    def __init__(self, ids: Sequence[int]):
        self._ids, self._count, self.logits = list(ids), len(ids), list[Tensor]()

    def masked(self, logits: Tensor) -> Tensor:
        # In their place: a draw behind a wrong draft is repeated.
        self.logits[self._count - len(self._ids) :] = [logits.clone()]
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
        self._answered = list[Session]()  # the prompts until now, with their answers

    def logits(self, generation: Generation) -> list[Tensor]:
        """Evaluate a generation's prompt and answer; return the logits before each token of it."""
        prompt, reuse = list(generation.request.prompt), generation.reuse
        if reuse.resumed:
            session, start = self._resumed(prompt[: reuse.tokens]), reuse.tokens
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
        self._answered.append(session)
        given = GivenAnswer(generation.generated)
        for _ in generation.generated:
            session.next_token(Sampling(constraint=given))
        return given.logits

    def _resumed(self, tokens: Sequence[int]) -> Session:
        """Return the session of the last answer that begins with these tokens, cut behind them."""
        for session in reversed(self._answered):
            if list(session.tokens[: len(tokens)]) == tokens:
                self._answered.remove(session)
                if len(session.tokens) > len(tokens):
                    session.take_back(len(session.tokens) - len(tokens))
                return session
        raise RuntimeError("the prompt resumes no earlier answer")


def random_model(model: Model) -> Model:
    """Return a small random model with the tokenizer and the template of another one."""
    size = model.spec.head_dim
    spec = replace(
        model.spec,
        layers=2,
        hidden_size=size,
        intermediate_size=size,
        heads=1,
        kv_heads=1,
        max_positions=_RANDOM_CONTEXT,
    )
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.1
        for name, shape in tensor_shapes(spec).items()
    }
    folder = model.text.folder
    return Model("random", folder, Decoder(spec, tensors), TextCodec.open(folder))


def run_trace(
    model: Model,
    shape: AgentShape,
    mode: TraceMode,
    scale: float = 1.0,
    check: bool = False,
    limit: int | None = None,
) -> list[TurnReading]:
    """Run the session of an agent against a server of its own. limit: of requests."""
    settings = {"max_kv_size": model.spec.max_positions, "policy": "full"}
    readings, cold, known = list[TurnReading](), ColdEvaluation(model), list[list[int]]()
    with GivenAnswers(model, settings=settings, alignment=mode.alignment) as engine:
        service = Service(engine, "model", ApiKeys(), prompt_rules=select_rules(mode.rules))
        client = TestClient(application(service), base_url="http://127.0.0.1")
        client.headers["content-type"] = "application/json"
        agent = replay(shape, scale)
        request: AgentRequest | None = next(agent)
        while request is not None and len(readings) != limit:
            answer = send(client, engine, request)
            (generation,) = engine.submitted.result()
            reading = _reading(generation, shape.client, mode, request, len(readings) + 1, known)
            if check:
                logits = cold.logits(generation)
                reading = replace(reading, **compare_logits(engine.given.logits, logits))
            readings.append(reading)
            known = [*known[1 - _LAST_PROMPTS :], [*generation.request.prompt]]
            known[-1] += generation.generated
            try:
                request = agent.send(answer)
            except StopIteration:
                request = None
    return readings


def send(client: TestClient, engine: GivenAnswers, request: AgentRequest) -> dict[str, Any]:
    """Send a request of an agent, with the answer that the engine is to give; return it."""
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
    request: AgentRequest,
    number: int,
    known: Sequence[Sequence[int]],
) -> TurnReading:
    prompt, reuse = generation.request.prompt, generation.reuse
    runs = [equal_runs(tokens, prompt, _MIN_RUN) for tokens in known]
    most = max((sum(run.length for run in equal) for equal in runs), default=0)
    return TurnReading(
        agent,
        mode.name,
        number,
        request.event,
        request.aside,
        len(prompt),
        len(prompt) - most,
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
    """Return the requests of one trace in one mode."""
    lines = [f"{readings[0].agent}, {readings[0].mode}"]
    for r in readings:
        check = "" if r.equal is None else ("equal" if r.equal else f"top-1 {r.agreement:.1%}")
        kind = "aside" if r.aside else r.event or "-"
        lines.append(
            f"  {r.request:>3}: {r.evaluated:>6,} of {r.prompt:>6,} ({r.share:>6.1%}), new "
            f"{r.new:>6,}; {kind:<8} {'resumed' if r.resumed else '':<8} {r.reason:<10} "
            f"{r.seams} seams {check}"
        )
    return "\n".join(lines)


def summary_table(readings: Sequence[TurnReading]) -> str:
    """Return a table in Markdown: a line for each trace and mode, over all later requests.

    Most is the largest share of a prompt where little but new text is evaluated.
    """
    lines = [
        "| Agent | Mode | requests | new | evaluated | known text again | where little is: most | "
        "much again | where: mean | equal bits | top-1 | KL |",
        f"|{'---|' * 12}",
    ]
    for agent, mode in dict.fromkeys((r.agent, r.mode) for r in readings):
        later = [r for r in readings if (r.agent, r.mode) == (agent, mode) and r.is_later]
        much = [r for r in later if r.again > MUCH]
        cells = [agent, mode, str(len(later)), f"{mean(r.new / r.prompt for r in later):.1%}"]
        cells += [f"{mean(r.share for r in later):.1%}", f"{mean(r.again for r in later):.1%}"]
        cells += [f"{max((r.share for r in later if r.again <= MUCH), default=0.0):.1%}"]
        cells += [str(len(much)), f"{mean(r.share for r in much):.1%}" if much else "-"]
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
@click.option("--agent", "agents", multiple=True, type=click.Choice(list(load_shapes())))
@click.option("--mode", "modes", multiple=True, type=click.Choice([m.name for m in MODES]))
@click.option("--scale", default=1.0, type=click.FloatRange(0.01), help="Of the texts' lengths.")
@click.option("--random-weights", is_flag=True, help="Of a small model with the same tokenizer.")
@click.option("--check", is_flag=True, help="Compare with a cold evaluation.")
@out_option
def agent_traces(
    name: str,
    agents: tuple[str, ...],
    modes: tuple[str, ...],
    scale: float,
    random_weights: bool,
    check: bool,
    out: Path | None,
) -> None:
    """Measure how much of each prompt of coding agents is evaluated."""
    settings = {"model": name, "random_weights": random_weights, "scale": scale}
    result = ResultFile(out, settings=settings)
    model, readings = load_model(name), list[TurnReading]()
    model, shapes = random_model(model) if random_weights else model, load_shapes()
    for agent in agents or shapes:
        for mode in MODES:
            if not modes or mode.name in modes:
                trace = run_trace(model, shapes[agent], mode, scale, check)
                readings += trace
                result.write(readings=readings)
                click.echo(turn_table(trace))
    click.echo(summary_table(readings))


if __name__ == "__main__":
    agent_traces()
