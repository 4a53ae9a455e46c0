"""Random chats whose histories are edited: each answer has the logits of a cold evaluation.

    python -m tests.history_cases --cases 200 --first 0 --states delta_net

A case is a number, from which everything is drawn: prompts, answers with calls and reasoning, and
what clients do to a history. They change its header, remove reminders, drop reasoning, insert
tools, write calls as canonical JSON, delete turns, and go back to an earlier history. Without
`--states` the model is the default one; with it, a small random one with layers that keep states.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import click
import torch
from starlette.testclient import TestClient

from benchmarks.agent_traces import GivenAnswer, GivenAnswers
from kvkeep import Model, load_model
from kvkeep.engine import Generation
from kvkeep.engine.steps import StepGrid, prefill_step_at
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.server.app import application
from kvkeep.server.keys import ApiKeys
from kvkeep.server.service import Service
from kvkeep.session.evaluation import step_end
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session
from tests.small_models import state_specs

_WORDS = "the old town has a harbour where ships come and go in rain and sun"
_REMINDER = "\n<reminder>Be brief.</reminder>"
Message = dict[str, Any]


def hybrid_model(model: Model, kind: str) -> Model:
    """Return a small random model with states, with the tokenizer and template of another one."""
    vocab_size = model.text.tokenizer.get_vocab_size(True)
    spec = replace(state_specs()[kind], vocab_size=vocab_size, eos_token_ids=model.end_token_ids)
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * 0.1
        for name, shape in tensor_shapes(spec).items()
    }
    return Model("hybrid", model.text.folder, Decoder(spec, tensors), model.text)


@dataclass
class Client:
    """A client's conversation, whose next request is drawn."""

    random: Random
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    past: list[tuple[list[Message], list[dict[str, Any]]]] = field(default_factory=list)

    def text(self, most: int) -> str:
        return " ".join(self.random.choices(_WORDS.split(), k=self.random.randrange(3, most)))

    def begin(self) -> None:
        self.messages = [{"role": "system", "content": f"Day 1.\n{self.text(200)}"}]
        self.tools = [self.tool(number) for number in range(self.random.randrange(3))]

    def tool(self, number: int) -> dict[str, Any]:
        properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
        function = {"name": f"tool_{number}", "description": self.text(20)}
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {**function, "parameters": parameters}}

    def body(self) -> dict[str, Any]:
        """Return the next request."""
        for edit in self.random.sample(EDITS, self.random.choice((0, 0, 0, 1, 1, 2))):
            edit(self)
        if self.messages[-1]["role"] in ("system", "assistant") or self.random.random() < 0.2:
            reminder = _REMINDER if self.random.random() < 0.5 else ""
            self.messages.append({"role": "user", "content": self.text(40) + reminder})
        self.past.append((json.loads(json.dumps(self.messages)), list(self.tools)))
        return {"messages": self.messages, "tools": self.tools, "max_tokens": 200, "temperature": 0}

    def answer(self) -> str:
        """Return what the model writes."""
        thinking = f"<think>\n{self.text(20)}\n</think>\n\n" if self.random.random() < 0.3 else ""
        if self.tools and self.random.random() < 0.5:
            name = self.random.choice(self.tools)["function"]["name"]
            call = f'{{"name":"{name}","arguments" :{{"days":3,  "city":"K\\u00f6ln"}}}}'
            return f"{thinking}<tool_call>{call}\n</tool_call>\n"
        space = self.random.choice(("", "\n", "\n\n"))
        return f"{thinking}{space}{self.text(30)}{space}"

    def take(self, message: Message) -> None:
        """Add the answer to the history, as clients do."""
        self.messages.append({name: value for name, value in message.items() if value is not None})
        for call in message.get("tool_calls") or ():
            result = {"role": "tool", "tool_call_id": call["id"], "content": self.text(60)}
            self.messages.append(result)

    # What clients change

    def change_header(self) -> None:
        text = self.messages[0]["content"].partition("\n")[2]
        self.messages[0] = {"role": "system", "content": f"Day {self.random.randrange(9)}.\n{text}"}

    def remove_reminders(self) -> None:
        for message in self.messages:
            if self.random.random() < 0.7 and isinstance(message.get("content"), str):
                message["content"] = message["content"].replace(_REMINDER, "")

    def drop_reasoning(self) -> None:
        for message in self.messages:
            message.pop("reasoning_content", None)

    def insert_tool(self) -> None:
        tool = self.tool(10 + self.random.randrange(9))
        names = [tool["function"]["name"] for tool in self.tools]
        if tool["function"]["name"] not in names:
            self.tools.insert(self.random.randrange(len(self.tools) + 1), tool)

    def write_calls_canonically(self) -> None:
        for message in self.messages:
            for call in message.get("tool_calls") or ():
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))

    def strip_texts(self) -> None:
        for message in self.messages:
            if isinstance(message.get("content"), str):
                message["content"] = message["content"].strip()

    def delete_turn(self) -> None:
        starts = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if len(starts) > 1:
            index = self.random.randrange(len(starts) - 1)
            del self.messages[starts[index] : starts[index + 1]]

    def go_back(self) -> None:
        if self.past:
            messages, self.tools = self.random.choice(self.past)
            self.messages, self.tools = json.loads(json.dumps(messages)), list(self.tools)


EDITS = (
    *(Client.change_header, Client.remove_reminders, Client.drop_reasoning, Client.insert_tool),
    *(Client.write_calls_canonically, Client.strip_texts, Client.delete_turn, Client.go_back),
)


class ColdSessions:
    """Sessions without reuse beside those of an engine.

    A prompt that resumes an answer goes on behind it, in a session of the same name.
    """

    def __init__(self, model: Model, settings: dict[str, Any]):
        self._model, self._settings = model, settings
        self._sessions = dict[str, Session]()  # by the engine's names

    def logits(self, generation: Generation) -> Sequence[torch.Tensor]:
        """Return the logits before each token of a generation's answer."""
        prompt, reuse, name = generation.request.prompt, generation.reuse, generation.record.name
        if reuse.resumed:
            session, start = self._sessions[name], reuse.tokens
            assert session.tokens[:start] == list(prompt[:start])
            if len(session.tokens) > start:
                session.take_back(len(session.tokens) - start)
            while start < len(prompt):
                done = start - reuse.tokens
                size = step_end(done, prefill_step_at(session.prefill_step, start)) - done
                session.feed(prompt[start : start + size])
                start += size
        else:
            session, start = self._model.session(**self._settings), 0
            grid = StepGrid.of(session)
            while start < len(prompt):
                end = grid.next_end(prompt, start)
                session.feed(prompt[start:end])
                start = end
        self._sessions[name] = session
        given = GivenAnswer(generation.generated)
        for _ in generation.generated:
            session.next_token(Sampling(constraint=given))
        return given.logits


def run_case(model: Model, number: int, num_requests: int = 6) -> tuple[int, int]:
    """Run a case; return how many prompt tokens were reused, and how many there were."""
    random = Random(number)
    step = random.choice((32, 48, 128))
    settings = {"policy": "full", "max_kv_size": 4096, "prefill_step": step}
    cold, client, reused, total = ColdSessions(model, settings), Client(random), 0, 0
    client.begin()
    with GivenAnswers(model, settings=settings) as engine:
        http = TestClient(
            application(Service(engine, "model", ApiKeys())), base_url="http://127.0.0.1"
        )
        for request in range(num_requests):
            body = client.body()
            engine.give(client.answer())
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            (generation,) = engine.submitted.result()
            logits = cold.logits(generation)
            are_equal = list(map(torch.equal, engine.given.logits, logits))
            assert all(are_equal), (number, request, generation.reuse)
            assert len(are_equal) == len(logits) == len(engine.given.logits)
            reused, total = reused + generation.reuse.tokens, total + len(generation.request.prompt)
            client.take(response.json()["choices"][0]["message"])
    return reused, total


@click.command(help=__doc__)
@click.option("--cases", default=200)
@click.option("--first", default=0)
@click.option("--states", type=click.Choice(list(state_specs())))
def main(cases: int, first: int, states: str | None) -> None:
    model, start, failed = load_model(), time.monotonic(), list[int]()
    if states is not None:
        model = hybrid_model(model, states)
    model.renderer.choose_output_format("hermes")
    reused = total = 0
    for number in range(first, first + cases):
        try:
            some, of = run_case(model, number)
            reused, total = reused + some, total + of
        except Exception as error:
            failed.append(number)
            click.echo(f"case {number}: {error!r:.300}")
    seconds = time.monotonic() - start
    share = reused / max(1, total)
    click.echo(f"{cases} cases in {seconds:.0f} s, {share:.0%} reused, failed: {failed}")


if __name__ == "__main__":
    main()
