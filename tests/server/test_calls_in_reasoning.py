"""A server gives calls that a model writes before the end of its reasoning, and keeps them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.chat.messages import Tool
from kvkeep.chat.openai_chat import parse_chat
from kvkeep.model import Model
from kvkeep.server.answer_grammar import compile_answer
from kvkeep.server.reasoning_budget import ReasoningConstraint
from tests.scripted_model import ScriptedEngine, family_model
from tests.server.conftest import serving

# As Qwen3.5: an answer begins inside its reasoning.
TEMPLATE = """\
{%- for tool in tools or [] %}<function>{{ tool.function.name }}</function>{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}<think>
{{ message.reasoning_content or '' }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items -%}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=text>\nParis\n</parameter>\n</function>\n"
    "</tool_call>"
)
ANSWER = f"I look it up.\n{CALL}"
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    markers = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    model = family_model(tmp_path, [], text_markers=markers)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return model


def test_a_call_in_open_reasoning_is_given_and_written_back(model: Model) -> None:
    answers = [ANSWER, "Sunny.\n</think>\n\nIt is sunny."]
    engine = ScriptedEngine(model, lambda _: answers.pop(0), settings={"max_kv_size": 4096})
    with serving(engine) as server, server.client() as client:
        body: dict[str, Any] = {"messages": QUESTION, "tools": [TOOL]}
        first = client.post("/v1/chat/completions", json=body).json()
        message = first["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"]) == {"text": "Paris"}
        assert message["reasoning_content"] == "I look it up."
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        body["messages"] = [*QUESTION, message, result]
        second = client.post("/v1/chat/completions", json=body).json()
    assert second["choices"][0]["message"]["content"] == "It is sunny."
    assert second["x_kvkeep"]["written"] == len(model.text.encode(ANSWER, special=True))


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_reasoning_before_a_grammar_ends_by_its_marker(model: Model, choice: str) -> None:
    """The answer behind it is the call, or follows the schema: no call is there twice."""
    call = json.dumps({"name": "weather", "arguments": {"text": "Rome"}}, separators=(",", ":"))
    end = call if choice == "required" else '{"a":1}'
    engine = ScriptedEngine(
        *(model, lambda _: f"{ANSWER}\n</think>\n\n{end}"), settings={"max_kv_size": 4096}
    )
    body: dict[str, Any] = {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice}
    if choice == "auto":
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        }
    with serving(engine) as server, server.client() as client:
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == ANSWER
    calls = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    assert calls == ([{"text": "Rome"}] if choice == "required" else [])


@pytest.mark.parametrize(
    ("beginning", "rest", "is_call"),
    [
        ("Hm.\n<tool_call>\n<function=weather>", "\n<parameter=text>\nxyz", True),
        ('<tool_call>\n{"name": "weather"', "xyz", True),
        ('<tool_call>\n{"name": "functions.weather"', "xyz", True),
        ("<tool_call>weather\n<arg_key>", "xyz", True),
        ("Hm. <tool_call>\n<function=weather>", "xyz", False),
        (f"Hm. {'a' * 390}<tool_call>\n<function=weather>{'b' * 60}", "xyz", False),
        ("Hm.\n<tool_call>\nis a tag", "xyz", False),
        ("Hm.\n<tool_call>\n<function=weather>", "\nis a tag", False),
        ("Hm.\n<tool_call>\n<function=nosuch>", "\n<parameter=text>\nxyz", False),
        ('Hm.\n<tool_call>\n{"name": "nosuch"', "xyz", False),
        ("```\n<tool_call>\n<function=weather>", "\n<parameter=text>\nxyz", False),
    ],
)
def test_the_budget_of_the_reasoning_does_not_cut_a_call(
    model: Model, beginning: str, rest: str, is_call: bool
) -> None:
    assert is_uncut(model, beginning, rest, [Tool("weather")]) == is_call


def test_the_budget_holds_where_no_tool_may_be_called(model: Model) -> None:
    assert not is_uncut(model, '<tool_call>\n{"name": "weather"', "xyz", [])


def is_uncut(model: Model, beginning: str, rest: str, tools: list[Tool]) -> bool:
    """Whether a budget of one token more than the beginning has lets all be written."""
    ids = model.text.encode(beginning, special=True)
    constraint = ReasoningConstraint(
        *(model.text, model.renderer.output_format, True, len(ids) + 1, None),
        model.end_token_ids,
        tools=tools,
    )
    for token in [*ids, *model.text.encode(rest, special=True)]:
        allowed = constraint.masked(torch.zeros(model.text.vocab_size)) > -torch.inf
        if allowed.sum() == 1:
            return False
        assert allowed[token]
        constraint.accept(token)
    return True


@pytest.mark.parametrize("is_known", [True, False])
def test_a_server_gives_the_budget_the_callable_tools(model: Model, is_known: bool) -> None:
    """A quoted call of another tool does not end the reasoning, nor its budget."""
    quoted = 'Hm.\n<tool_call>\n{"name": "%s"' % ("weather" if is_known else "nosuch")
    body: dict[str, Any] = {"messages": QUESTION, "tools": [TOOL]}
    answer = compile_answer(model, parse_chat(body))
    prompt = model.renderer.render(parse_chat(body))
    ids = model.text.encode(quoted, special=True)
    constraint = answer.constraint(model, prompt, len(ids) + 1)
    assert constraint is not None
    for token in [*ids, *model.text.encode("x")]:
        constraint.accept(token)
    allowed = constraint.masked(torch.zeros(model.text.vocab_size)) > -torch.inf
    assert (allowed.sum() > 1) == is_known
