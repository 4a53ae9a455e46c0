"""Forms of calls whose grammars the other tests leave out, forced and read by a server."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvkeep.chat.messages import Chat, Message, TextPart, Tool, ToolChoice
from kvkeep.server.answer_grammar import compile_answer, compile_answer_or_calls
from tests.chat.written_answers import FORMS
from tests.scripted_model import ScriptedEngine, family_model
from tests.server.conftest import serving
from tests.server.test_call_grammar import accepts, model_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NUMBER = Tool(
    "weather",
    parameters={"type": "object", "properties": {"share": {"type": "number"}}},
)
QUESTION = Message("user", (TextPart("Hi"),))
# As Functionary v3.2, whose prompts end with the `>>>` before the recipient.
FUNCTIONARY = """\
{%- for tool in tools or [] %}{{ tool.function.name }}{{ '\\n' }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
    {%- if message.content %}{{ '>>>all\\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '>>>' + call.function.name + '\\n' + call.function.arguments }}
    {%- endfor %}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
>>>{% endif %}"""
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": NUMBER.parameters},
        }
    ],
}


@pytest.mark.parametrize("name", ["olmo3", "lfm2", "gemma4", "function-gemma"])
def test_numbers_of_calls_have_exponents_that_floats_have(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    grammar, _ = compile_answer_or_calls(model, SCHEMA, [NUMBER])
    call = FORMS[name].write_calls([("weather", {"share": 12345})]).replace("\x00", "")
    for number, is_allowed in (("1e99", True), ("-1.5E-9", True), ("8E5337", False)):
        assert accepts(model, grammar, call.replace("12345", number)) is is_allowed


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_functionary_calls_by_a_name_and_json_below_it(choice: str, tmp_path: Path) -> None:
    """Forced, or beside answers by a schema: so the grammar has it, and it is read."""
    model = family_model(tmp_path, [])
    (tmp_path / "chat_template.jinja").write_text(FUNCTIONARY)
    assert model.renderer.output_format.name == "functionary"
    call = 'weather\n{"share": 1}'
    body = {**CHAT, "tool_choice": choice}
    if choice == "required":
        chat = Chat((QUESTION,), (NUMBER,), ToolChoice("required"))
        grammar = compile_answer(model, chat).grammar
        assert grammar is not None
    else:
        grammar, names = compile_answer_or_calls(model, SCHEMA, [NUMBER])
        assert names == frozenset()
        assert accepts(model, grammar, f"{call}>>>{call}")
        assert accepts(model, grammar, '{"a":1}')
        schema = {"name": "answer", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    assert accepts(model, grammar, call)
    answers = [call]
    engine = ScriptedEngine(model, lambda _: answers[0], settings={"max_kv_size": 4096})
    with serving(engine) as server, server.client() as client:
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        (found,) = message["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == {"share": 1}
        answers[0] = '{"a":1}'
        if choice == "auto":
            response = client.post("/v1/chat/completions", json=body).json()
            assert response["choices"][0]["message"]["content"] == answers[0]


@pytest.mark.parametrize(
    ("signs", "markers", "warns"),
    [((), [], True), (("<tool_call>",), [], False), ((), ["[TOOL_CALLS]"], False)],
)
def test_a_request_with_tools_is_warned_if_no_form_of_calls_is_known(
    signs: tuple[str, ...], markers: list[str], warns: bool, tmp_path: Path
) -> None:
    model = family_model(tmp_path, markers, signs)
    engine = ScriptedEngine(model, lambda _: "Hi.", settings={"max_kv_size": 4096})
    with serving(engine) as server, server.client() as client:
        for body in (CHAT, {**CHAT, "tool_choice": "none"}, {"messages": CHAT["messages"]}):
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            warning = response.headers.get("X-Kvkeep-Warning", "")
            assert ("no form of calls" in warning) == (warns and body is CHAT)
