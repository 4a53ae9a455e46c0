"""Tools that come in the middle of a conversation are described there, and the rest stays."""

from dataclasses import replace

from kvkeep.chat.late_tools import LateTools
from kvkeep.chat.messages import Chat, Message, TextPart, Tool, ToolCall, ToolChoice, ToolResult

NAMES = ("read", "write", "find", "get")
READ, WRITE, SEARCH, FETCH = (Tool(name, f"To {name}.") for name in NAMES)
CALL = ToolCall("call-1", "read", {})
START = (Message("system", (TextPart("Be brief."),)), Message("user", (TextPart("Read it."),)))
CALLED = (*START, Message("assistant", (CALL,)), Message("tool", (ToolResult("call-1"),)))
NEXT = (*CALLED, Message("assistant", (TextPart("Done."),)), Message("user", (TextPart("Go on."),)))


def chat(messages: tuple[Message, ...], *tools: Tool) -> Chat:
    return Chat(messages, tools)


def test_later_tools_are_described_at_the_end_and_stay_there() -> None:
    late = LateTools()
    first = chat(START, READ, WRITE)
    assert late.place("0", first) is first
    second = late.place("0", chat(CALLED, READ, SEARCH, WRITE))
    assert second.tools == (READ, WRITE, replace(SEARCH, deferred=True))
    assert second.messages[:4] == CALLED
    (description,) = second.messages[4:]
    assert description.role == "user"
    assert '"To find."' in description.text
    third = late.place("0", chat(NEXT, READ, SEARCH, WRITE, FETCH))
    assert third.messages[:5] == second.messages
    assert third.messages[5] == NEXT[4]
    assert third.messages[6].text.startswith("Go on.\n\n")
    assert '"To get."' in third.messages[6].text
    assert {tool.name for tool in third.callable_tools} == {"read", "write", "find", "get"}


def test_removed_tools_stay_described_and_cannot_be_called() -> None:
    late = LateTools()
    late.place("0", chat(START, READ, WRITE, SEARCH))
    for tools in ((WRITE, READ), ()):
        placed = late.place("0", chat(CALLED, *tools))
        assert placed.tools == (READ, WRITE, SEARCH)
        assert {tool.name for tool in placed.callable_tools} == {tool.name for tool in tools}
        assert placed.messages == CALLED
    forced = late.place("0", Chat(CALLED, (READ, WRITE), ToolChoice("required")))
    assert forced.choice == ToolChoice("required", ("read", "write"))


def test_other_conversations_and_changed_tools_begin_anew() -> None:
    late = LateTools()
    late.place("0", chat(START, READ, WRITE))
    with_more = chat(CALLED, READ, WRITE, SEARCH)
    assert late.place("1", with_more) is with_more  # of another owner
    part = chat(CALLED, READ, WRITE)
    assert late.place("0", part, remember=False) is part
    mostly_new = chat(CALLED, READ, SEARCH, FETCH)
    assert late.place("0", mostly_new) is mostly_new
    changed = chat(CALLED, READ, SEARCH, replace(FETCH, description="Otherwise."))
    assert late.place("0", changed) is changed
    again = chat(START, READ)
    assert late.place("0", again) is again
    without = chat(CALLED)
    assert late.place("2", without) is without
    late.place("2", chat(NEXT, READ))
    shorter = chat(CALLED, READ, WRITE)
    late.place("2", chat(NEXT, READ, WRITE))
    assert late.place("2", shorter) is shorter  # what was before the later tool is gone
