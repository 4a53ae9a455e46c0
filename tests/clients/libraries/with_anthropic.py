"""Anthropic's library for Python."""

from anthropic import Anthropic, beta_tool
from checks import MODEL, PARAMETERS, QUESTION, SYSTEM, URL, get_weather, run_checks
from pydantic import BaseModel, Field

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}]
LIMITS = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
FORCED = {"tools": TOOLS, "tool_choice": {"type": "any"}, **LIMITS}


class City(BaseModel):
    name: str = Field(description="its name")
    large: bool


def messages_of_several_turns() -> None:
    first = client.messages.create(messages=MESSAGES, system=SYSTEM, **LIMITS)
    assert "Paris" in first.content[0].text
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    turns = [{"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]})
    second = client.messages.create(messages=[*MESSAGES, *turns], system=system, **LIMITS)
    assert "Rome" in second.content[0].text
    assert second.usage.cache_read_input_tokens > 0


def stream() -> None:
    whole = client.messages.create(messages=MESSAGES, system=SYSTEM, **LIMITS)
    with client.messages.stream(messages=MESSAGES, system=SYSTEM, **LIMITS) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens


def tool() -> None:
    first = client.messages.create(messages=MESSAGES, **FORCED)
    assert first.stop_reason == "tool_use"
    (call,) = (block for block in first.content if block.type == "tool_use")
    result = get_weather(**call.input)
    content = [{"type": "text", "text": result}]
    block = {"type": "tool_result", "tool_use_id": call.id, "content": content}
    turns = [{"role": "assistant", "content": first.content}, {"role": "user", "content": [block]}]
    second = client.messages.create(messages=[*MESSAGES, *turns], tools=TOOLS, **LIMITS)
    assert second.content[0].text


def streamed_tool() -> None:
    whole = client.messages.create(messages=MESSAGES, **FORCED)
    with client.messages.stream(messages=MESSAGES, **FORCED) as events:
        parts = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    assert parts
    assert final.content[-1].name == "get_weather"
    assert final.content[-1].input == whole.content[-1].input
    assert final.stop_reason == "tool_use"


def parsed() -> None:
    message = client.messages.parse(messages=MESSAGES, output_format=City, **LIMITS)
    assert isinstance(message.parsed_output, City)


def tool_runner() -> None:
    """Run the tool of the first answer: the second prompt has all that was before, and the result.

    The runner continues a thread of messages where the server has threads.
    """
    options = {"tools": [beta_tool(get_weather)], "tool_choice": {"type": "any"}, **LIMITS}
    runner = client.beta.messages.tool_runner(messages=MESSAGES, max_iterations=2, **options)
    first, second = (
        message.usage.input_tokens + message.usage.cache_read_input_tokens for message in runner
    )
    assert second > first


def counted() -> None:
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=TOOLS)
    usage = client.messages.create(messages=MESSAGES, tools=TOOLS, **LIMITS).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def models() -> None:
    assert client.models.list().data[0].id


run_checks(
    messages_of_several_turns,
    stream,
    tool,
    streamed_tool,
    parsed,
    tool_runner,
    counted,
    models,
)
