"""Pydantic AI with a model that decides on a call, by Chat Completions, Responses and Messages."""

import asyncio

from anthropic import AsyncAnthropic
from checks import ANSWER, MODEL, URL, get_weather, run_checks, weather_question
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def openai() -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


async def run(agent: Agent) -> None:
    result = await agent.run(weather_question())
    assert result.output == ANSWER
    calls = [part for message in result.all_messages() for part in message.parts]
    assert [part.args for part in calls if part.part_kind == "tool-call"]
    async with agent.run_stream_events(weather_question()) as events:
        *_, last = [event async for event in events]
    assert last.result.output == ANSWER


def chat() -> None:
    asyncio.run(run(Agent(OpenAIChatModel(MODEL, provider=openai()), tools=[get_weather])))


def responses() -> None:
    asyncio.run(run(Agent(OpenAIResponsesModel(MODEL, provider=openai()), tools=[get_weather])))


def messages() -> None:
    client = AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
    model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
    asyncio.run(run(Agent(model, tools=[get_weather])))


run_checks(chat, responses, messages)
