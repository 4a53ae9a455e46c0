"""Strategies for conversations in normal form."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    normalized,
)
from kvkeep.chat.openai_tools import custom_parameters, joined_name

TEXTS = st.text(max_size=12)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,10}", fullmatch=True)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(TEXTS, JSON_VALUES, max_size=3)
TOOLS = st.builds(
    Tool,
    NAMES,
    TEXTS,
    st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, JSON_VALUES, max_size=2)}
    ),
)


def content(kinds: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Draw texts, and media of these kinds."""
    text = st.builds(TextPart, TEXTS)
    names = TEXTS.filter(lambda name: not name.startswith("data:"))  # which is content
    return text | st.builds(MediaPart, st.sampled_from(kinds), names) if kinds else text


@st.composite
def chats(draw: st.DrawFn, media: tuple[str, ...] = ("image", "file")) -> Chat:
    """Draw a conversation with plain functions. media: kinds of media in it."""
    parts = {
        "system": content(()),
        "user": content(media),
        "assistant": content(media)
        | st.builds(ReasoningPart, TEXTS)
        | st.builds(ToolCall, NAMES, NAMES, ARGUMENTS),
        "tool": st.builds(ToolResult, NAMES, contents(media), st.booleans()),
    }
    messages = []
    for role in draw(st.lists(st.sampled_from(list(parts)), min_size=1, max_size=6)):
        min_size = 1 if role == "tool" else 0
        drawn = draw(st.lists(parts[role], min_size=min_size, max_size=4))
        messages.append(Message(role, tuple(drawn)))  # type: ignore[arg-type]
    tools = tuple(draw(st.lists(TOOLS, max_size=3, unique_by=lambda tool: tool.name)))
    return Chat(normalized(messages), tools, draw(choices(tools)))


def contents(media: tuple[str, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Draw a result's content, in normal form."""
    return st.lists(content(media), max_size=3).map(
        lambda parts: normalized([Message("user", tuple(parts))])[0].parts
    )


def choices(tools: tuple[Tool, ...]) -> st.SearchStrategy[ToolChoice]:
    """Draw a choice among all tools, or of one that must be called."""
    free = st.sampled_from([ToolChoice(), ToolChoice("none")])
    if not tools:
        return free
    forced = st.sampled_from([ToolChoice("required", (tool.name,)) for tool in tools])
    return free | st.just(ToolChoice("required")) | forced


@st.composite
def chats_with_custom_tools(draw: st.DrawFn, namespaces: bool = False) -> Chat:
    """Draw a conversation in which calls whose ids begin with "c", and some tools, are custom.

    namespaces: whether calls whose ids begin with "n", and some tools, are in namespaces.
    """
    chat, custom_ids, messages = draw(chats(("image", "audio", "video", "file"))), set(), []
    for message in chat.messages:
        parts: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolCall) and part.id.startswith("c"):
                custom_ids.add(part.id)
                part = replace(part, kind="custom", arguments={"input": draw(TEXTS)})
            elif isinstance(part, ToolCall) and part.id.startswith("n") and namespaces:
                namespace = draw(NAMES)
                name = joined_name(namespace, part.name)
                part = replace(part, name=name, namespace=namespace)
            elif isinstance(part, ToolResult) and part.call_id in custom_ids:
                part = replace(part, kind="custom")
            parts.append(part)
        messages.append(Message(message.role, tuple(parts)))
    tools: list[Tool] = []
    for tool in chat.tools:
        if draw(st.booleans()):
            tool = replace(tool, kind="custom", parameters=custom_parameters())
        if namespaces and draw(st.booleans()):
            namespace = draw(NAMES)
            tool = replace(tool, namespace=namespace, name=joined_name(namespace, tool.name))
        tools.append(tool)
    choice = ToolChoice(chat.choice.mode)
    if tools and draw(st.booleans()):
        mode: Any = draw(st.sampled_from(["auto", "required"]))
        choice = ToolChoice(mode, tuple(tool.name for tool in tools))
    return Chat(tuple(messages), tuple(tools), choice)
