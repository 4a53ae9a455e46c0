"""Chat completions read generated text as text, reasoning and calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from chat.written_answers import FORMS, marked
from server.conftest import RunningServer, ScriptedServer

from kvkeep.chat.renderer import ChatRenderer, RenderedPrompt
from kvkeep.model import Model

QUESTION = [{"role": "user", "content": "How is the weather?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("weather", "forecast")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("weather", {"city": "Rome", "days": 2})
PARIS = ("forecast", {"city": 'the "City"\n</tool_call>', "days": -1})


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def writer(scripted: ScriptedServer) -> openai.OpenAI:
    """Return a client whose model writes what `scripted` says."""
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, stream: bool = False, **params: Any) -> dict[str, Any]:
    """Return the first choice's message, finish reason and log-probabilities."""
    params = {"messages": QUESTION, "model": "x", "tools": TOOLS, "max_tokens": 500, **params}
    if not stream:
        choice = client.chat.completions.create(**params).choices[0]
        logprobs = choice.logprobs.content if choice.logprobs else None
        message = choice.message.model_dump(exclude_none=True)
        return {"finish_reason": choice.finish_reason, "logprobs": logprobs, **message}
    message = {"role": "assistant", "logprobs": None}
    for chunk in client.chat.completions.create(stream=True, **params):
        for choice in chunk.choices:
            if choice.finish_reason:
                message["finish_reason"] = choice.finish_reason
            if choice.logprobs:
                message["logprobs"] = [*(message["logprobs"] or []), *choice.logprobs.content]
            join_delta(message, choice.delta.model_dump(exclude_none=True))
    return message


def join_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Join a delta to a message as clients do: texts are appended, calls found by index."""
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value:
                calls = message.setdefault(key, [])
                if call["index"] == len(calls):
                    calls.append({})
                join_delta(calls[call["index"]], call)
        elif isinstance(value, dict):
            join_delta(message.setdefault(key, {}), value)
        elif key in ("content", "reasoning_content", "arguments", "input"):
            message[key] = message.get(key, "") + value
        elif key != "index":
            message[key] = value


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def without_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    return {**message, **({"tool_calls": calls} if calls else {})}


def both(client: openai.OpenAI, **params: Any) -> dict[str, Any]:
    """Return an answer that is the same streamed and not."""
    whole, streamed = ask(client, **params), ask(client, stream=True, **params)
    assert without_ids(streamed) == without_ids(whole)
    return whole


QUICK_FORMS = ("qwen3-coder", "llama3", "gemma4", "harmony")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK_FORMS else pytest.mark.slow) for name in FORMS],
)
def test_every_form_of_answers_is_read(
    writer: openai.OpenAI, scripted: ScriptedServer, name: str
) -> None:
    form = FORMS[name]
    start, end = form.reasoning
    channel = marked("<|start|>") + "assistant" if form.output_format == "harmony" else ""
    text = f"{start}Hm, weather.{end}{channel}{form.write_calls([ROME, PARIS])}".replace("\x00", "")
    scripted.write(text, output_format=form.output_format)
    answer = both(writer)
    assert answer["reasoning_content"] == "Hm, weather."
    assert calls_of(answer) == [ROME, PARIS]
    assert answer["finish_reason"] == "tool_calls"
    assert not answer.get("content")


def test_text_around_calls_is_the_same_streamed(
    writer: openai.OpenAI, scripted: ScriptedServer
) -> None:
    scripted.write(f"Let me look.\n{CALL}\n\nSee.\n")
    answer = both(writer)
    assert answer["content"] == "Let me look.\n\nSee.\n"
    assert calls_of(answer) == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("weather", "unknown"),
        'So: {"name": "weather", "arguments": {"city": "Rome"}}',
        CALL.replace('{"city": "Rome"}', "[1]"),
        "<tool_call> is a tag <",
        "a < b and\n\n",
    ],
)
def test_what_is_no_call_is_text(
    writer: openai.OpenAI, scripted: ScriptedServer, text: str
) -> None:
    scripted.write(text)
    answer = both(writer)
    assert answer["content"] == text
    assert answer["finish_reason"] == "stop"


def test_unknown_calls_beside_known_ones_stay(
    writer: openai.OpenAI, scripted: ScriptedServer
) -> None:
    unknown = CALL.replace("weather", "unknown")
    scripted.write(f"{unknown}\n{CALL}")
    answer = both(writer)
    assert answer["content"] == unknown
    assert calls_of(answer) == [("weather", {"city": "Rome"})]


def test_without_parallel_calls_an_answer_ends_with_the_first(
    writer: openai.OpenAI, scripted: ScriptedServer, smollm2: Model
) -> None:
    scripted.write(CALL * 9)
    answer = both(writer, parallel_tool_calls=False)
    assert calls_of(answer) == [("weather", {"city": "Rome"})]
    assert answer["finish_reason"] == "tool_calls"
    response = writer.chat.completions.create(
        model="x", messages=QUESTION, tools=TOOLS, parallel_tool_calls=False
    )
    assert response.usage.completion_tokens < 2 * len(smollm2.text.encode(CALL))
    assert len(calls_of(both(writer))) == 9


def test_an_only_call_that_is_cut_off_is_not_to_be_run(
    writer: openai.OpenAI, scripted: ScriptedServer, smollm2: Model
) -> None:
    scripted.write(CALL)
    limit = len(smollm2.text.encode(CALL)) - 8
    answer = both(writer, parallel_tool_calls=False, max_tokens=limit)
    assert answer["tool_calls"]
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("stop", [["ome"], []], ids=["stop string", "end"])
def test_a_call_that_ends_early_is_not_to_be_run(
    writer: openai.OpenAI, scripted: ScriptedServer, stop: list[str]
) -> None:
    scripted.write(CALL if stop else CALL[: CALL.index("ome")])
    answer = both(writer, stop=stop)
    (call,) = answer["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "R'
    assert answer["finish_reason"] == "stop"
    functions = [tool["function"] for tool in TOOLS]
    answer = both(writer, tools=openai.NOT_GIVEN, functions=functions, stop=stop)
    assert answer["function_call"]["arguments"] == '{"city": "R'
    assert answer["finish_reason"] == "stop"


def test_deprecated_functions_are_called_in_their_own_form(
    writer: openai.OpenAI, scripted: ScriptedServer
) -> None:
    functions = [tool["function"] for tool in TOOLS]
    scripted.write(CALL)
    answer = both(writer, tools=openai.NOT_GIVEN, functions=functions)
    assert answer["function_call"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert answer["finish_reason"] == "function_call"
    assert "tool_calls" not in answer


def test_custom_tools_are_called_with_text(writer: openai.OpenAI, scripted: ScriptedServer) -> None:
    text = '<tool_call>{"name": "run", "arguments": {"input": "a \\"b\\""}}</tool_call>'
    scripted.write(text)
    answer = both(writer, tools=[{"type": "custom", "custom": {"name": "run"}}])
    (call,) = answer["tool_calls"]
    assert call["custom"] == {"name": "run", "input": 'a "b"'}
    scripted.write(text[: text.index("b\\")])
    (call,) = both(writer, tools=[{"type": "custom", "custom": {"name": "run"}}])["tool_calls"]
    assert call["custom"] == {"name": "run", "input": 'a "'}


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_of_the_text_has_its_log_probability(
    writer: openai.OpenAI, scripted: ScriptedServer, stream: bool
) -> None:
    scripted.write(f"<think>\nHm. </think>\n\nLet me look.\n{CALL}\nSee.")
    answer = ask(writer, stream=stream, logprobs=True, top_logprobs=1)
    assert answer["reasoning_content"] == "Hm."
    assert "".join(entry.token for entry in answer["logprobs"]) == answer["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_is_an_incomplete_call(
    client: openai.OpenAI, stream: bool
) -> None:
    answer = ask(client, stream, tool_choice="required", tools=TOOLS[:1], max_tokens=16)
    assert answer["finish_reason"] == "length"
    assert not answer.get("content")
    (call,) = answer["tool_calls"]
    assert call["function"]["name"] == "weather"
    with pytest.raises(ValueError, match="line 1"):
        json.loads(call["function"]["arguments"])


def test_choices_are_read_apart(writer: openai.OpenAI, scripted: ScriptedServer) -> None:
    scripted.write(CALL, "No.")
    output = writer.chat.completions.create(model="x", messages=QUESTION, tools=TOOLS, n=2)
    first, second = output.choices
    assert first.message.tool_calls[0].function.name == "weather"
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert second.message.content == "No."


def test_allowed_tools_are_the_only_ones(writer: openai.OpenAI, scripted: ScriptedServer) -> None:
    entries = [{"type": "function", "function": {"name": "forecast"}}]
    allowed = {"mode": "auto", "tools": entries}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    scripted.write(CALL)
    with scripted.client() as client:
        counts = set[int]()
        for fields in ({}, {"tool_choice": choice}):
            body = {"messages": QUESTION, "tools": TOOLS, **fields}
            answer = client.post("/v1/chat/completions/input_tokens", json=body).json()
            counts.add(answer["input_tokens"])
        assert len(counts) == 1  # the prompt describes all tools
    assert both(writer, tool_choice=choice)["content"] == CALL
    assert both(writer, tool_choice="none")["content"] == CALL


@pytest.fixture
def prompts_in_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all prompts end where reasoning has begun, as those of some templates do."""
    render = ChatRenderer.render

    def render_in_reasoning(self: ChatRenderer, *arguments: Any) -> RenderedPrompt:
        return replace(render(self, *arguments), starts_in_reasoning=True)

    monkeypatch.setattr(ChatRenderer, "render", render_in_reasoning)


@pytest.mark.usefixtures("prompts_in_reasoning")
def test_reasoning_has_a_budget_and_a_schema_holds_behind_it(
    client: openai.OpenAI, smollm2: Model
) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
    params = {"tools": openai.NOT_GIVEN, "temperature": 0, "response_format": schema}
    answer = both(client, extra_body={"reasoning_budget": 6}, **params)
    assert 0 < len(smollm2.text.encode(answer["reasoning_content"])) <= 6
    assert answer["content"] == "7"
    for field in ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}):
        answer = both(client, extra_body=field, **params)
        assert (answer["content"], answer.get("reasoning_content")) == ("7", None)


@pytest.mark.usefixtures("prompts_in_reasoning")
def test_a_forced_call_follows_the_reasoning(client: openai.OpenAI) -> None:
    budget = {"thinking": {"type": "enabled", "budget_tokens": 4}}
    answer = both(client, tool_choice="required", temperature=0, extra_body=budget)
    assert answer["reasoning_content"]
    assert len(calls_of(answer)) == 1


def post(server: RunningServer, messages: Sequence[Any] = QUESTION, **body: Any) -> Any:
    with server.client() as client:
        body = {"messages": messages, "max_tokens": 2, **body}
        response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def test_what_is_not_taken_over_is_named(server: RunningServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    response = post(server, [{"role": "user", "content": [image]}], web_search_options={"a": 1})
    assert response.headers["X-Kvkeep-Ignored"] == "web_search_options"
    assert "image" in response.headers["X-Kvkeep-Warning"]
    assert "X-Kvkeep-Ignored" not in post(server, user="me", metadata={"a": "b"}).headers


def test_fields_that_clients_send_are_taken(server: RunningServer) -> None:
    refused = [*QUESTION, {"role": "assistant", "content": None, "refusal": "No."}, *QUESTION]
    post(server, refused)
    tools = [{"type": "function", "function": {"name": f"tool_{index}"}} for index in range(200)]
    with server.client() as client:
        body = {"messages": QUESTION, "tools": tools, "tool_choice": "none"}
        count = client.post("/v1/chat/completions/input_tokens", json=body).json()
    assert count["input_tokens"] > 5_000  # the prompt describes all of them
    schema = {"type": "json_schema", "schema": {"const": 7}}
    message = post(server, response_format=schema).json()["choices"][0]["message"]
    assert message["content"] == "7"
    options = {"reasoning_effort": "low", "enable_thinking": False, "reasoning_budget": 5}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "disabled"}}
    post(server, **options, **kwargs)
    unlimited = post(server, max_tokens=-1, stop=[" "]).json()
    assert unlimited["choices"][0]["finish_reason"] == "stop"
