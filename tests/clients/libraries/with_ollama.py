"""Ollama's library for Python."""

from checks import MODEL, PARAMETERS, QUESTION, SYSTEM, URL, get_weather, run_checks
from ollama import Client

client = Client(host=URL)
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
LIMITS = {"model": MODEL, "options": {"temperature": 0, "num_predict": 60}}


def turns() -> None:
    first = client.chat(messages=MESSAGES, **LIMITS)
    assert "Paris" in first.message.content
    assert first.done
    assert first.eval_count > 0
    messages = [*MESSAGES, first.message, {"role": "user", "content": "And of Italy?"}]
    assert "Rome" in client.chat(messages=messages, **LIMITS).message.content


def stream() -> None:
    whole = client.chat(messages=MESSAGES, **LIMITS).message.content
    parts = list(client.chat(messages=MESSAGES, stream=True, **LIMITS))
    assert "".join(part.message.content or "" for part in parts) == whole
    assert parts[-1].done
    assert parts[-1].done_reason == "stop"


def tools() -> None:
    """Check that tools and results are taken; this API cannot force a call."""
    assert client.chat(messages=MESSAGES, tools=[get_weather], **LIMITS).done
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "It rains in Paris."},
    ]
    response = client.chat(messages=[*MESSAGES, *turns], tools=TOOLS, **LIMITS)
    assert response.message.content


def schema() -> None:
    response = client.chat(messages=MESSAGES, format=PARAMETERS, **LIMITS)
    assert response.message.content.startswith('{"city"')
    response = client.chat(messages=MESSAGES, format="json", **LIMITS)
    assert response.message.content.startswith("{")


def generate() -> None:
    whole = client.generate(prompt=QUESTION, system=SYSTEM, **LIMITS)
    assert "Paris" in whole.response
    parts = client.generate(prompt=QUESTION, system=SYSTEM, stream=True, **LIMITS)
    assert "".join(part.response for part in parts) == whole.response


def models() -> None:
    name = client.list().models[0].model
    assert client.show(name).modelinfo
    client.ps()


run_checks(turns, stream, tools, schema, generate, models)
