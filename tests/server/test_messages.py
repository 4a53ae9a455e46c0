"""Messages by Anthropic's client."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import anthropic
import pydantic
import pytest
from chat.written_answers import FORMS, marked
from server.conftest import RunningServer, ScriptedServer, running_server

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
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def writer(scripted: ScriptedServer) -> anthropic.Anthropic:
    """Return a client whose model writes what `scripted` says."""
    return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


def create_message(client: anthropic.Anthropic, messages: Any = QUESTION, **params: Any) -> Any:
    params = {"max_tokens": 12, **params}
    options = {"temperature": 0, **params.pop("extra", {})}
    return client.messages.create(model="smollm2", messages=messages, extra_body=options, **params)


def test_a_message_equals_a_session_in_python(client: anthropic.Anthropic, smollm2: Model) -> None:
    session = smollm2.session(2048, prefill_step=128)
    session.feed(smollm2.text.chat([{"role": "system", "content": "Be brief."}, *QUESTION]))
    expected = "".join(session.stream(12))
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        output = create_message(client, system=system)
        assert output.content[0].text == expected
        assert output.stop_reason in ("end_turn", "max_tokens")
        read = output.usage.input_tokens + output.usage.cache_read_input_tokens
        count = client.messages.count_tokens(model="a", messages=QUESTION, system=system)
        assert count.input_tokens == read


def test_a_stream_equals_the_whole_response(client: anthropic.Anthropic) -> None:
    expected = create_message(client)
    with client.messages.stream(
        model="smollm2", messages=QUESTION, max_tokens=12, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == expected.content[0].text == final.content[0].text
    assert final.usage.output_tokens == expected.usage.output_tokens
    assert final.stop_reason == expected.stop_reason


def test_a_stop_sequence_is_reported(client: anthropic.Anthropic) -> None:
    text = create_message(client).content[0].text
    stop = text[len(text) // 2 :][:3]
    output = create_message(client, stop_sequences=[stop])
    assert (output.stop_reason, output.stop_sequence) == ("stop_sequence", stop)
    assert output.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_required_tool_is_used(client: anthropic.Anthropic, streamed: bool, choice: Any) -> None:
    params: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 100,
        "extra_body": {"temperature": 0},
    }
    if streamed:
        with client.messages.stream(**params) as stream:
            output: Any = stream.get_final_message()
    else:
        output = client.messages.create(**params)
    (block,) = output.content
    assert (block.type, block.name, output.stop_reason) == ("tool_use", "weather", "tool_use")
    assert set(block.input) == {"city"}
    again = [
        *params["messages"],
        {"role": "assistant", "content": [block.model_dump()]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "It rains."}],
        },
    ]
    assert create_message(client, again, tools=[TOOL]).content


def test_blocks_that_a_client_sends_back_are_accepted(client: anthropic.Anthropic) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    text_file = {"type": "text", "media_type": "text/plain", "data": "The capital is Paris."}
    history = [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": image},
                {"type": "document", "title": "France", "source": text_file},
                {"type": "text", "text": "Which city?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "?", "signature": ""}]},
        {"role": "user", "content": ""},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "a", "content": []},
                {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": [
                        {"type": "image", "source": image},
                        {"type": "tool_reference", "tool_name": "weather"},
                    ],
                }
            ],
        },
    ]
    assert create_message(client, history).usage.output_tokens
    assert create_message(client, history, tools=[TOOL]).usage.output_tokens


def test_an_output_format_constrains_the_answer(client: anthropic.Anthropic) -> None:
    class City(pydantic.BaseModel):
        city: Annotated[str, pydantic.Field(max_length=10)]

    parsed = client.messages.parse(
        model="smollm2",
        messages=QUESTION,
        max_tokens=60,
        output_format=City,
        extra_body={"temperature": 0},
    )
    assert parsed.parsed_output
    assert parsed.parsed_output.city
    schema = TOOL["input_schema"]
    output = create_message(
        client, max_tokens=60, extra={"output_format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(output.content[0].text).keys() == {"city"}


@pytest.mark.parametrize("streamed", [False, True])
def test_without_tokens_to_generate_the_prompt_is_prepared(
    server: RunningServer, streamed: bool
) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    text = f"{'Streamed' if streamed else 'Whole'} one two three four five six seven. " * 40
    system = [{"type": "text", "text": text, **mark}]
    body = {"model": "a", "messages": QUESTION, "system": system, "stream": streamed}
    with server.client() as client:
        earlier_pins = {pin["id"] for pin in client.get("/v1/prefix/pins").json()["data"]}
        response = client.post("/v1/messages", json={**body, "max_tokens": 0})
        assert response.status_code == 200, response.text
        assert "content_block" not in response.text
        documents = [line.removeprefix("data: ") for line in response.text.splitlines()]
        events = [json.loads(document) for document in documents if document[:1] == "{"]
        usages = [event["usage"] for event in events if "usage" in event]
        answer = {**body, "stream": False, "max_tokens": 2}
        reused = client.post("/v1/messages", json=answer).json()["usage"]
        pins = client.get("/v1/prefix/pins").json()["data"]
        (pin,) = (pin for pin in pins if pin["id"] not in earlier_pins)
        client.delete(f"/v1/prefix/pins/{pin['id']}").raise_for_status()
    reason = [event.get("delta", event).get("stop_reason") for event in events]
    assert reason[-2 if streamed else 0] == "max_tokens"
    assert streamed or events[0]["content"] == []
    assert usages[-1]["output_tokens"] == 0
    assert usages[-1]["cache_creation_input_tokens"] > 300
    assert reused["cache_read_input_tokens"] >= usages[-1]["cache_creation_input_tokens"]
    assert pin["tokens"] >= usages[-1]["cache_creation_input_tokens"]


def test_usage_counts_what_was_reused(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "One two three four five six seven. " * 40}]
    first, second = (create_message(client, messages).usage for _ in range(2))
    assert second.cache_read_input_tokens > 0
    assert (
        first.input_tokens + first.cache_read_input_tokens
        == second.input_tokens + second.cache_read_input_tokens
    )


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(
    smollm2: Model, tmp_path: Path
) -> None:
    """Clients such as Claude Code compact the conversation when they read these words."""
    settings = {"max_kv_size": 64, "policy": "full"}
    with running_server(smollm2, tmp_path, settings=settings) as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
        long_messages = [{"role": "user", "content": "One two three. " * 40}]
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 64 maximum"
        ) as caught:
            create_message(client, long_messages)
        assert caught.value.type == "invalid_request_error"
        short = [{"role": "user", "content": "Tell me a very long story."}]
        output = create_message(client, short, max_tokens=1000)
        assert output.stop_reason == "model_context_window_exceeded"


def test_the_model_is_listed_with_what_the_client_requires(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.lifecycle, model.type) == ("smollm2", "active", "model")
    assert model.max_input_tokens == 2048


def test_errors_are_raised_as_the_clients_own_types(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="role"):
        create_message(client, [{"role": "robot", "content": "a"}])


def test_disconnecting_cancels_the_generation(
    client: anthropic.Anthropic, server: RunningServer
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


def test_the_assistants_last_message_is_continued(client: anthropic.Anthropic) -> None:
    """As in Anthropic's API; thinking blocks of the history are accepted."""
    new_session = {"role": "assistant", "content": "The capital of France is"}
    assert create_message(client, [*QUESTION, new_session]).content[0].text.startswith(" Paris")
    thought = [
        {"type": "thinking", "thinking": "It is Paris.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Paris."},
    ]
    history = [*QUESTION, {"role": "assistant", "content": thought}]
    fields = {"role": "user", "content": "And of Italy?"}
    assert "Rome" in create_message(client, [*history, fields]).content[0].text


def test_the_async_client_gets_the_same_text_whole_and_streamed(server: RunningServer) -> None:
    async def talk() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            params: dict[str, Any] = {"model": "x", "messages": QUESTION, "max_tokens": 12}
            params["extra_body"] = {"temperature": 0}
            message = await client.messages.create(**params)
            async with client.messages.stream(**params) as stream:
                text = "".join([item async for item in stream.text_stream])
            return message.content[0].text, text

    first, other = asyncio.run(talk())
    assert first == other


THINKS_AND_CALLS = """<think>
Which city?
</think>

Let me see.
<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "<Oslo>"}}
</tool_call>"""


def ask(client: anthropic.Anthropic, streamed: bool, **extra: Any) -> Any:
    """Ask with a tool and thinking, and return the message."""
    thinking = {"type": "enabled", "budget_tokens": 100}
    params: Any = {"model": "a", "messages": QUESTION, "max_tokens": 400, "tools": [TOOL]}
    params |= {"thinking": thinking, **extra}
    if not streamed:
        return client.messages.create(**params)
    with client.messages.stream(**params) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_text_and_calls_are_blocks(
    writer: anthropic.Anthropic, scripted: ScriptedServer, streamed: bool
) -> None:
    scripted.write(THINKS_AND_CALLS)
    message = ask(writer, streamed)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    single = ask(writer, streamed, tool_choice=choice)
    cut = ask(writer, streamed, max_tokens=message.usage.output_tokens - 10)
    thinking, text, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Which city?")
    assert thinking.signature
    assert (text.type, text.text.strip()) == ("text", "Let me see.")
    assert [call.input for call in calls] == [{"city": "Rome"}, {"city": "<Oslo>"}]
    assert len({call.id for call in calls}) == 2
    thinking_tokens = message.usage.output_tokens_details.thinking_tokens
    # "Which city?" and a line break on each side, and "<think>", which is plain text here.
    assert 4 <= thinking_tokens <= 10
    assert message.stop_reason == single.stop_reason == "tool_use"
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]
    assert single.usage.output_tokens < message.usage.output_tokens
    assert [block.type for block in cut.content] == [block.type for block in message.content]
    assert cut.stop_reason == "max_tokens"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain"} for call in calls]
    history = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": results},
    ]
    assert create_message(writer, history, tools=[TOOL]).usage.output_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_a_limit_at_the_end_of_the_only_call_leaves_it_whole(
    writer: anthropic.Anthropic, scripted: ScriptedServer, streamed: bool
) -> None:
    text = scripted.service.model.text
    ids = text.encode(THINKS_AND_CALLS, special=True)
    limit = next(n for n in range(len(ids)) if "}" in text.decode(ids[:n]))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    scripted.write(THINKS_AND_CALLS)
    message = ask(writer, streamed, tool_choice=choice, max_tokens=limit)
    assert message.content[-1].input == {"city": "Rome"}
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("mistral", "harmony") else pytest.mark.slow)
        for name in FORMS
    ],
)
def test_every_form_of_answers_is_blocks(
    writer: anthropic.Anthropic, scripted: ScriptedServer, name: str
) -> None:
    form = FORMS[name]
    start, end = form.reasoning
    channel = marked("<|start|>") + "assistant" if form.output_format == "harmony" else ""
    calls = [("weather", {"city": "Rome"}), ("weather", {"city": "Paris"})]
    text = f"{start}Hm, weather.{end}{channel}{form.write_calls(calls)}".replace("\x00", "")
    for streamed in (False, True):
        scripted.write(text, output_format=form.output_format)
        thinking, *tool_uses = ask(writer, streamed).content
        assert thinking.thinking == "Hm, weather."
        assert [(block.name, block.input) for block in tool_uses] == calls
