"""Reasoning ends after its budget, and a grammar holds for what follows it."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from server.conftest import RunningServer, serving

from kvkeep.chat.formats.registry import format_by_name
from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.tool_schemas import function_fields
from kvkeep.engine import Engine, Generation, GenerationRequest
from kvkeep.model import Model
from kvkeep.server.grammar import Grammar
from kvkeep.server.reasoning_budget import ReasoningConstraint, reasoning_constraint
from kvkeep.session.sampling import Constraint, Sampling
from tests.scripted_model import family_model

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
HERMES = format_by_name("hermes")


def constraint(
    model: Model, budget: int | None, answer: Constraint | None = None, inside: bool = True
) -> ReasoningConstraint:
    return ReasoningConstraint(model.text, HERMES, inside, budget, answer, model.end_token_ids)


def generate(model: Model, constraint: ReasoningConstraint, count: int) -> str:
    session = model.session(512)
    session.feed("Once upon a time")
    return "".join(session.stream(count, sampling=Sampling(constraint=constraint)))


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_reasoning_ends_after_its_budget(smollm2: Model, budget: int) -> None:
    text = generate(smollm2, constraint(smollm2, budget), 40)
    reasoning, marker, answer = text.partition("</think>")
    assert marker
    assert answer
    assert len(smollm2.text.encode(reasoning)) <= budget
    assert (reasoning == "") == (budget == 0)


def test_a_schema_holds_for_the_answer_behind_the_reasoning(smollm2: Model) -> None:
    answer = Grammar.from_schema(smollm2, SCHEMA)
    text = generate(smollm2, constraint(smollm2, 6, answer), 60)
    reasoning, _, rest = text.partition("</think>")
    assert "{" not in reasoning
    assert json.loads(rest) == {"a": 1}


def test_end_tokens_are_forbidden_in_reasoning_before_a_constrained_answer(smollm2: Model) -> None:
    logits = torch.zeros(smollm2.text.vocab_size)
    answer = Grammar.from_schema(smollm2, SCHEMA)
    masked = constraint(smollm2, None, answer).masked(logits)
    assert all(masked[token] == -torch.inf for token in smollm2.end_token_ids)
    assert constraint(smollm2, 3).masked(logits) is logits


def channel_text(constraint: ReasoningConstraint, model: Model, text: str) -> str:
    """Follow a text, and forced tokens wherever there are any; return all of them."""
    logits, result = torch.zeros(model.text.vocab_size), []
    queue = model.text.encode(text)
    for _ in range(200):
        masked = constraint.masked(logits)
        allowed = (masked > -torch.inf).nonzero().flatten().tolist()
        if len(allowed) == 1:
            token = allowed[0]
        elif queue:
            token = queue.pop(0)
        else:
            break
        result.append(token)
        constraint.accept(token)
    return model.text.decode(result)


def test_channels_are_written_before_a_constrained_answer(smollm2: Model) -> None:
    """For gpt-oss: the analysis, then the final channel, whose content is the answer."""
    harmony = format_by_name("harmony")
    answer = Grammar.from_schema(smollm2, {"const": "x"})

    def written(budget: int | None, text: str) -> str:
        ids = smollm2.end_token_ids
        return channel_text(
            ReasoningConstraint(smollm2.text, harmony, False, budget, answer, ids), smollm2, text
        )

    final = "<|channel|>final<|message|>"
    expected = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{final}"
    assert written(None, "Hm<|end|>").startswith(expected)
    assert written(1, "H").startswith(expected.replace("Hm", "H"))
    assert written(0, "").startswith(final)


@pytest.mark.parametrize(
    ("output_format", "inside", "budget", "constrained"),
    [
        (format_by_name("hermes"), False, 5, False),  # SmolLM2 has no token `<think>`
        (format_by_name("hermes"), True, 5, True),
        (format_by_name("hermes"), True, None, False),
        (format_by_name("harmony"), False, 0, True),
    ],
)
def test_only_models_that_reason_are_constrained(
    smollm2: Model, output_format: OutputFormat, inside: bool, budget: int | None, constrained: bool
) -> None:
    ids = smollm2.end_token_ids
    result = reasoning_constraint(smollm2.text, output_format, inside, budget, None, ids)
    assert (result is not None) == constrained
    answer = Grammar.from_schema(smollm2, SCHEMA)
    result = reasoning_constraint(smollm2.text, output_format, inside, budget, answer, ids)
    assert isinstance(result, ReasoningConstraint) == (inside or output_format.channels)


# The prompt ends inside reasoning that has begun.
BEGUN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]
CHAT: dict[str, Any] = {"messages": BEGUN, "max_tokens": 8, "temperature": 0}
RESPONSE: dict[str, Any] = {"input": BEGUN, "max_output_tokens": 8, "temperature": 0}
OLLAMA: dict[str, Any] = {
    "messages": BEGUN,
    "options": {"num_predict": 8, "temperature": 0},
    "stream": False,
}


def reasoning_of(path: str, answer: dict[str, Any]) -> list[Any]:
    """The parts of an answer that are reasoning."""
    if path == "/v1/responses":
        return [item for item in answer["output"] if item["type"] == "reasoning"]
    if path == "/v1/messages":
        return [block for block in answer["content"] if block["type"] == "thinking"]
    message = answer["message"] if path == "/api/chat" else answer["choices"][0]["message"]
    return [message[name] for name in ("thinking", "reasoning_content") if name in message]


@pytest.mark.parametrize(
    ("path", "body", "disabling"),
    [
        ("/v1/chat/completions", CHAT, {"reasoning_effort": "none"}),
        ("/v1/chat/completions", CHAT, {"reasoning": {"enabled": False}}),
        ("/v1/responses", RESPONSE, {"reasoning": {"effort": "none"}}),
        ("/v1/responses", RESPONSE, {"enable_thinking": False}),
        ("/v1/responses", RESPONSE, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/messages", CHAT, {"thinking": {"type": "disabled"}}),
        ("/api/chat", OLLAMA, {"think": False}),
    ],
)
def test_disabled_reasoning_ends_at_once_in_every_api(
    server: RunningServer, path: str, body: dict[str, Any], disabling: dict[str, Any]
) -> None:
    with server.client() as client:
        reasoning, none = (client.post(path, json={**body, **more}) for more in ({}, disabling))
    assert (reasoning.status_code, none.status_code) == (200, 200)
    assert reasoning_of(path, reasoning.json())
    assert not reasoning_of(path, none.json())


# As Ministral 3 writes them: calls behind a control token, and reasoning between two of them.
MINISTRAL = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}
"""
_MINISTRAL_TOKENS = ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "THINK")
NOW = Tool("now", parameters={"type": "object", "properties": {}, "additionalProperties": False})


class BegunConstraint:
    """The constraint of a request, behind the first tokens of an answer."""

    def __init__(self, ids: Sequence[int], constraint: Constraint):
        self._ids, self._constraint = list(ids), constraint

    @property
    def complete(self) -> bool:
        return bool(getattr(self._constraint, "complete", False))

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        masked = self._constraint.masked(logits)
        if self._ids and masked[self._ids[0]] > -torch.inf:
            chosen = torch.full_like(masked, -torch.inf)
            chosen[self._ids[0]] = 0.0
            return chosen
        self._ids.clear()
        return masked

    def accept(self, token: int) -> None:
        if self._ids and token == self._ids[0]:
            self._ids.pop(0)
        self._constraint.accept(token)


class BegunEngine(Engine):
    """An engine whose answers begin with a text, as far as their constraints allow it."""

    beginning = ""

    def submit_many(
        self, request: GenerationRequest, samplings: Sequence[Sampling], *args: Any, **options: Any
    ) -> Future[list[Generation]]:
        ids = self.model.text.encode(self.beginning, special=True)
        begun = [
            replace(sampling, constraint=BegunConstraint(ids, sampling.constraint))
            for sampling in samplings
            if sampling.constraint is not None
        ]
        return super().submit_many(request, begun, *args, **options)


def test_a_call_behind_a_character_that_the_budget_cuts_is_a_call(tmp_path: Path) -> None:
    """The tokenizer has a token for each byte, so the budget ends inside the emoji."""
    pairs = [f"[{slash}{name}]" for name in _MINISTRAL_TOKENS for slash in ("", "/")]
    model = family_model(tmp_path, [*pairs, "[TOOL_CALLS]", "[ARGS]", "</s>"])
    (tmp_path / "chat_template.jinja").write_text(MINISTRAL)
    engine = BegunEngine(model, settings={"max_kv_size": 4096})
    engine.beginning = "[THINK]a😀"
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function_fields(NOW)}],
        "tool_choice": "required",
        "reasoning_budget": 3,
        "max_tokens": 60,
    }
    with serving(engine) as server, server.client() as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    assert message["content"] in (None, "")
    assert message["reasoning_content"] == "a\ufffd"
