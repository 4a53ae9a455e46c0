"""Tool runners of Anthropic's client: what the model sees of the conversations that they hold."""

from typing import Any

import anthropic
import pytest
from server.conftest import ScriptedServer

QUESTION = "What is the capital of France?"


def call(name: str) -> str:
    """A call of a tool, as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Oslo"}}}}\n</tool_call>'


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sun in {city}."


@anthropic.beta_tool
def get_time(city: str) -> str:
    """The time in a city."""
    return f"Noon in {city}."


@pytest.fixture(scope="module")
def client(scripted: ScriptedServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


def runner_of(client: anthropic.Anthropic, **options: object) -> Any:
    """Return a runner with one tool, for a conversation that has begun with the question."""
    return client.beta.messages.tool_runner(
        model="a",
        max_tokens=200,
        system="You are Zorbulon.",
        tools=[get_weather],
        messages=[{"role": "user", "content": QUESTION}],
        **options,
    )


def test_a_runner_sends_its_whole_history(
    client: anthropic.Anthropic, scripted: ScriptedServer
) -> None:
    """It continues a thread by default, and sends all messages where there are no threads."""
    scripted.write(call("get_weather"), "It is sunny.")
    assert runner_of(client).until_done().content[0].text == "It is sunny."
    _, prompt = scripted.prompts
    for part in ("You are Zorbulon.", "get_weather", QUESTION, "Sun in Oslo."):
        assert part in prompt


def test_a_runner_adds_and_removes_tools(
    client: anthropic.Anthropic, scripted: ScriptedServer
) -> None:
    scripted.write(call("get_weather"), call("get_time"), call("get_weather"), "Done.")
    runner = runner_of(client)
    answers = []
    for number, message in enumerate(runner):
        answers.append(message)
        if number == 0:
            runner.add_tools(get_time)
        elif number == 1:
            runner.remove_tools(get_weather)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use", "end_turn"]
    first, second, third = scripted.prompts
    added, removed = "can be called, too:", "can no longer be called:\nget_weather"
    assert "The time in a city." not in first
    assert second.startswith(first)  # what was reused
    assert second.index("Sun in Oslo.") < second.index(added) < second.index("The time in a city.")
    assert removed not in second
    assert third.index("Noon in Oslo.") < third.index(removed)
    assert answers[2].content[0].text == call("get_weather")  # it is gone
