"""LangChain's chat models for OpenAI's and Anthropic's API."""

from typing import Annotated

from checks import MODEL, QUESTION, SYSTEM, URL, get_weather, run_checks
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

LIMITS = {"model": MODEL, "api_key": "none", "temperature": 0, "max_tokens": 60, "max_retries": 0}
BY_CHAT = ChatOpenAI(base_url=f"{URL}/v1", **LIMITS)
BY_RESPONSES = ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **LIMITS)
BY_MESSAGES = ChatAnthropic(base_url=URL, **LIMITS)
PROMPT = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)


@tool
def weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """Return the weather in a city."""
    return get_weather(city)


def check_turns(model: ChatOpenAI | ChatAnthropic) -> None:
    first = model.invoke(PROMPT)
    assert "Paris" in first.text
    second = model.invoke([*PROMPT, first, HumanMessage("And of Italy?")])
    assert "Rome" in second.text
    assert second.usage_metadata["output_tokens"] > 0
    streamed = "".join(chunk.text for chunk in model.stream(PROMPT))
    assert streamed == first.text


def check_tool(model: ChatOpenAI | ChatAnthropic) -> None:
    forced = model.bind_tools([weather], tool_choice="any")
    message = forced.invoke(PROMPT)
    (call,) = message.tool_calls
    assert call["name"] == "weather"
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([weather]).invoke([*PROMPT, message, result]).text
    total = None
    for chunk in forced.stream(PROMPT):
        total = chunk if total is None else total + chunk
    assert [call["args"] for call in total.tool_calls] == [call["args"]]


def check_schema(model: ChatOpenAI | ChatAnthropic, method: str) -> None:
    city = model.with_structured_output(City, method=method).invoke(PROMPT)
    assert isinstance(city, City)


def chat_turns() -> None:
    check_turns(BY_CHAT)


def chat_tool() -> None:
    check_tool(BY_CHAT)


def chat_schema() -> None:
    check_schema(BY_CHAT, "json_schema")
    check_schema(BY_CHAT, "function_calling")


def responses_turns() -> None:
    check_turns(BY_RESPONSES)


def responses_tool() -> None:
    check_tool(BY_RESPONSES)


def responses_schema() -> None:
    check_schema(BY_RESPONSES, "json_schema")


def messages_turns() -> None:
    check_turns(BY_MESSAGES)


def messages_tool() -> None:
    check_tool(BY_MESSAGES)


def messages_schema() -> None:
    check_schema(BY_MESSAGES, "json_schema")
    check_schema(BY_MESSAGES, "function_calling")


run_checks(
    chat_turns,
    chat_tool,
    chat_schema,
    responses_turns,
    responses_tool,
    responses_schema,
    messages_turns,
    messages_tool,
    messages_schema,
)
