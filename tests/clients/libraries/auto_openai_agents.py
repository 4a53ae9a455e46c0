"""OpenAI's Agents SDK with a model that decides on a call, by both of OpenAI's APIs."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import ANSWER, MODEL, URL, get_weather, run_checks, weather_question
from openai import AsyncOpenAI

set_tracing_disabled(True)
TYPES = ["message_output_item", "tool_call_item", "tool_call_output_item", "message_output_item"]


async def run(kind: type) -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    agent = Agent("test", model=kind(MODEL, client), tools=[function_tool(get_weather)])
    result = await Runner.run(agent, weather_question())
    assert result.final_output == ANSWER
    assert [item.type for item in result.new_items] == TYPES
    streamed = Runner.run_streamed(agent, weather_question())
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == ANSWER
    assert [item.type for item in streamed.new_items] == TYPES


def responses() -> None:
    asyncio.run(run(OpenAIResponsesModel))


def chat() -> None:
    asyncio.run(run(OpenAIChatCompletionsModel))


run_checks(responses, chat)
