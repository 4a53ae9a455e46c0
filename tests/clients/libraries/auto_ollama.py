"""Ollama's library with a model that decides on a call."""

from checks import ANSWER, MODEL, URL, get_weather, run_checks, weather_question
from ollama import Client

client = Client(host=URL)
MESSAGES = [{"role": "user", "content": weather_question()}]


def whole() -> None:
    message = client.chat(MODEL, MESSAGES, tools=[get_weather]).message
    assert message.content == "Let me look."
    (call,) = message.tool_calls
    result = get_weather(**call.function.arguments)
    turns = [*MESSAGES, message, {"role": "tool", "tool_name": "get_weather", "content": result}]
    assert client.chat(MODEL, turns, tools=[get_weather]).message.content == ANSWER


def streamed() -> None:
    parts = [
        part.message for part in client.chat(MODEL, MESSAGES, tools=[get_weather], stream=True)
    ]
    assert "".join(part.content or "" for part in parts) == "Let me look."
    (call,) = [call for part in parts for call in part.tool_calls or ()]
    assert call.function.arguments == {"city": "Paris"}


run_checks(whole, streamed)
