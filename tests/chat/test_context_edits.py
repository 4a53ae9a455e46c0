"""Anthropic's context edits: what is cleared, when, and how it is reported."""

from typing import Any

import pytest

from kvkeep.chat.anthropic_messages import parse_chat
from kvkeep.chat.context_edits import CLEARED, apply_edits, parse_edits
from kvkeep.chat.messages import Chat
from kvkeep.errors import InvalidArgument


def history(uses: int = 5) -> Chat:
    """A conversation with a call of `read` or `bash`, thinking and a result of 40 words a turn."""
    messages: list[dict[str, Any]] = []
    for number in range(uses):
        name = "bash" if number % 2 else "read"
        thinking = {"type": "thinking", "thinking": f"thought {number}", "signature": "s"}
        use = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {"path": "a.py"}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": "word " * 40}
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": [thinking, use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    return parse_chat({"messages": [*messages, {"role": "user", "content": "And now?"}]})


def count_words(chat: Chat) -> int:
    texts = [message.text + " " + message.reasoning for message in chat.messages]
    texts += [str(call.arguments) for message in chat.messages for call in message.calls]
    texts += [part.text for m in chat.messages for r in m.results for part in r.content]  # type: ignore[union-attr]
    return len(" ".join(texts).split())


def edited(*edits: dict[str, Any], uses: int = 5) -> tuple[Chat, list[dict[str, Any]]]:
    parsed, unknown = parse_edits({"edits": list(edits)})
    assert unknown == []
    return apply_edits(history(uses), parsed, count_words)


def cleared_results(chat: Chat) -> list[bool]:
    return [r.content[0].text == CLEARED for m in chat.messages for r in m.results]  # type: ignore[union-attr]


USES: dict[str, Any] = {"type": "clear_tool_uses_20250919"}
TRIGGERED = {**USES, "trigger": {"type": "input_tokens", "value": 50}}


def test_old_results_are_cleared_and_the_newest_three_stay() -> None:
    chat, applied = edited(TRIGGERED)
    assert cleared_results(chat) == [True, True, False, False, False]
    (entry,) = applied
    assert entry["type"] == "clear_tool_uses_20250919"
    assert entry["cleared_tool_uses"] == 2
    assert entry["cleared_input_tokens"] == count_words(history()) - count_words(chat)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trigger": {"type": "input_tokens", "value": 10_000}}, []),
        ({"trigger": {"type": "tool_uses", "value": 5}}, []),
        ({"trigger": {"type": "tool_uses", "value": 4}}, [0, 1]),
        ({"keep": {"type": "tool_uses", "value": 0}}, [0, 1, 2, 3, 4]),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["bash"]}, [0, 2]),
        ({"clear_at_least": {"type": "input_tokens", "value": 1000}}, []),
        ({"trigger": None}, []),  # 100,000 tokens, as of the hosted API
    ],
)
def test_trigger_keep_excluded_tools_and_the_least_amount_are_honoured(
    changes: dict[str, Any], expected: list[int]
) -> None:
    chat, applied = edited({**TRIGGERED, **changes})
    assert [i for i, cleared in enumerate(cleared_results(chat)) if cleared] == expected
    assert len(applied) == bool(expected)


def test_inputs_of_cleared_calls_go_where_that_is_wanted() -> None:
    for value, names in ((True, {"read", "bash"}), (["bash"], {"bash"}), (False, set())):
        chat, _ = edited({**TRIGGERED, "keep": {"value": 0}, "clear_tool_inputs": value})
        calls = [call for message in chat.messages for call in message.calls]
        assert {call.name for call in calls if not call.arguments} == names


def test_thinking_of_old_turns_is_cleared_first_and_all_of_it_can_stay() -> None:
    thinking: dict[str, Any] = {"type": "clear_thinking_20251015"}
    chat, applied = edited({**thinking, "keep": {"type": "thinking_turns", "value": 2}}, TRIGGERED)
    assert [m.reasoning for m in chat.messages if m.reasoning] == ["thought 3", "thought 4"]
    assert [entry["type"] for entry in applied] == [thinking["type"], USES["type"]]
    assert applied[0]["cleared_thinking_turns"] == 3
    assert edited({**thinking, "keep": "all"})[1] == []


def test_a_compact_edit_is_answered_by_clearing_results_and_thinking() -> None:
    compact = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}}
    chat, applied = edited(compact)
    assert [entry["type"] for entry in applied] == [
        "clear_tool_uses_20250919",
        "clear_thinking_20251015",
    ]
    assert cleared_results(chat)[:2] == [True, True]


def test_the_same_edits_of_an_edited_history_change_nothing() -> None:
    parsed, _ = parse_edits({"edits": [TRIGGERED]})
    once, _ = apply_edits(history(), parsed, count_words)
    assert apply_edits(once, parsed, count_words) == (once, [])


@pytest.mark.parametrize(
    "value",
    [
        "all",
        {"edits": "clear"},
        {"edits": [3]},
        {"edits": [{"type": 3}]},
        {"edits": [{**USES, "keep": {"value": -1}}]},
        {"edits": [{**USES, "trigger": {"value": "many"}}]},
        {"edits": [{**USES, "exclude_tools": "bash"}]},
        {"edits": [{**USES, "trigger": {"type": "turns", "value": 1}}]},
        {"edits": [{"type": "compact_20260112", "trigger": {"type": "tool_uses", "value": 1}}]},
        {"edits": [USES] * 17},
    ],
)
def test_malformed_edits_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="context_management"):
        parse_edits(value)


def test_unknown_edits_are_named() -> None:
    assert parse_edits({"edits": [{"type": "clear_images_20301231"}]}) == (
        [],
        ["clear_images_20301231"],
    )
