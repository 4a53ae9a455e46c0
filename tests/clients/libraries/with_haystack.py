"""Haystack's generators for OpenAI's API."""

from checks import MODEL, PARAMETERS, QUESTION, SYSTEM, URL, get_weather, run_checks
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel, Field

SERVER = {"api_key": Secret.from_token("none"), "api_base_url": f"{URL}/v1", "model": MODEL}
LIMITS = {"temperature": 0, "max_tokens": 60}
PROMPT = [ChatMessage.from_system(SYSTEM), ChatMessage.from_user(QUESTION)]
TOOL = Tool("get_weather", "The weather in a city.", PARAMETERS, get_weather)
chat = OpenAIChatGenerator(**SERVER, generation_kwargs=LIMITS)
responses = OpenAIResponsesChatGenerator(
    **SERVER, generation_kwargs={"temperature": 0, "max_output_tokens": 60}
)


class City(BaseModel):
    name: str = Field(max_length=12)


def ask(messages: list[ChatMessage], generator=chat, **params: object) -> ChatMessage:
    return generator.run(messages, **params)["replies"][0]


def turns() -> None:
    first = ask(PROMPT)
    assert "Paris" in first.text
    assert "Rome" in ask([*PROMPT, first, ChatMessage.from_user("And of Italy?")]).text


def stream() -> None:
    parts: list[str] = []
    answer = ask(PROMPT, streaming_callback=lambda chunk: parts.append(chunk.content))
    assert "".join(parts) == answer.text == ask(PROMPT).text


def tool() -> None:
    forced = {"tools": [TOOL], "generation_kwargs": {**LIMITS, "tool_choice": "required"}}
    message = ask(PROMPT, **forced)
    call = message.tool_call
    result = ChatMessage.from_tool(get_weather(**call.arguments), origin=call)
    assert ask([*PROMPT, message, result], tools=[TOOL]).text
    streamed = ask(PROMPT, streaming_callback=lambda chunk: None, **forced)
    assert streamed.tool_call.arguments == call.arguments


def schema() -> None:
    params = {"generation_kwargs": {**LIMITS, "response_format": City}}
    City.model_validate_json(ask(PROMPT, **params).text)


def responses_turns() -> None:
    first = ask(PROMPT, responses)
    assert "Paris" in first.text
    second = ask([*PROMPT, first, ChatMessage.from_user("And of Italy?")], responses)
    assert "Rome" in second.text


run_checks(turns, stream, tool, schema, responses_turns)
