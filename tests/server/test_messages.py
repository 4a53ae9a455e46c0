"""Messages by Anthropic's own client."""

import asyncio
import time
from typing import Any

import anthropic
import httpx
import pytest
from server.conftest import Running

from kvkeep.model import Model

QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]
TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def said(client: anthropic.Anthropic, messages: Any = QUESTION, **asked: Any) -> Any:
    asked = {"max_tokens": 12, **asked}
    given = {"temperature": 0, **asked.pop("extra", {})}
    return client.messages.create(model="smollm2", messages=messages, extra_body=given, **asked)


def test_a_message_is_what_a_session_says(client: anthropic.Anthropic, smollm2: Model) -> None:
    session = smollm2.session(2048, prefill_step=128)
    session.feed(smollm2.text.chat([{"role": "system", "content": "Be brief."}, *QUESTION]))
    expected = "".join(session.stream(12))
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        found = said(client, system=system)
        assert found.content[0].text == expected
        assert found.stop_reason in ("end_turn", "max_tokens")
        read = found.usage.input_tokens + found.usage.cache_read_input_tokens
        count = client.messages.count_tokens(model="a", messages=QUESTION, system=system)
        assert count.input_tokens == read


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = said(client)
    with client.messages.stream(
        model="smollm2", messages=QUESTION, max_tokens=12, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    text = said(client).content[0].text
    stop = text[len(text) // 2 :][:3]
    found = said(client, stop_sequences=[stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_that_must_be_used_is(
    client: anthropic.Anthropic, streamed: bool, choice: Any
) -> None:
    asked: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 100,
        "extra_body": {"temperature": 0},
    }
    if streamed:
        with client.messages.stream(**asked) as stream:
            found: Any = stream.get_final_message()
    else:
        found = client.messages.create(**asked)
    (block,) = found.content
    assert (block.type, block.name, found.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"city"}
    again = [
        *asked["messages"],
        {"role": "assistant", "content": [block.model_dump()]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "It rains."}],
        },
    ]
    assert said(client, again, tools=[TOOL]).content


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"max_tokens": 0},
        {"max_tokens": None},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"temperature": 9},
        {"tools": [{"name": "no good name"}]},
        {"tool_choice": {"type": "tool", "name": "a"}},
        {"system": {"a": 1}},
    ],
    ids=repr,
)
def test_what_is_malformed_is_refused_in_its_form(server: Running, body: dict[str, Any]) -> None:
    asked = {"model": "a", "messages": QUESTION, "max_tokens": 5, **body}
    answer = httpx.post(f"{server.url}/v1/messages", json=asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_clients_errors_are_its_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="role"):
        said(client, [{"role": "robot", "content": "a"}])


def test_who_goes_away_is_no_longer_worked_for(
    client: anthropic.Anthropic, server: Running
) -> None:
    engine = server.service.engine
    with client.messages.stream(
        model="smollm2",
        messages=[{"role": "user", "content": "Tell me a very long story."}],
        max_tokens=2000,
        extra_body={"temperature": 0, "ignore_eos": True},
    ) as stream:
        assert next(iter(stream.text_stream))
        assert engine.totals().result().running == 1
    while engine.totals().result().running:
        time.sleep(0.01)


def test_the_assistants_last_message_goes_on(client: anthropic.Anthropic) -> None:
    """As this API has it; and what it thought is taken, as in a history with tools."""
    begun = {"role": "assistant", "content": "The capital of France is"}
    assert said(client, [*QUESTION, begun]).content[0].text.startswith(" Paris")
    thought = [
        {"type": "thinking", "thinking": "It is Paris.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Paris."},
    ]
    history = [*QUESTION, {"role": "assistant", "content": thought}]
    more = {"role": "user", "content": "And of Italy?"}
    assert "Rome" in said(client, [*history, more]).content[0].text


def test_the_asynchronous_client(server: Running) -> None:
    async def talk() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            asked: dict[str, Any] = {"model": "x", "messages": QUESTION, "max_tokens": 12}
            asked["extra_body"] = {"temperature": 0}
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                text = "".join([each async for each in stream.text_stream])
            return whole.content[0].text, text

    one, other = asyncio.run(talk())
    assert one == other
