"""Prompt rules: what each drops or moves, and what it leaves as it is."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.chat import anthropic_messages, openai_chat
from kvkeep.chat.messages import Chat, Message, TextPart, ToolResult, normalized
from kvkeep.chat.prompt_rules import DEFAULT_RULES, PROMPT_RULES, apply_rules, select_rules
from kvkeep.errors import InvalidArgument
from tests.chat.chats import chats

HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
INSTRUCTIONS = "You are Claude Code, Anthropic's official CLI.\nBe brief: a = b; c."
UUID = "123e4567-e89b-12d3-a456-426614174000"


def chat(*turns: tuple[str, str]) -> Chat:
    """Return a conversation of (role, text)."""
    messages = (Message(role, (TextPart(text),)) for role, text in turns)  # type: ignore[arg-type]
    return Chat(normalized(messages))


def applied(name: str, conversation: Chat) -> Chat:
    """Return a conversation changed by one rule, which must have changed it."""
    result, names = apply_rules(conversation, select_rules(f"none,{name}"))
    assert names == (name,)
    assert result.messages == normalized(result.messages)
    return result


@pytest.mark.parametrize("between", ["", "\n", "\n\n", " \n", " cc_workload=cron\n"])
def test_the_billing_header_is_dropped_and_nothing_else(between: str) -> None:
    turns = [("user", HEADER), ("assistant", HEADER), ("system", HEADER), ("user", "And now?")]
    result = applied("billing-header", chat(("system", HEADER + between + INSTRUCTIONS), *turns))
    assert result == chat(("system", INSTRUCTIONS), *turns)


def test_a_system_message_that_was_only_a_billing_header_is_dropped() -> None:
    assert applied("billing-header", chat(("system", HEADER), ("user", "Hi"))) == chat(
        ("user", "Hi")
    )


def test_the_billing_header_is_dropped_from_blocks_and_messages_of_apis() -> None:
    question = [{"role": "user", "content": "Hi"}]
    blocks = [{"type": "text", "text": text} for text in (HEADER, INSTRUCTIONS)]
    anthropic = anthropic_messages.parse_chat({"system": blocks, "messages": question})
    system = [{"role": "system", "content": text} for text in (HEADER, INSTRUCTIONS)]
    openai = openai_chat.parse_chat({"messages": [*system, *question]})
    for conversation in (anthropic, openai):
        expected = chat(("system", INSTRUCTIONS), ("user", "Hi"))
        assert applied("billing-header", conversation) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"{INSTRUCTIONS}\n{HEADER}",
        f"The first line is `{HEADER}`.",
        "x-anthropic-billing-header: is a line of Claude Code",
        "x-anthropic-billing-header",
    ],
)
def test_a_system_text_that_mentions_the_billing_header_stays(text: str) -> None:
    conversation = chat(("system", text), ("user", HEADER))
    result, names = apply_rules(conversation, PROMPT_RULES)
    assert result is conversation
    assert names == ()


def test_lines_that_are_only_a_session_id_are_dropped() -> None:
    text = (
        f"Rules.\nSession ID: {UUID}\n- **Request-Id**: `ab12cd`\nUse the session id {UUID}.\nEnd"
    )
    conversation = chat(("system", text), ("user", f"Session ID: {UUID}"))
    result = applied("session-ids", conversation)
    kept = f"Rules.\nUse the session id {UUID}.\nEnd"
    assert result == chat(("system", kept), ("user", f"Session ID: {UUID}"))


@pytest.mark.parametrize(
    "line",
    [
        "  Today's date: Fri Nov 27 2026",
        "Today\u2019s date is Friday, November 27, 2026 (formatted by the locale).",
        "Current date and time: 2026-11-27 10:05 UTC",
        "- The current time is 10:05",
        "<current_date>2026-11-27</current_date>",
        "Conversation started: Friday, November 27, 2026",
        "Today is Friday, 2026-11-27",
    ],
)
def test_date_lines_move_behind_the_last_message(line: str) -> None:
    system = f"You help.\n<env>\n{line}\nPlatform: linux\n</env>\nNever say today's date."
    conversation = chat(("system", system), ("user", line), ("assistant", "Yes?"), ("user", "Hi"))
    kept = system.replace(f"{line}\n", "")
    question = f"Hi\n\n{line.strip()}"
    assert applied("dates", conversation) == chat(
        ("system", kept), ("user", line), ("assistant", "Yes?"), ("user", question)
    )


@pytest.mark.parametrize(
    "context",
    [
        "<system-reminder>\n# Date\n{date}\n\nIt may matter.\n</system-reminder>\nHi",
        "<environment_context>\n  {date}\n</environment_context>",
        "This is the Qwen Code. We are setting up the context for our chat.\n{date}\nBye",
    ],
)
def test_date_lines_of_an_agents_context_move_too(context: str) -> None:
    date = "Today's date is 2026-11-27."
    result = Message("tool", (ToolResult("call_1", (TextPart("3"),)),))
    conversation = chat(("user", context.replace("{date}", date)), ("assistant", "Yes?"))
    conversation = replace(conversation, messages=(*conversation.messages, result))
    undated = context.replace("  {date}\n", "").replace("{date}\n", "")
    rest = chat(("user", undated), ("assistant", "Yes?")).messages
    moved = applied("dates", conversation)
    assert moved.messages == (*rest, result, Message("user", (TextPart(date),)))
    assert apply_rules(moved, PROMPT_RULES) == (moved, ())
    assert apply_rules(chat(("user", f"Why {date}?\n{date}")), PROMPT_RULES)[1] == ()


def test_reminders_are_dropped_from_later_user_messages() -> None:
    reminder = "<system-reminder>\nThe date has changed.\n</system-reminder>"
    quoted = "What is a <system-reminder>x</system-reminder> block?"
    conversation = chat(
        *[("user", f"{reminder}\nHi"), ("assistant", reminder), ("user", reminder)],
        *[("assistant", "Yes?"), ("user", f"{reminder}\n\n{quoted}\n{reminder}\nBye")],
    )
    assert applied("reminders", conversation) == chat(
        *[("user", f"{reminder}\nHi"), ("assistant", reminder), ("assistant", "Yes?")],
        ("user", f"{quoted}\nBye"),
    )
    ends_with_one = chat(("user", "Hi"), ("assistant", "Yes?"), ("user", reminder))
    assert apply_rules(ends_with_one, PROMPT_RULES) == (ends_with_one, ())


@given(chats(), st.sampled_from(["", HEADER, f"Session id: {UUID}\n", "Today's date: 1\n"]))
def test_rules_give_a_normal_form_and_change_it_once(conversation: Chat, line: str) -> None:
    system = Message("system", (TextPart(f"{line}Go."),))
    conversation = Chat(normalized([system, *conversation.messages]))
    once, names = apply_rules(conversation, PROMPT_RULES)
    assert once.messages == normalized(once.messages)
    assert apply_rules(once, PROMPT_RULES) == (once, ())
    assert bool(names) == (once != conversation)
    if not line:
        assert once is conversation


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        ("default", ["billing-header"]),
        ("-billing-header", []),
        ("dates", ["billing-header", "dates"]),
        ("none, dates", ["dates"]),
        ("all,-reminders,-dates", ["billing-header", "session-ids", "late-tools"]),
        ("reminders,none", []),
    ],
)
def test_rules_are_selected_by_name(selection: str, names: list[str]) -> None:
    assert [rule.name for rule in select_rules(selection)] == names


@pytest.mark.parametrize("selection", ["", "date", "-all", "dates,,none"])
def test_unknown_rules_are_refused_with_the_list_of_rules(selection: str) -> None:
    with pytest.raises(InvalidArgument, match=r"billing-header, session-ids.*found"):
        select_rules(selection)


def test_only_rules_that_lose_nothing_are_on_by_default() -> None:
    assert [rule.name for rule in DEFAULT_RULES] == ["billing-header"]


_TAGS = ("<system-reminder>", "</system-reminder>", "<environment_context>")
_LINES = st.sampled_from(
    [*_TAGS, "</environment_context>", "Today is Friday, 27.", "Hi", "", "</system-reminder> x"]
)
_BLOCK = re.compile(
    r"^<(system-reminder|environment_context)>\n.*?\n</\1>$", re.MULTILINE | re.DOTALL
)


@given(st.lists(_LINES, max_size=12))
def test_dates_leave_the_blocks_of_a_context_only(lines: list[str]) -> None:
    text = "\n".join(lines)
    expected = _BLOCK.sub(lambda block: block[0].replace("\nToday is Friday, 27.", ""), text)
    dates = text.count("Today is") - expected.count("Today is")
    conversation = chat(("user", text), ("assistant", "Yes."), ("user", "And now?"))
    result, names = apply_rules(conversation, select_rules("none,dates"))
    assert names == ("dates",) * bool(dates)
    if dates:
        assert result.messages[0].text == expected
        assert result.messages[-1].text.count("Today is Friday, 27.") == dates


def test_tags_that_are_not_closed_are_searched_for_once() -> None:
    """A search for each of a million would take days."""
    text = "<system-reminder>\n<environment_context>\n" * 500_000
    conversation = chat(("user", text), ("assistant", "Yes."), ("user", "And now?"))
    assert apply_rules(conversation, PROMPT_RULES) == (conversation, ())
