"""Responses with reasoning and calls, as OpenAI's client reads them."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from server.conftest import RunningServer, ScriptedServer

from kvkeep.model import Model

QUESTION = {"role": "user", "content": "How is the weather in Rome?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
PATCH = {"type": "custom", "name": "patch", "description": "Apply a patch."}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PATCH_CALL = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n+a"}}\n</tool_call>'
)
THOUGHTFUL = f"<think>\nThey want Rome.\n</think>\n\nLet me see.\n{CALL}"


@pytest.fixture(scope="module")
def client(scripted: ScriptedServer) -> openai.OpenAI:
    """Return a client whose model writes what `scripted` says."""
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


def params(**fields: Any) -> dict[str, Any]:
    tools = [WEATHER, PATCH]
    return {"model": "smollm2", "input": [QUESTION], "tools": tools, "store": False, **fields}


def without_ids(items: list[Any]) -> list[dict[str, Any]]:
    """The items without what differs from response to response, and what the client adds."""
    left_out = {"id", "call_id", "parsed_arguments"}
    dumped = [item.model_dump(exclude=left_out) for item in items]
    for item in dumped:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return dumped


def test_the_client_accumulates_the_whole_response(
    client: openai.OpenAI, scripted: ScriptedServer
) -> None:
    scripted.write(THOUGHTFUL)
    whole = client.responses.create(**params())
    with client.responses.stream(**params()) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = whole.output
    assert "They want Rome." in reasoning.content[0].text
    assert "Let me see." in message.content[0].text
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert without_ids(final.output) == without_ids(whole.output)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for kind, text in (
        ("response.reasoning_text.delta", reasoning.content[0].text),
        ("response.output_text.delta", message.content[0].text),
        ("response.function_call_arguments.delta", call.arguments),
    ):
        deltas = [event.delta for event in events if event.type == kind]
        assert "".join(deltas) == text
        assert len(deltas) > 1
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert final.usage == whole.usage.model_copy(
        update={"input_tokens_details": final.usage.input_tokens_details}
    )


def test_reasoning_is_a_summary_for_clients_that_ask_for_one(
    client: openai.OpenAI, scripted: ScriptedServer
) -> None:
    scripted.write(THOUGHTFUL)
    created = client.responses.create(**params(reasoning={"summary": "auto"}))
    events = list(client.responses.create(**params(reasoning={"summary": "auto"}, stream=True)))
    text = created.output[0].summary[0].text
    kind = "response.reasoning_summary_text.delta"
    assert "".join(event.delta for event in events if event.type == kind) == text
    assert "They want Rome." in text


@pytest.mark.parametrize(
    "fields", [{"reasoning": {"max_tokens": 2}}, {"extra_body": {"reasoning_budget": 2}}], ids=str
)
def test_a_budget_limits_the_reasoning(server: RunningServer, fields: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    begun = {"role": "assistant", "content": "<think>"}
    body = params(input=[QUESTION, begun], tools=[], max_output_tokens=12, **fields)
    created = client.responses.create(**body)
    assert [item.type for item in created.output] == ["reasoning", "message"]
    assert 0 < created.usage.output_tokens_details.reasoning_tokens <= 2


def test_the_second_turn_reuses_all_cells_of_the_first(
    client: openai.OpenAI, scripted: ScriptedServer
) -> None:
    scripted.write(f"Let me see.\n{CALL}")
    first = client.responses.create(**params())
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    items = [QUESTION, *(item.model_dump() for item in first.output), result]
    scripted.write("It rains.")
    second = client.responses.create(**params(input=items))
    assert second.output_text == "It rains."
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens


def test_a_custom_tool_is_called_with_text(client: openai.OpenAI, scripted: ScriptedServer) -> None:
    scripted.write(PATCH_CALL)
    with client.responses.stream(**params()) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** Begin\n+a")
    assert {
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    } <= kinds


def test_a_call_that_is_cut_off_is_incomplete(
    client: openai.OpenAI, scripted: ScriptedServer
) -> None:
    scripted.write(CALL)
    created = client.responses.create(**params(max_output_tokens=16))
    events = list(client.responses.create(**params(max_output_tokens=16, stream=True)))
    assert created.status == "incomplete"
    assert created.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in created.output] == ["incomplete"]
    assert events[-1].type == "response.incomplete"
    assert without_ids(events[-1].response.output) == without_ids(created.output)


def test_a_response_that_ends_inside_a_call_is_incomplete(
    client: openai.OpenAI, scripted: ScriptedServer
) -> None:
    scripted.write(CALL[: CALL.index("ome")])
    created = client.responses.create(**params())
    events = list(client.responses.create(**params(stream=True)))
    for response in (created, events[-1].response):
        (call,) = response.output
        assert (response.status, call.status) == ("incomplete", "incomplete")
        assert call.arguments == '{"city": "R'
        assert response.incomplete_details is None
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    "text", [THOUGHTFUL, PATCH_CALL, ""], ids=["thoughtful", "custom", "empty"]
)
def test_a_response_has_all_that_the_library_requires(scripted: ScriptedServer, text: str) -> None:
    """Its client accepts any object; its models, by which other programs read, do not."""
    scripted.write(text)
    with scripted.client() as http:
        response = http.post("/v1/responses", json=params())
    usage = Response.model_validate_json(response.content).usage
    assert usage is not None
    assert usage.input_tokens_details.cache_write_tokens == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_without_parallel_calls_the_generation_ends_with_the_first(
    client: openai.OpenAI, smollm2: Model, scripted: ScriptedServer, streamed: bool
) -> None:
    scripted.write(CALL * 9)
    fields = params(parallel_tool_calls=False)
    if streamed:
        with client.responses.stream(**fields) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**fields)
    assert [item.type for item in response.output] == ["function_call"]
    assert response.status == "completed"
    assert response.usage.output_tokens < 2 * len(smollm2.text.encode(CALL))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_limit_at_the_end_of_the_only_call_leaves_it_whole(
    client: openai.OpenAI, smollm2: Model, scripted: ScriptedServer, streamed: bool
) -> None:
    scripted.write(CALL)
    ids = smollm2.text.encode(CALL)
    limit = next(n for n in range(len(ids)) if "}" in smollm2.text.decode(ids[:n]))
    fields = params(parallel_tool_calls=False, max_output_tokens=limit)
    if streamed:
        with client.responses.stream(**fields) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**fields)
    (call,) = response.output
    assert (call.status, call.arguments) == ("completed", '{"city": "Rome"}')
    assert response.status == "completed"
    assert response.incomplete_details is None


def test_calls_of_stored_responses_are_continued(
    client: openai.OpenAI, scripted: ScriptedServer
) -> None:
    scripted.write(THOUGHTFUL)
    first = client.responses.create(**params(store=True))
    result = {
        "type": "function_call_output",
        "call_id": first.output[-1].call_id,
        "output": [{"type": "input_text", "text": "Rain."}],
    }
    continued = params(input=[result], previous_response_id=first.id, store=True)
    scripted.write("It rains.")
    second = client.responses.create(**continued)
    items = client.responses.input_items.list(second.id, order="asc").data
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [item.type for item in items] == kinds
    assert second.output_text == "It rains."
