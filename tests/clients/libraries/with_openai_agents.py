"""OpenAI's Agents SDK, by Responses and by Chat Completions."""

import asyncio
from typing import Annotated

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checks import MODEL, QUESTION, SYSTEM, URL, get_weather, run_checks
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
Model = OpenAIResponsesModel | OpenAIChatCompletionsModel


class City(BaseModel):
    name: str = Field(max_length=12)


@function_tool
def weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """Return the weather in a city."""
    return get_weather(city)


def make_agent(kind: type[Model], choice: str | None = None, **params: object) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=80, tool_choice=choice)
    params = {"model": kind(MODEL, client), "model_settings": settings, **params}
    return Agent("test", instructions=SYSTEM, **params)


async def turns(kind: type[Model]) -> None:
    agent, session = make_agent(kind), SQLiteSession("test")
    first = await Runner.run(agent, QUESTION, session=session)
    assert "Paris" in first.final_output
    second = await Runner.run(agent, "And of Italy?", session=session)
    assert "Rome" in second.final_output
    streamed = Runner.run_streamed(agent, QUESTION)
    events = [event.data async for event in streamed.stream_events() if hasattr(event, "data")]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == streamed.final_output == first.final_output


async def tool(kind: type[Model]) -> None:
    """Check a run with one forced call; the library then leaves the choice to the model."""
    agent = make_agent(kind, "required", tools=[weather])
    result = await Runner.run(agent, QUESTION, max_turns=3)
    types = [item.type for item in result.new_items]
    assert types == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.final_output
    streamed = Runner.run_streamed(agent, QUESTION, max_turns=3)
    async for _ in streamed.stream_events():
        pass
    assert [item.type for item in streamed.new_items] == types


async def schema(kind: type[Model]) -> None:
    result = await Runner.run(make_agent(kind, output_type=City), QUESTION)
    assert isinstance(result.final_output, City)


def responses_turns() -> None:
    asyncio.run(turns(OpenAIResponsesModel))


def responses_tool() -> None:
    asyncio.run(tool(OpenAIResponsesModel))


def responses_schema() -> None:
    asyncio.run(schema(OpenAIResponsesModel))


def chat_turns() -> None:
    asyncio.run(turns(OpenAIChatCompletionsModel))


def chat_tool() -> None:
    asyncio.run(tool(OpenAIChatCompletionsModel))


def chat_schema() -> None:
    asyncio.run(schema(OpenAIChatCompletionsModel))


run_checks(
    responses_turns,
    responses_tool,
    responses_schema,
    chat_turns,
    chat_tool,
    chat_schema,
)
