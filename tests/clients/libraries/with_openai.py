"""OpenAI's library for Python: Chat Completions and Responses."""

import json

from checks import MODEL, PARAMETERS, QUESTION, SYSTEM, URL, get_weather, run_checks
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION, "strict": True}]
LIMITS = {"model": MODEL, "max_tokens": 60, "temperature": 0}
OUTPUT_LIMITS = {"model": MODEL, "max_output_tokens": 60, "temperature": 0}


class City(BaseModel):
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=99)


def chat_of_several_turns() -> None:
    first = client.chat.completions.create(messages=MESSAGES, **LIMITS).choices[0].message
    assert "Paris" in first.content
    messages = [*MESSAGES, first, {"role": "user", "content": "And of Italy?"}]
    response = client.chat.completions.create(messages=messages, **LIMITS)
    assert "Rome" in response.choices[0].message.content
    assert response.usage.prompt_tokens_details.cached_tokens > 0


def chat_stream() -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **LIMITS)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=MESSAGES, **LIMITS, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_stream_events() -> None:
    with client.chat.completions.stream(messages=MESSAGES, **LIMITS) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.get_final_completion().choices[0].message.content


def chat_tool() -> None:
    params = {**LIMITS, "tools": TOOLS}
    response = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **params)
    assert response.choices[0].finish_reason == "tool_calls"
    message = response.choices[0].message
    call = message.tool_calls[0]
    result = get_weather(**json.loads(call.function.arguments))
    answer = {"role": "tool", "tool_call_id": call.id, "content": result}
    response = client.chat.completions.create(messages=[*MESSAGES, message, answer], **params)
    assert response.choices[0].message.content


def chat_streamed_tool() -> None:
    params = {**LIMITS, "tools": TOOLS, "tool_choice": "required"}
    whole = client.chat.completions.create(messages=MESSAGES, **params).choices[0].message
    chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **params)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].id
    assert calls[0].function.name == "get_weather"
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert json.loads(arguments) == json.loads(whole.tool_calls[0].function.arguments)


def chat_schema() -> None:
    response = client.chat.completions.parse(messages=MESSAGES, response_format=City, **LIMITS)
    assert isinstance(response.choices[0].message.parsed, City)


def responses_of_several_turns() -> None:
    first = client.responses.create(input=QUESTION, instructions=SYSTEM, **OUTPUT_LIMITS)
    assert "Paris" in first.output_text
    params = {"instructions": SYSTEM, "previous_response_id": first.id, **OUTPUT_LIMITS}
    second = client.responses.create(input="And of Italy?", **params)
    history = [
        {"role": "user", "content": QUESTION},
        *first.output,
        {"role": "user", "content": "And of Italy?"},
    ]
    again = client.responses.create(input=history, instructions=SYSTEM, **OUTPUT_LIMITS)
    assert second.output_text
    assert again.output_text == second.output_text


def responses_stream() -> None:
    whole = client.responses.create(input=MESSAGES, **OUTPUT_LIMITS)
    with client.responses.stream(input=MESSAGES, **OUTPUT_LIMITS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == final.output_text
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(numbers)))


def responses_tool() -> None:
    params = {**OUTPUT_LIMITS, "tools": FLAT_TOOLS}
    first = client.responses.create(input=MESSAGES, tool_choice="required", **params)
    (call,) = (item for item in first.output if item.type == "function_call")
    result = get_weather(**json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    second = client.responses.create(input=[*MESSAGES, *first.output, output], **params)
    assert second.output_text
    third = client.responses.create(input=[output], previous_response_id=first.id, **params)
    assert third.output_text == second.output_text


def responses_streamed_tool() -> None:
    params = {**OUTPUT_LIMITS, "tools": FLAT_TOOLS, "tool_choice": "required"}
    with client.responses.stream(input=MESSAGES, **params) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kind = "response.function_call_arguments.delta"
    arguments = "".join(event.delta for event in events if event.type == kind)
    (call,) = (item for item in final.output if item.type == "function_call")
    assert arguments == call.arguments
    assert set(json.loads(arguments)) == {"city"}


def responses_schema() -> None:
    response = client.responses.parse(input=MESSAGES, text_format=City, **OUTPUT_LIMITS)
    assert isinstance(response.output_parsed, City)


run_checks(
    chat_of_several_turns,
    chat_stream,
    chat_stream_events,
    chat_tool,
    chat_streamed_tool,
    chat_schema,
    responses_of_several_turns,
    responses_stream,
    responses_tool,
    responses_streamed_tool,
    responses_schema,
)
