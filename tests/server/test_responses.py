"""Responses by OpenAI's client: stored, continued, and deleted."""

import json
import time
from typing import Any

import httpx
import openai
import pytest
from server.conftest import RunningServer

from kvkeep.model import Model

QUESTION = "What is the capital of France? One word."


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def create(client: openai.OpenAI, prompt: Any = QUESTION, **params: Any) -> Any:
    params = {"temperature": 0, "max_output_tokens": 12, **params}
    return client.responses.create(model="smollm2", input=prompt, **params)


def chat_text(client: openai.OpenAI, messages: list[dict[str, str]]) -> str | None:
    params: Any = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**params).choices[0].message.content  # type: ignore[no-any-return]


def test_a_response_equals_a_chat_completion(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "Be brief."}
    expected = chat_text(client, [system, {"role": "user", "content": QUESTION}])
    parts = [{"type": "input_text", "text": QUESTION}]
    for prompt in (
        QUESTION,
        [{"role": "user", "content": QUESTION}],
        [{"role": "user", "content": parts}],
    ):
        created = create(client, prompt, instructions="Be brief.")
        assert created.output_text == expected
        assert created.status in ("completed", "incomplete")
        assert (
            created.usage.total_tokens == created.usage.input_tokens + created.usage.output_tokens
        )


def test_responses_that_continue_another_leave_it_unchanged(client: openai.OpenAI) -> None:
    first = create(client, max_output_tokens=40)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
    ]
    created = {}
    for question in ("And of Italy?", "And of Spain?", "And of Italy?"):
        after = create(client, question, previous_response_id=first.id)
        expected = chat_text(client, [*turns, {"role": "user", "content": question}])
        assert created.setdefault(question, after.output_text) == after.output_text == expected
        held = first.usage.input_tokens + first.usage.output_tokens
        assert after.usage.input_tokens_details.cached_tokens == held
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        create(client, "And?", previous_response_id=first.id)
    assert client.responses.retrieve(after.id).output_text == after.output_text
    third = create(client, "Thanks.", previous_response_id=after.id)
    assert third.previous_response_id == after.id


def test_a_stream_equals_the_whole_response(client: openai.OpenAI) -> None:
    expected = create(client)
    events = list(create(client, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.output_text
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == expected.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert client.responses.retrieve(events[0].response.id).output_text == expected.output_text


def test_a_response_with_store_false_is_not_found(
    client: openai.OpenAI, server: RunningServer
) -> None:
    created = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)
    names = [stored.name for stored in server.service.engine.sessions().result()]
    assert created.id not in names


def test_json_schema_and_required_tool_are_followed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "city", "schema": schema}}
    assert set(json.loads(create(client, text=form, max_output_tokens=60).output_text)) == {"city"}
    tool = {"type": "function", "name": "weather", "parameters": schema}
    params = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
    (call,) = create(client, "How is the weather in Rome?", **params).output
    assert (call.type, call.name) == ("function_call", "weather")
    streamed = list(create(client, "How is the weather in Rome?", stream=True, **params))
    assert streamed[-1].response.output[0].arguments == call.arguments
    first = create(client, "How is the weather in Rome?", **params)
    result = {
        "type": "function_call_output",
        "call_id": first.output[0].call_id,
        "output": "It rains.",
    }
    assert create(client, [result], previous_response_id=first.id, tools=[tool]).output


@pytest.mark.extended
def test_truncation_disabled_refuses_a_prompt_that_does_not_fit(client: openai.OpenAI) -> None:
    long = "word " * 3000
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, long, truncation="disabled")
    assert refused.value.body["n_ctx"] == 2048  # type: ignore[index]
    assert create(client, long, truncation="auto").output


def test_cancelling_or_disconnecting_ends_the_generation(
    client: openai.OpenAI, server: RunningServer, smollm2: Model
) -> None:
    engine = server.service.engine
    endless = {"logit_bias": {str(token): -1e6 for token in smollm2.end_token_ids}}
    params = {"stream": True, "max_output_tokens": 100_000, "extra_body": endless}
    stream = create(client, "Count for ever.", **params)
    first = next(iter(stream)).response.id
    assert client.responses.cancel(first).status == "cancelled"
    stream.close()
    other = create(client, "Count for ever.", **params)
    second = next(iter(other)).response.id
    other.close()
    while engine.totals().result().running:
        time.sleep(0.01)
    while {first, second} & {stored.name for stored in engine.sessions().result()}:
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
def test_malformed_requests_are_refused(server: RunningServer, body: dict[str, Any]) -> None:
    before = len(server.service.engine.sessions().result())
    reply = httpx.post(f"{server.url}/v1/responses", json={"input": QUESTION, **body})
    assert reply.status_code == 400, reply.text
    assert len(server.service.engine.sessions().result()) == before
