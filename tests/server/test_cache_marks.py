"""`cache_control` marks of a request: the last four count, and many cost little."""

import tracemalloc
from typing import Any

import pytest

from kvkeep.server.anthropic.cache_marks import find_marks
from kvkeep.server.anthropic.request import CountTokensRequest

COUNT = 4_000
MAX_PEAK_BYTES = 5_000_000  # of 4,000 copies of up to 4,000 references: 64 MB
MARK, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def _block(text: str, mark: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text} | ({"cache_control": mark} if mark else {})


def _message(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def test_marks_are_in_the_order_of_the_prompt_and_the_last_four_count() -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}, "cache_control": HOUR}
    first = _message(_block("a", MARK), _block("b"), _block("c", HOUR))
    answer = _message(_block("d"), role="assistant")
    last = _message(_block("e", MARK))
    body = CountTokensRequest(
        system=[_block("s", MARK), _block("t")], tools=[tool], messages=[first, answer, last]
    )
    tools, a, c, whole = find_marks(body)
    assert [mark.seconds for mark in (tools, a, c, whole)] == [3600, 300, 3600, 300]
    assert tools.fields is not None
    assert tools.fields["tools"] == [tool]
    assert tools.fields["system"] == body.system
    assert a.fields is not None
    assert a.fields["messages"] == [_message(_block("a", MARK))]
    assert c.fields is not None
    assert c.fields["messages"] == [first]
    assert whole.fields is None
    body.cache_control = HOUR
    assert [mark.seconds for mark in find_marks(body)] == [300, 3600, 300, 3600]
    unmarked = CountTokensRequest(system=body.system, messages=[answer])
    (system,) = find_marks(unmarked)
    assert system.fields is not None
    assert system.fields["system"] == [_block("s", MARK)]


def test_prefixes_have_what_the_whole_prompt_has() -> None:
    note = {**_message(_block("n", MARK), role="system"), "clear_at": "next_user_message"}
    question, answer = _message(_block("q")), _message(_block("a", MARK), role="assistant")
    (cleared,) = find_marks(CountTokensRequest(messages=[question, note, answer, question]))
    assert cleared.fields is not None
    assert cleared.fields["messages"] == [question, answer]
    kept, _ = find_marks(CountTokensRequest(messages=[question, note, answer]))
    assert kept.fields is not None
    assert kept.fields["messages"] == [question, note]
    summary = {"type": "compaction", "content": "So far.", "tool_changes": []}
    summarized = [question, answer, _message(summary, role="assistant"), answer, question]
    (later,) = find_marks(CountTokensRequest(messages=summarized))
    assert later.fields is not None
    assert later.fields["messages"] == summarized[2:4]


@pytest.mark.parametrize("place", ["messages", "blocks", "system"])
def test_many_marks_take_little_memory(place: str) -> None:
    blocks = [_block("a", MARK)] * COUNT
    fields: dict[str, Any] = {"messages": [_message(_block("a"))]}
    if place == "messages":
        fields["messages"] = [_message(_block("a", MARK))] * COUNT
    elif place == "blocks":
        fields["messages"] = [_message(*blocks)]
    else:
        fields["system"] = blocks
    body = CountTokensRequest(**fields)
    tracemalloc.start()
    try:
        assert len(find_marks(body)) == 4
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()
