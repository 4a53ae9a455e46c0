"""Ollama's API."""

import json
import re
from typing import Any

import httpx
import pytest
from chat.written_answers import FORMS, format_of
from server.conftest import RunningServer, ScriptedServer

from kvkeep.chat.messages import Tool
from kvkeep.chat.output import CallStarted
from kvkeep.chat.output_reader import OutputReader
from kvkeep.model import Model
from kvkeep.server.ollama.answers import AnswerFormat
from kvkeep.server.ollama.request import OllamaChatRequest

QUESTION = {"role": "user", "content": "What is the capital of France? One word."}
GREEDY = {"temperature": 0, "num_predict": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    fields = {"model": "smollm2", "options": GREEDY, **body}
    return httpx.post(f"{server.url}/api/{path}", json=fields, timeout=120)


def whole(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    response = post(server, path, stream=False, **body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    assert result["done"]
    return result


def chunks(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    """The lines of a stream, which is the default."""
    response = post(server, path, **body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def test_a_chat_equals_a_session_in_python(server: RunningServer, smollm2: Model) -> None:
    session = smollm2.session(2048, prefill_step=128)
    session.feed(smollm2.text.chat([QUESTION]))
    expected = "".join(session.stream(12))
    answer = whole(server, "chat", messages=[QUESTION])
    assert answer["message"] == {"role": "assistant", "content": expected}
    assert answer["model"] == "smollm2"
    assert answer["done_reason"] in ("stop", "length")
    assert answer["prompt_eval_count"] == len(smollm2.text.encode(smollm2.text.chat([QUESTION])))
    assert 0 < answer["eval_duration"] <= answer["total_duration"]
    assert 0 < answer["eval_count"] <= 12


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat", {"messages": [QUESTION]}), ("generate", {"prompt": "One two three"})],
)
def test_a_stream_equals_the_whole_answer(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    def text(chunk: dict[str, Any]) -> str:
        part = chunk["message"]["content"] if path == "chat" else chunk["response"]
        return str(part)

    answer = whole(server, path, **body)
    lines = chunks(server, path, **body)
    assert "".join(map(text, lines)) == text(answer)
    assert text(lines[0]) == ""  # before the prefill
    for name in ("done_reason", "prompt_eval_count", "eval_count"):
        assert lines[-1][name] == answer[name]


def test_generate_takes_a_system_text_or_a_raw_prompt(
    server: RunningServer, smollm2: Model
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, QUESTION]
    expected = whole(server, "chat", messages=messages)["message"]["content"]
    answer = whole(server, "generate", prompt=QUESTION["content"], system="Be brief.")
    assert answer["response"] == expected
    raw = str(smollm2.text.chat(messages))
    assert whole(server, "generate", prompt=raw, raw=True)["response"] == expected


def test_generate_continues_the_context_of_an_earlier_answer(server: RunningServer) -> None:
    first = whole(server, "generate", prompt=QUESTION["content"])
    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    second = whole(server, "generate", prompt="And of Italy?", context=first["context"])
    assert second["prompt_eval_count"] > len(first["context"])


def test_stop_and_num_predict_end_the_answer(server: RunningServer) -> None:
    text = whole(server, "chat", messages=[QUESTION])["message"]["content"]
    stop = text[len(text) // 2 :][:3]
    stopped = whole(server, "chat", messages=[QUESTION], options={**GREEDY, "stop": [stop]})
    assert (stopped["message"]["content"], stopped["done_reason"]) == (
        text[: text.index(stop)],
        "stop",
    )
    options = {"temperature": 0, "num_predict": 2, "num_ctx": 512, "num_gpu": None}
    cut = whole(server, "chat", messages=[QUESTION], options=options)
    assert (cut["eval_count"], cut["done_reason"]) == (2, "length")


def test_format_constrains_the_answer(server: RunningServer) -> None:
    options = {"temperature": 0, "num_predict": 60}
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = whole(server, "chat", messages=[QUESTION], format=schema, options=options)
    assert json.loads(answer["message"]["content"]).keys() == {"city"}
    assert whole(server, "generate", prompt="JSON:", format="json", options=options)["response"][
        :1
    ] == ("{")
    assert post(server, "chat", messages=[QUESTION], format="xml").status_code == 400


def test_images_calls_and_results_of_a_history_are_accepted(server: RunningServer) -> None:
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    history = [
        {"role": "user", "content": "How is the weather?", "images": ["iVBORw0KGgo="]},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "Rain", "tool_name": "weather"},
    ]
    assert whole(server, "chat", messages=history, tools=[TOOL])["eval_count"]


def test_logprobs_are_reported(server: RunningServer) -> None:
    answer = whole(server, "chat", messages=[QUESTION], logprobs=True, top_logprobs=2)
    assert len(answer["logprobs"]) == answer["eval_count"] - (answer["done_reason"] == "stop")
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer["logprobs"])


def test_requests_without_a_prompt_load_the_model(server: RunningServer) -> None:
    loaded = whole(server, "chat", messages=[])
    assert (loaded["message"]["content"], loaded["done_reason"]) == ("", "load")
    unloaded = whole(server, "generate", keep_alive=0)
    assert (unloaded["response"], unloaded["done_reason"]) == ("", "unload")


def test_errors_are_texts(server: RunningServer) -> None:
    for path, body in (
        ("chat", {"messages": [{"role": "robot"}]}),
        ("chat", {"messages": 5}),
        ("chat", {"messages": [QUESTION], "options": {"temperature": "warm"}}),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}),
        ("generate", {"prompt": "a", "suffix": "b"}),
    ):
        response = post(server, path, **body)
        assert response.status_code == 400
        assert isinstance(response.json()["error"], str)


def test_what_is_ignored_is_named(server: RunningServer) -> None:
    options = {**GREEDY, "mirostat": 2, "num_ctx": 4096}
    response = post(server, "chat", messages=[QUESTION], options=options, stream=False, odd=1)
    assert response.headers["x-kvkeep-ignored"] == "odd, options.mirostat"
    assert "x-kvkeep-ignored" not in post(server, "chat", messages=[QUESTION]).headers


def test_options_that_ask_for_nothing_are_not_named(server: RunningServer) -> None:
    neutral = {
        "num_keep": 4,
        "penalize_newline": True,
        "typical_p": 1.0,
        "tfs_z": 1.0,
        "mirostat": 0,
        "mirostat_eta": 0.1,
        "mirostat_tau": 5.0,
    }
    for name, value in (*neutral.items(), ("num_keep", None)):
        response = post(server, "chat", messages=[QUESTION], options={**GREEDY, name: value})
        assert "x-kvkeep-ignored" not in response.headers, name
    others = {**neutral, "num_keep": 24, "penalize_newline": False, "typical_p": 0.5}
    response = post(server, "chat", messages=[QUESTION], options={**GREEDY, **others})
    ignored = response.headers["x-kvkeep-ignored"].split(", ")
    assert sorted(ignored) == ["options.num_keep", "options.penalize_newline", "options.typical_p"]


@pytest.mark.parametrize(
    ("think", "effort", "enabled"),
    [("max", "high", True), ("high", "high", True), ("low", "low", True), (False, None, False)],
)
def test_the_greatest_effort_is_the_greatest_that_templates_know(
    think: bool | str, effort: str | None, enabled: bool
) -> None:
    options = OllamaChatRequest(think=think).render_options()
    assert (options.reasoning_effort, options.enable_thinking) == (effort, enabled)


def test_thinking_text_and_calls_are_fields_of_the_message(scripted: ScriptedServer) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    text = f"<think>\nWhich city?\n</think>\n\nLet me see.\n{call}\n{call}"
    body: Any = {"messages": [QUESTION], "tools": [TOOL], "options": {"num_predict": 200}}
    scripted.write(text)
    message = whole(scripted, "chat", **body)["message"]
    parts = [chunk["message"] for chunk in chunks(scripted, "chat", **body)]
    assert message["thinking"] == "Which city?"
    assert message["content"].strip() == "Let me see."
    functions = [call["function"] for call in message["tool_calls"]]
    weather = {"name": "weather", "arguments": {"city": "Rome"}}
    assert functions == [{"index": 0, **weather}, {"index": 1, **weather}]
    assert "".join(part.get("thinking", "") for part in parts) == message["thinking"]
    assert "".join(part["content"] for part in parts) == message["content"]
    streamed = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert streamed == functions


def test_a_call_that_was_cut_off_is_text(scripted: ScriptedServer) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome and Oslo"}}'
    count = len(scripted.service.model.text.encode(call)) - 4
    options = {"num_predict": count}
    scripted.write(call)
    answer = whole(scripted, "chat", messages=[QUESTION], tools=[TOOL], options=options)
    assert "tool_calls" not in answer["message"]
    assert answer["message"]["content"].startswith('{"name": "weather", "arguments": {"city": "Rom')
    assert answer["done_reason"] == "length"


@pytest.mark.parametrize("name", FORMS)
def test_nothing_of_a_cut_off_call_vanishes_in_any_form(smollm2: Model, name: str) -> None:
    """Whatever is read of it, a call is in `tool_calls` or begins in the text with its name."""
    form, tools = FORMS[name], [Tool("weather"), Tool("forecast")]
    text = form.write_calls([("weather", {"city": "Rome"}), ("forecast", {"days": 2})])
    text = text.replace("\x00", "")
    for length in range(len(text)):
        reader = OutputReader(format_of(form, control_tokens=False), tools)
        events = [*reader.push([text[:length]]), *reader.finish()]
        message = AnswerFormat("x", smollm2.text, in_message=True).content(events)
        message = message.get("message", {"content": ""})
        called = [call["function"]["name"] for call in message.get("tool_calls", ())]
        begun = re.findall(r'{"name": "(\w+)", "arguments": ', message["content"])
        started = {event.name for event in events if isinstance(event, CallStarted)}
        assert started <= {*called, *begun}


def test_ollamas_package_chats_lists_and_calls(server: RunningServer) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    assert [entry.model for entry in client.list().models] == ["smollm2"]
    assert client.show("smollm2").details.family == "llama"
    body: Any = {"model": "smollm2", "messages": [QUESTION], "options": GREEDY}
    answer = client.chat(**body)
    assert answer.message.content == "".join(
        chunk.message.content for chunk in client.chat(**body, stream=True)
    )
    with pytest.raises(ollama.ResponseError, match="kvkeep pull"):
        client.pull("other")
