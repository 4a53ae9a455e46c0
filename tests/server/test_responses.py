"""Responses by OpenAI's client: stored, continued, and deleted."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server.conftest import RunningServer, running_server

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


def test_metadata_come_back_with_any_key(client: openai.OpenAI) -> None:
    metadata = {"_sa_instance_state": "1", "_sa": "2", "a": "3"}
    created = create(client, metadata=metadata)
    assert created.metadata == metadata
    assert client.responses.retrieve(created.id).metadata == metadata


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


@pytest.mark.parametrize("ending", ["not stored", "hung up"])
def test_the_next_prompt_reuses_the_cells_of_a_response_that_is_not_kept(
    client: openai.OpenAI, server: RunningServer, ending: str
) -> None:
    question = {"role": "user", "content": f"Count to 50. ({ending}) " + "one two three " * 60}
    if ending == "not stored":
        first = create(client, [question], store=False)
        turns, reused_at_least = [question, *first.output], first.usage.total_tokens - 1
    else:
        stream = create(client, [question], stream=True, max_output_tokens=1000)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
        while server.service.engine.totals().result().running:
            time.sleep(0.01)
        turns, reused_at_least = [question], 128
    after = create(client, [*turns, {"role": "user", "content": "Thanks."}], store=False)
    assert after.usage.input_tokens_details.cached_tokens >= reused_at_least


def test_input_items_are_listed_in_pages_and_can_be_referred_to(client: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    question = {"type": "input_text", "text": QUESTION}
    first = create(client, [{"role": "user", "content": [image, question]}])
    second = create(client, "And of Italy?", previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    assert items[0].content[0].image_url == ""  # type: ignore[union-attr]
    assert items[1].id == first.output[0].id
    page = client.responses.input_items.list(second.id, order="asc", limit=1, after=items[0].id)
    assert (page.data, page.has_more) == ([items[1]], True)
    newest = client.responses.input_items.list(second.id).data
    assert newest == items[::-1]
    references = [{"type": "item_reference", "id": item.id} for item in items]
    assert create(client, references).output_text == second.output_text


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    whole = create(client, include=include, top_logprobs=2).output[0].content[0]
    assert "".join(token.token for token in whole.logprobs).startswith(whole.text)
    assert all(len(token.top_logprobs) == 2 for token in whole.logprobs)
    events = list(create(client, include=include, top_logprobs=2, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [token.token for event in deltas for token in event.logprobs]
    assert streamed == [token.token for token in whole.logprobs]


def test_hosted_tools_are_skipped(client: openai.OpenAI) -> None:
    expected = create(client)
    tools: Any = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}]
    assert create(client, tools=tools).output_text == expected.output_text


def test_calls_of_a_namespace_are_given_back_in_it(client: openai.OpenAI) -> None:
    member = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    tools: Any = [{"type": "namespace", "name": "sky", "description": "", "tools": [member]}]
    params = {"tools": tools, "tool_choice": "required", "max_output_tokens": 60}
    (call,) = create(client, "How is the weather?", **params).output
    assert (call.name, call.namespace) == ("weather", "sky")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    assert create(client, [{"role": "user", "content": "?"}, call, result], tools=tools).output


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
def test_truncation_disabled_refuses_a_prompt_that_does_not_fit(
    smollm2: Model, tmp_path: Path
) -> None:
    long = "word " * 200
    with running_server(smollm2, tmp_path, settings={"max_kv_size": 128}) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, long, truncation="disabled")
        assert refused.value.body["n_ctx"] == 128  # type: ignore[index]
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
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "xml"}}},
        {"tools": [{"type": "namespace"}]},
        {"tool_choice": "required"},
        {"input": [{"type": "item_reference", "id": "msg_0"}]},
        {"truncation": "some"},
        {"metadata": {"a": "\ud800"}},
        {"input": [{"role": "user", "content": "\ud800"}]},
    ],
    ids=repr,
)
def test_malformed_requests_are_refused(server: RunningServer, body: dict[str, Any]) -> None:
    before = len(server.service.engine.sessions().result())
    content = json.dumps({"input": QUESTION, **body})  # httpx's own encoder refuses surrogates
    reply = httpx.post(f"{server.url}/v1/responses", content=content)
    assert reply.status_code == 400, reply.text
    assert len(server.service.engine.sessions().result()) == before


@pytest.mark.parametrize(
    "response_id",
    ["resp_" + "0" * 24, "resp_67ccd2bed1ec8190b14f964abc0542670b", "notes", "x" * 900],
)
def test_an_id_of_no_response_is_not_found(server: RunningServer, response_id: str) -> None:
    """Also that of a session which is none, and that of a response of the hosted API."""
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "notes"})
        body = {"input": QUESTION, "max_output_tokens": 1, "previous_response_id": response_id}
        path = f"/v1/responses/{response_id}"
        responses = [
            *(
                client.post(route, json=body)
                for route in ("/v1/responses", "/v1/responses/compact")
            ),
            *(client.get(f"{path}{part}") for part in ("", "/input_items")),
            client.post(f"{path}/cancel"),
            client.delete(path),
        ]
        for response in responses:
            assert response.status_code == 404, response.text
            assert response.json()["error"]["message"].startswith("there is no response ")
            assert len(response.text) < 300
        assert client.delete("/v1/sessions/notes").status_code == 200
