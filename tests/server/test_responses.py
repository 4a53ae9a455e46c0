"""Responses by OpenAI's own client: kept, gone on from, and forgotten."""

import json
import time
from typing import Any

import httpx
import openai
import pytest
from server.conftest import Running

QUESTION = "What is the capital of France? One word."


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def made(client: openai.OpenAI, given: Any = QUESTION, **asked: Any) -> Any:
    asked = {"temperature": 0, "max_output_tokens": 12, **asked}
    return client.responses.create(model="smollm2", input=given, **asked)


def said_by_chat(client: openai.OpenAI, messages: list[dict[str, str]]) -> str | None:
    asked: Any = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**asked).choices[0].message.content  # type: ignore[no-any-return]


def test_a_response_says_what_a_chat_does(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "Be brief."}
    expected = said_by_chat(client, [system, {"role": "user", "content": QUESTION}])
    parts = [{"type": "input_text", "text": QUESTION}]
    for given in (
        QUESTION,
        [{"role": "user", "content": QUESTION}],
        [{"role": "user", "content": parts}],
    ):
        found = made(client, given, instructions="Be brief.")
        assert found.output_text == expected
        assert found.status in ("completed", "incomplete")
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens


def test_others_go_on_from_it_and_it_stays_as_it_is(client: openai.OpenAI) -> None:
    first = made(client, max_output_tokens=40)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
    ]
    found = {}
    for question in ("And of Italy?", "And of Spain?", "And of Italy?"):
        after = made(client, question, previous_response_id=first.id)
        expected = said_by_chat(client, [*turns, {"role": "user", "content": question}])
        assert found.setdefault(question, after.output_text) == after.output_text == expected
        held = first.usage.input_tokens + first.usage.output_tokens
        assert after.usage.input_tokens_details.cached_tokens == held
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        made(client, "And?", previous_response_id=first.id)
    assert client.responses.retrieve(after.id).output_text == after.output_text
    third = made(client, "Thanks.", previous_response_id=after.id)
    assert third.previous_response_id == after.id


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = made(client)
    events = list(made(client, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert client.responses.retrieve(events[0].response.id).output_text == whole.output_text


def test_what_is_not_stored_is_not_there(client: openai.OpenAI, server: Running) -> None:
    found = made(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)
    names = [kept.name for kept in server.service.engine.sessions().result()]
    assert found.id not in names


def test_it_is_json_or_a_call_where_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "city", "schema": schema}}
    assert set(json.loads(made(client, text=form, max_output_tokens=60).output_text)) == {"city"}
    tool = {"type": "function", "name": "weather", "parameters": schema}
    asked = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
    (call,) = made(client, "How is the weather in Rome?", **asked).output
    assert (call.type, call.name) == ("function_call", "weather")
    streamed = list(made(client, "How is the weather in Rome?", stream=True, **asked))
    assert streamed[-1].response.output[0].arguments == call.arguments
    first = made(client, "How is the weather in Rome?", **asked)
    result = {
        "type": "function_call_output",
        "call_id": first.output[0].call_id,
        "output": "It rains.",
    }
    assert made(client, [result], previous_response_id=first.id, tools=[tool]).output


def test_nothing_may_be_forgotten_where_that_is_asked_for(client: openai.OpenAI) -> None:
    long = "word " * 3000
    with pytest.raises(openai.BadRequestError) as refused:
        made(client, long, truncation="disabled")
    assert refused.value.body["n_ctx"] == 2048  # type: ignore[index]
    assert made(client, long, truncation="auto").output


def test_cancelled_or_left_it_is_no_longer_worked_at(
    client: openai.OpenAI, server: Running
) -> None:
    engine = server.service.engine
    stream = made(client, "Count for ever.", stream=True, max_output_tokens=100_000)
    first = next(iter(stream)).response.id
    assert client.responses.cancel(first).status == "cancelled"
    stream.close()
    other = made(client, "Count for ever.", stream=True, max_output_tokens=100_000)
    second = next(iter(other)).response.id
    other.close()
    while engine.totals().result().running:
        time.sleep(0.01)
    while {first, second} & {kept.name for kept in engine.sessions().result()}:
        time.sleep(0.01)
    assert not server.service.pending_responses


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": [{"type": "image"}]},
        {"input": 5},
        {"previous_response_id": "../x"},
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "xml"}}},
        {"tools": [{"type": "web_search"}]},
        {"truncation": "some"},
    ],
    ids=repr,
)
def test_what_is_malformed_is_refused(server: Running, body: dict[str, Any]) -> None:
    before = len(server.service.engine.sessions().result())
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": QUESTION, **body})
    assert answer.status_code == 400, answer.text
    assert len(server.service.engine.sessions().result()) == before
