"""Pydantic AI: agents by Chat Completions, Responses and Messages."""

import asyncio

from anthropic import AsyncAnthropic
from checks import MODEL, QUESTION, SYSTEM, URL, get_weather, run_checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
ANTHROPIC = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none"))
BY_CHAT = OpenAIChatModel(MODEL, provider=OPENAI)
BY_RESPONSES = OpenAIResponsesModel(MODEL, provider=OPENAI)
# The library knows of its own models alone that they take schemas.
BY_MESSAGES = AnthropicModel(
    MODEL, provider=ANTHROPIC, profile=ModelProfile(supports_json_schema_output=True)
)
LIMITS = {"temperature": 0, "max_tokens": 80}
Model = OpenAIChatModel | OpenAIResponsesModel | AnthropicModel


class City(BaseModel):
    name: str = Field(max_length=12)


def make_agent(model: Model, **params: object) -> Agent:
    return Agent(model, instructions=SYSTEM, model_settings=LIMITS, retries=0, **params)


def check_turns(model: Model) -> None:
    agent = make_agent(model)
    first = agent.run_sync(QUESTION)
    assert "Paris" in first.output
    second = agent.run_sync("And of Italy?", message_history=first.all_messages())
    assert "Rome" in second.output

    async def stream() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    assert asyncio.run(stream()) == first.output


def check_output_tool(model: Model) -> None:
    """Check an output type, which is a forced call of a tool, with another tool beside it."""
    agent = make_agent(model, output_type=City)
    assert isinstance(agent.run_sync(QUESTION).output, City)


def check_schema(model: Model) -> None:
    agent = make_agent(model, output_type=NativeOutput(City))
    assert isinstance(agent.run_sync(QUESTION).output, City)


def check_tool(model: Model) -> None:
    """Check a run with a tool, which the model may call or not."""
    agent = make_agent(model, tools=[get_weather])
    assert agent.run_sync(QUESTION).output


def chat_turns() -> None:
    check_turns(BY_CHAT)


def chat_output() -> None:
    check_output_tool(BY_CHAT)
    check_schema(BY_CHAT)


def chat_tool() -> None:
    check_tool(BY_CHAT)


def responses_turns() -> None:
    check_turns(BY_RESPONSES)


def responses_output() -> None:
    check_output_tool(BY_RESPONSES)
    check_schema(BY_RESPONSES)


def responses_tool() -> None:
    check_tool(BY_RESPONSES)


def messages_turns() -> None:
    check_turns(BY_MESSAGES)


def messages_output() -> None:
    check_output_tool(BY_MESSAGES)
    check_schema(BY_MESSAGES)


def messages_tool() -> None:
    check_tool(BY_MESSAGES)


run_checks(
    chat_turns,
    chat_output,
    chat_tool,
    responses_turns,
    responses_output,
    responses_tool,
    messages_turns,
    messages_output,
    messages_tool,
)
