"""Conversations of many messages, calls and parts are read in time linear in their number."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.chat import ollama_chat, openai_chat, openai_responses
from kvkeep.chat.open_calls import OpenCalls

SHORT, LONG = 1_000, 4_000


def calls(count: int) -> list[Any]:
    function = {"name": "f", "arguments": {}}
    return [{"id": f"c{index}", "function": function} for index in range(count)]


def results(count: int, **fields: str) -> list[Any]:
    return [{"role": "tool", "content": "x", **fields} for _ in range(count)]


def with_unknown_results(count: int) -> list[Any]:
    """Calls, and as many results of which none is of one of them."""
    answer = {"role": "assistant", "content": "", "tool_calls": calls(count)}
    return [answer, *results(count, tool_call_id="z", tool_name="g")]


def unanswered_items(count: int) -> list[Any]:
    items = [{"type": "function_call", "call_id": f"c{n}", "name": "f"} for n in range(count)]
    return items + [
        {"type": "function_call_output", "call_id": f"c{n}", "output": "x"}
        for n in reversed(range(count))
    ]


CASES: dict[str, tuple[Callable[[Any], object], Callable[[int], Any]]] = {
    "chat-results": (openai_chat.parse_messages, with_unknown_results),
    "ollama-results": (ollama_chat.parse_chat, with_unknown_results),
    "items": (lambda items: openai_responses.parse_chat({"input": items}), unanswered_items),
    "users": (
        openai_chat.parse_messages,
        lambda count: [{"role": "user", "content": "x" * 500}] * count,
    ),
    "parts": (
        openai_chat.parse_messages,
        lambda count: [{"role": "user", "content": [{"type": "text", "text": "x" * 500}] * count}],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_time_grows_with_the_length_and_not_its_square(case: str) -> None:
    """Four times as many take four times as long, not sixteen times."""
    parse, conversation = CASES[case]

    def seconds(count: int) -> float:
        entries, measured = conversation(count), []
        for _ in range(5):
            start = time.process_time()
            parse(entries)
            measured.append(time.process_time() - start)
        return min(measured)

    assert seconds(LONG) < 9 * seconds(SHORT)


def test_open_calls_are_closed_in_their_order() -> None:
    open_calls = OpenCalls()
    for call_id, name in (("a", "f"), ("b", "g"), ("a", "g"), ("c", "f")):
        open_calls.add(call_id, name)
    assert open_calls.close_next("g") == "b"
    assert open_calls.close_next("unknown") == "a"
    assert "a" in open_calls  # the other one
    open_calls.close("a")
    assert "a" not in open_calls
    open_calls.close("a")
    assert open_calls.close_next() == "c"
    assert open_calls.close_next() == ""
