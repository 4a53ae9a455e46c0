"""LlamaIndex' class for servers with OpenAI's API."""

from typing import Annotated

from checks import MODEL, QUESTION, SYSTEM, URL, get_weather, run_checks
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    context_window=2048,
    max_tokens=80,
    temperature=0,
    max_retries=0,
)
PROMPT = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)


def weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """Return the weather in a city."""
    return get_weather(city)


def turns() -> None:
    first = llm.chat(PROMPT).message
    assert "Paris" in first.content
    second = llm.chat([*PROMPT, first, ChatMessage(role="user", content="And of Italy?")])
    assert "Rome" in second.message.content


def stream() -> None:
    whole = llm.chat(PROMPT).message.content
    assert "".join(part.delta or "" for part in llm.stream_chat(PROMPT)) == whole


def completion() -> None:
    assert llm.complete("The capital of France is").text


def tool() -> None:
    function = FunctionTool.from_defaults(weather)
    forced = {"tools": [function], "chat_history": PROMPT, "tool_required": True}
    message = llm.chat_with_tools(**forced)
    (call,) = llm.get_tool_calls_from_response(message)
    assert call.tool_name == "weather"
    result = ChatMessage(
        role="tool",
        content=weather(**call.tool_kwargs),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    history = [*PROMPT, message.message, result]
    assert llm.chat_with_tools(tools=[function], chat_history=history).message.content
    *_, last = llm.stream_chat_with_tools(**forced)
    (again,) = llm.get_tool_calls_from_response(last)
    assert again.tool_kwargs == call.tool_kwargs


def schema() -> None:
    answer = llm.as_structured_llm(City).chat(PROMPT)
    assert isinstance(answer.raw, City)


run_checks(turns, stream, completion, tool, schema)
