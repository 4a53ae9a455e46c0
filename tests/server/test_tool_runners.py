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


@pytest.mark.parametrize("streamed", [False, True])
def test_a_runner_compacts_its_conversation(
    client: anthropic.Anthropic, scripted: ScriptedServer, streamed: bool
) -> None:
    summary = "Asked for France's capital; it is sunny in Oslo."
    answers = [call("get_weather"), call("get_time"), f"<think>\nHm\n</think>\n{summary}", "Paris."]
    scripted.write(*answers)
    runner = runner_of(client, stream=True) if streamed else runner_of(client)
    messages = []
    for number, item in enumerate(runner):
        messages.append(item.get_final_message() if streamed else item)
        if number == 0:
            runner.add_tools(get_time)
        elif number == 1:
            runner.compact_before_next_turn()
    compacted, last = messages[2:]
    assert compacted.stop_reason == "compaction"
    (block,) = compacted.content
    assert (block.type, block.content) == ("compaction", summary)
    assert [change.type for change in block.tool_changes] == ["tool_addition"]
    assert last.content[0].text == "Paris."
    _, before, asked, prompt = scripted.prompts
    assert asked.startswith(before.removesuffix("<|im_start|>assistant\n"))
    assert "Noon in Oslo." in asked
    assert "Summarize this conversation" in asked
    assert prompt.index("You are Zorbulon.") < prompt.index(summary)
    for part in ("get_weather", "The time in a city."):
        assert part in prompt
    for part in ("Noon in Oslo.", QUESTION, "Summarize"):
        assert part not in prompt
    assert prompt.endswith("<|im_start|>assistant\n")  # it answers, and continues no summary


def test_a_compaction_follows_its_instructions(
    client: anthropic.Anthropic, scripted: ScriptedServer
) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    options: Any = {"model": "a", "max_tokens": 50, "messages": messages}
    compaction: Any = {"type": "summarize", "instructions": "In one word."}
    scripted.write("France.", "")
    answer = client.beta.messages.create(compaction=compaction, **options)
    assert [block.to_dict() for block in answer.content] == [
        {"type": "compaction", "content": "France.", "signature": "kvkeep", "tool_changes": []}
    ]
    (prompt,) = scripted.prompts
    assert f"{QUESTION}\n\nIn one word." in prompt
    blank = client.beta.messages.create(compaction={**compaction, "instructions": " "}, **options)
    assert blank.content[0].content is None
    assert "Summarize this conversation" in scripted.prompts[1]
    for field in (
        {"context_management": {"edits": []}},
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
    ):
        with pytest.raises(anthropic.BadRequestError, match="cannot be combined"):
            client.beta.messages.create(compaction=compaction, extra_body=field, **options)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "limits", [{"max_tokens": 5}, {"max_tokens": 50, "stop_sequences": ["four"]}], ids=repr
)
def test_a_summary_that_is_cut_off_replaces_nothing(
    client: anthropic.Anthropic, scripted: ScriptedServer, limits: Any, streamed: bool
) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    options: Any = {"model": "a", "messages": messages, "compaction": {"type": "summarize"}}
    scripted.write("one two three four five six seven eight nine ten")
    if streamed:
        with client.beta.messages.stream(**options, **limits) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.beta.messages.create(**options, **limits)
    (block,) = answer.content
    assert (block.type, block.content) == ("compaction", None)
    assert answer.stop_reason == "compaction"
