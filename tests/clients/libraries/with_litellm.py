"""LiteLLM, by the APIs of OpenAI, of Anthropic and of Ollama."""

import json

import litellm
from checks import MODEL, PARAMETERS, QUESTION, SYSTEM, URL, get_weather, run_checks
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
BY_OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
BY_ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
BY_OLLAMA = {"model": f"ollama_chat/{MODEL}", "api_base": URL}
LIMITS = {"max_tokens": 60, "temperature": 0}
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


class City(BaseModel):
    name: str = Field(max_length=12)


def ask(**params: object):
    return litellm.completion(**{"messages": MESSAGES, **LIMITS, **params})


def check_turns(provider: dict[str, str]) -> None:
    """Check an answer, the next turn, and that a stream gives the same text."""
    first = ask(**provider).choices[0].message
    assert "Paris" in first.content
    messages = [*MESSAGES, first.model_dump(), {"role": "user", "content": "And of Italy?"}]
    assert "Rome" in ask(messages=messages, **provider).choices[0].message.content
    chunks = ask(stream=True, **provider)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == first.content


def check_tool(provider: dict[str, str]) -> None:
    """Check a forced call, its result, and the same call streamed."""
    forced = {"tools": TOOLS, "tool_choice": "required", **provider}
    message = ask(**forced).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    result = get_weather(**json.loads(call.function.arguments))
    answer = {"role": "tool", "tool_call_id": call.id, "content": result}
    messages = [*MESSAGES, message.model_dump(), answer]
    assert ask(messages=messages, tools=TOOLS, **provider).choices[0].message.content
    chunks = ask(stream=True, **forced)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    arguments = "".join(part.function.arguments or "" for part in parts)
    assert json.loads(arguments) == json.loads(call.function.arguments)


def turns_by_openai() -> None:
    check_turns(BY_OPENAI)


def turns_by_anthropic() -> None:
    check_turns(BY_ANTHROPIC)


def turns_by_ollama() -> None:
    check_turns(BY_OLLAMA)


def tool_by_openai() -> None:
    check_tool(BY_OPENAI)


def tool_by_anthropic() -> None:
    check_tool(BY_ANTHROPIC)


def schema_by_openai() -> None:
    content = ask(response_format=City, **BY_OPENAI).choices[0].message.content
    City.model_validate_json(content)


def responses() -> None:
    output = litellm.responses(input=QUESTION, max_output_tokens=20, temperature=0, **BY_OPENAI)
    assert "Paris" in output.output[0].content[0].text


run_checks(
    turns_by_openai,
    tool_by_openai,
    schema_by_openai,
    turns_by_anthropic,
    tool_by_anthropic,
    turns_by_ollama,
    responses,
)
