"""LangChain with a model that decides on a call, by Chat Completions, Responses and Messages."""

from checks import ANSWER, MODEL, URL, get_weather, run_checks, weather_question
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

weather = tool(get_weather)
SETTINGS = {"model": MODEL, "api_key": "none", "max_retries": 0}


def check_calls(model: ChatOpenAI | ChatAnthropic) -> None:
    bound = model.bind_tools([weather])
    history = [HumanMessage(weather_question())]
    whole = bound.invoke(history)
    total = None
    for chunk in bound.stream(history):
        total = chunk if total is None else total + chunk
    (call,) = whole.tool_calls
    assert call["args"] == {"city": "Paris"}
    assert whole.text == total.text == "Let me look."
    assert [(each["name"], each["args"]) for each in total.tool_calls] == [
        (call["name"], call["args"])
    ]
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert bound.invoke([*history, whole, result]).text == ANSWER


def chat() -> None:
    check_calls(ChatOpenAI(base_url=f"{URL}/v1", **SETTINGS))


def responses() -> None:
    check_calls(ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **SETTINGS))


def messages() -> None:
    check_calls(ChatAnthropic(base_url=URL, **SETTINGS))


run_checks(chat, responses, messages)
