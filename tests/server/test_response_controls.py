"""Items of the Responses API that are no messages: added tools, configurations, compactions."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import RunningServer, ScriptedServer

QUESTION = {"role": "user", "content": "List the files."}
WAIT = {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}}
EXEC = {"type": "custom", "name": "exec", "description": "Run JavaScript"}
NAMESPACE = {"type": "namespace", "name": "functions", "tools": [EXEC, WAIT]}
CALL = '<tool_call>\n{"name": "exec", "arguments": {"input": "ls()"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHORT: dict[str, Any] = {"max_output_tokens": 40, "reasoning": {"effort": "high"}}
JSON_FORMAT = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}


def added(*tools: Any) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "id": "at_1", "tools": list(tools)}


@pytest.fixture
def client(scripted: ScriptedServer) -> Any:
    scripted.write("OK.")
    with scripted.client() as client:
        yield client


def respond(client: httpx.Client, *items: Any, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"input": list(items), **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def num_tokens(client: httpx.Client, *items: Any, **fields: Any) -> int:
    body = {"input": list(items), **fields}
    return int(client.post("/v1/responses/input_tokens", json=body).json()["input_tokens"])


def test_tools_of_items_are_offered_and_called(
    scripted: ScriptedServer, client: httpx.Client
) -> None:
    scripted.write(CALL)
    tools = num_tokens(client, QUESTION, tools=[NAMESPACE])
    assert num_tokens(client, added(NAMESPACE), QUESTION) == tools > num_tokens(client, QUESTION)
    for choice in ("auto", "required"):
        answer = respond(client, added(NAMESPACE), QUESTION, tool_choice=choice)
        (call,) = answer["output"]
        assert (call["type"], call["name"], call["namespace"]) == (
            "custom_tool_call",
            "exec",
            "functions",
        )
        assert call["input"] == "ls()"
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "a.txt"}
    again = respond(client, result, previous_response_id=answer["id"])
    assert again["output"][0]["type"] == "custom_tool_call"
    in_between = respond(client, QUESTION, {"role": "assistant", "content": "Yes?"}, added(EXEC))
    assert in_between["output"][0]["type"] == "custom_tool_call"


def test_tools_that_the_client_runs_have_their_own_items(
    scripted: ScriptedServer, client: httpx.Client
) -> None:
    call = {"name": "local_shell", "arguments": {"command": ["ls"]}}
    scripted.write(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    answer = respond(client, added({"type": "local_shell"}), QUESTION)
    assert answer["output"][0]["type"] == "local_shell_call"


def test_added_tools_and_configurations_survive_a_compaction(
    scripted: ScriptedServer, client: httpx.Client
) -> None:
    body = {"input": [added(NAMESPACE), {"type": "configuration_update", "text": JSON_FORMAT}]}
    body["input"].append(QUESTION)
    response = client.post("/v1/responses/compact", json=body)
    output = response.json()["output"]
    assert num_tokens(client, *output) == num_tokens(client, QUESTION, tools=[NAMESPACE])
    only_wait = added({**NAMESPACE, "tools": [WAIT]})  # the client's newest list counts
    assert num_tokens(client, only_wait, *output) == num_tokens(client, only_wait, QUESTION)
    assert respond(client, *output)["text"] == JSON_FORMAT
    scripted.write(CALL)
    assert respond(client, *output)["output"][0]["type"] == "custom_tool_call"


def test_unknown_types_of_items_and_parts_are_named(client: httpx.Client) -> None:
    parts = [{"type": "input_text", "text": "Hi"}, {"type": "hologram", "data": "x"}]
    items = [{"type": "from_the_future", "role": "developer"}, {"role": "user", "content": parts}]
    items.append({"type": "web_search_call", "id": "ws_1", "status": "completed"})
    response = client.post("/v1/responses", json={"input": items})
    ignored = response.headers["X-Kvkeep-Ignored"].split(", ")
    assert ignored == ["input.from_the_future", "input.content.hologram"]
    counted = num_tokens(client, {"role": "user", "content": [*parts[:1], "[hologram omitted]"]})
    assert response.json()["usage"]["input_tokens"] == counted  # and no empty system message
    hosted = [added({"type": "web_search"}), QUESTION]
    response = client.post("/v1/responses", json={"input": hosted})
    assert response.headers["X-Kvkeep-Ignored"] == "tools.web_search"
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, parts[1]]}]
    response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert response.headers["X-Kvkeep-Ignored"] == "messages.content.hologram"


def test_the_newest_configuration_counts(server: RunningServer) -> None:
    with server.client() as client:
        check_configurations(client)


def check_configurations(client: httpx.Client) -> None:
    update = {"type": "configuration_update", "text": JSON_FORMAT, "reasoning": {"effort": "low"}}
    answer = respond(client, QUESTION, update, QUESTION, **SHORT)
    assert answer["text"] == JSON_FORMAT
    assert answer["reasoning"]["effort"] == "low"
    assert isinstance(json.loads(answer["output"][0]["content"][0]["text"])["a"], int)
    later = respond(client, QUESTION, previous_response_id=answer["id"], **SHORT)
    assert later["text"] == JSON_FORMAT
    plain = {"type": "configuration_update", "text": {"format": {"type": "text"}}}
    last = respond(client, plain, QUESTION, previous_response_id=later["id"], **SHORT)
    assert last["text"] == plain["text"]
    assert last["reasoning"]["effort"] == "low"
    update = {**update, "text": {"format": {"type": "text"}, "verbosity": "low"}}
    response = client.post("/v1/responses", json={"input": [update, QUESTION], **SHORT})
    ignored = response.headers["X-Kvkeep-Ignored"]
    assert ignored == "input.configuration_update.text.verbosity"
    update = {"type": "configuration_update", "text": {"format": "json"}}
    refused = client.post("/v1/responses", json={"input": [update, QUESTION], **SHORT})
    assert refused.status_code == 400


@pytest.mark.parametrize("store", [True, False])
def test_a_trigger_compacts_the_conversation(
    scripted: ScriptedServer, client: httpx.Client, store: bool
) -> None:
    sdk = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    items: list[Any] = [added(EXEC), QUESTION, {"role": "assistant", "content": "I see a.txt."}]
    trigger = {"type": "compaction_trigger"}
    whole = sdk.responses.create(input=[*items, trigger], store=store)
    stream = [*sdk.responses.create(input=[*items, trigger], store=store, stream=True)]
    assert [event.type.removeprefix("response.") for event in stream] == [
        "created",
        "in_progress",
        "output_item.added",
        "output_item.done",
        "completed",
    ]
    for response in (whole, stream[-1].response):
        assert [item.type for item in response.output] == ["compaction"]
        assert (response.status, response.usage.output_tokens > 0) == ("completed", True)
        item = response.output[0].model_dump(exclude_none=True)
        next_items = [item, QUESTION]
        assert num_tokens(client, *next_items) == num_tokens(client, *items, QUESTION)
        answer = respond(client, *next_items, store=False)
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] > 100
        found = client.get(f"/v1/responses/{response.id}")
        assert found.status_code == (200 if store else 404)
        if store:
            fields = {"previous_response_id": response.id, "store": False}
            later = respond(client, QUESTION, **fields)
            assert later["usage"]["input_tokens"] == answer["usage"]["input_tokens"]
            listed = client.get(f"/v1/responses/{response.id}/input_items").json()["data"]
            assert [entry["type"] for entry in listed] == ["message", "message", "additional_tools"]


def test_a_trigger_is_the_last_item(client: httpx.Client) -> None:
    trigger = {"type": "compaction_trigger"}
    response = client.post("/v1/responses", json={"input": [trigger, QUESTION]})
    assert response.headers["X-Kvkeep-Ignored"] == "input.compaction_trigger"
    assert response.json()["output"][0]["type"] == "message"
    alone = client.post("/v1/responses", json={"input": [trigger]})
    assert alone.status_code == 400


def test_compacted_messages_and_usage_have_the_fields_of_an_output(
    scripted: ScriptedServer,
) -> None:
    sdk = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    compacted = sdk.responses.compact(model="x", input=[QUESTION])
    message, item = compacted.output
    assert (message.type, message.status, item.type) == ("message", "completed", "compaction")
    assert message.id.startswith("msg_")
    assert message.content[0].text == QUESTION["content"]
    assert compacted.usage.input_tokens_details.cache_write_tokens == 0
