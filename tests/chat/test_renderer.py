"""Rendering of conversations with templates that take more, less or other things."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    content_text,
    normalized,
)
from kvkeep.chat.renderer import ChatRenderer, RenderedPrompt, RenderOptions
from kvkeep.errors import InvalidArgument
from tests.chat.chats import chats
from tests.chat.templates import ALL_TEMPLATES, DEEPSEEK_R1, OWN_CONTROLS, write_codec
from tests.examples import examples

WEATHER = Tool(
    "weather",
    "The weather of a city",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
)
Render = Callable[..., RenderedPrompt]


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def system(text: str) -> Message:
    return Message("system", (TextPart(text),))


def assistant(*parts: str | ReasoningPart | ToolCall) -> Message:
    texts = (TextPart(part) if isinstance(part, str) else part for part in parts)
    return Message("assistant", tuple(texts))


def weather(city: str, call_id: str = "call_1") -> ToolCall:
    return ToolCall(call_id, "weather", {"city": city, "days": 3})


def results(*texts: str) -> Message:
    """Return results of calls with the ids call_1, call_2 and so on."""
    parts = (ToolResult(f"call_{n}", (TextPart(text),)) for n, text in enumerate(texts, 1))
    return Message("tool", tuple(parts))


EXCHANGE = (user("Weather?"), assistant(weather("Bonn")), results("blue"))


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    folders = {name: tmp_path_factory.mktemp("model") for name in ALL_TEMPLATES}
    return {
        name: ChatRenderer(write_codec(folders[name], template, *OWN_CONTROLS.get(name, ())))
        for name, template in ALL_TEMPLATES.items()
    }


@pytest.fixture
def render(renderers: dict[str, ChatRenderer]) -> Render:
    def rendered(
        template: str, *messages: Message, tools: tuple[Tool, ...] = (), **options: Any
    ) -> RenderedPrompt:
        chat = Chat(normalized(messages), tools)
        return renderers[template].render(chat, RenderOptions(**options))

    return rendered


ALL = pytest.mark.parametrize("template", ALL_TEMPLATES)
ONE_CALL = ("llama3", "glm4")  # a message has one call, and its result follows it


@ALL
@pytest.mark.parametrize("tools", [(), (WEATHER,)], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    "messages",
    [
        (system("Brief."), *EXCHANGE),
        (*EXCHANGE, assistant("Blue."), user("Thanks")),
        (*EXCHANGE, user("And more?")),
        (*EXCHANGE, assistant(weather("Kiel", "call_2")), results("", "rain")),
        (
            user("Weather?"),
            assistant(weather("Bonn"), weather("Kiel", "call_2")),
            results("blue", "rain"),
        ),
        (user("Weather?"), assistant(ReasoningPart("Hm."), weather("Bonn")), results("blue")),
        (assistant(weather("Bonn")), results("blue"), user("And more?")),
    ],
    ids=["result", "answer", "text behind", "steps", "parallel", "reasoning", "call first"],
)
def test_calls_and_results_of_the_history_are_rendered(
    render: Render, template: str, messages: tuple[Message, ...], tools: tuple[Tool, ...]
) -> None:
    text = render(template, *messages, tools=tools).text
    parts = [part for message in messages for part in message.parts if message.role != "system"]
    expected = [
        part.arguments["city"]
        if isinstance(part, ToolCall)
        else content_text(part.content)
        if isinstance(part, ToolResult)
        else part.text
        for part in parts
        if not isinstance(part, ReasoningPart | MediaPart)
    ]
    positions = [text.index(written) for written in expected if written]
    assert positions == sorted(positions) or template in ONE_CALL  # each result behind its call
    assert all(message.text in text for message in messages)
    assert not tools or text.count("weather") > sum(len(message.calls) for message in messages)


@ALL
def test_results_of_repeated_ids_are_those_of_their_calls(render: Render, template: str) -> None:
    def same_id(*texts: str) -> Message:
        return Message("tool", tuple(ToolResult("a", (TextPart(text),)) for text in texts))

    text = render(
        template,
        *(user("Weather?"), assistant(weather("Bonn", "a"), weather("Kiel", "a"))),
        same_id("blue", "rain"),
        *(assistant(weather("Oslo", "a"), weather("Rome", "a")), same_id("snow", "haze", "hail")),
        tools=(WEATHER,),
    ).text
    words = re.findall("Bonn|Kiel|Oslo|Rome|blue|rain|snow|haze|hail", text)
    together = ["Bonn", "Kiel", "blue", "rain", "Oslo", "Rome", "snow", "haze", "hail"]
    apart = ["Bonn", "blue", "Kiel", "rain", "Oslo", "snow", "Rome", "haze", "hail"]
    assert words == (apart if template in ONE_CALL else together)


@pytest.mark.parametrize("template", ["qwen", "qwen2.5", "llama3", "mistral-nemo", "gemma2"])
def test_arguments_are_json_that_is_not_escaped(render: Render, template: str) -> None:
    call = ToolCall("call_1", "weather", {"city": 'the "big" one', "deep": {"list": [1, None]}})
    text = render(template, user("a"), assistant(call), results("b"), tools=(WEATHER,)).text
    written = re.search(r'"(?:arguments|parameters)": ({"city".*?}}|{"city".*?}\])', text)
    assert written is not None
    assert json.loads(written[1]) == dict(call.arguments)


def test_templates_that_iterate_over_arguments_get_a_mapping(render: Render) -> None:
    text = render("qwen3-coder", *EXCHANGE, tools=(WEATHER,)).text
    assert "<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n3\n</parameter>" in text


def test_call_without_arguments_has_an_empty_object(render: Render) -> None:
    call = ToolCall("call_1", "weather", {})
    text = render("qwen2.5", user("a"), assistant(call), results("b"), tools=(WEATHER,)).text
    assert '{"name": "weather", "arguments": {}}' in text


def test_calls_stand_in_the_text_if_the_template_has_a_role_for_results_only(
    renderers: dict[str, ChatRenderer], render: Render
) -> None:
    """They are written as the model writes them, and only that writes its control tokens."""
    calls = (weather("<|tool_call_end|>"), weather('the "big"\none', "call_2"))
    messages = (user("Weather?"), assistant("I look.", *calls), results("blue", "<|stop|>"))
    prompt = render("lfm2", *messages, user("And?"), tools=(WEATHER,))
    assert prompt.warnings == ()
    assert prompt.text.partition("<|start|>user\n")[2] == (
        "Weather?<|stop|>\n<|start|>assistant\nI look.<|tool_call_start|>"
        '[weather(city="<|tool_call_end|>", days=3), weather(city="the \\"big\\"\\none", days=3)]'
        "<|tool_call_end|><|stop|>\n"
        "<|start|>tool\n<|tool_response_start|>blue<|tool_response_end|><|stop|>\n"
        "<|start|>tool\n<|tool_response_start|><|stop|><|tool_response_end|><|stop|>\n"
        "<|start|>user\nAnd?<|stop|>\n<|start|>assistant\n"
    )
    codec = renderers["lfm2"]._codec
    written = [codec.control_text(token) for token in prompt.ids if codec.is_control(token)]
    assert [written.count(f"<|tool_call_{place}|>") for place in ("start", "end")] == [1, 1]
    assert written.count("<|stop|>") == 6


def test_results_that_are_json_stay_the_text_that_they_are(render: Render) -> None:
    text = render("qwen2.5", *EXCHANGE[:2], results('{"sky": "blue"}')).text
    assert '<tool_response>\n{"sky": "blue"}\n</tool_response>' in text


def test_ids_of_other_servers_become_nine_stable_characters(
    render: Render, renderers: dict[str, ChatRenderer]
) -> None:
    calls = [weather("Bonn", "toolu_01A"), weather("Kiel", renderers["mistral-nemo"].new_call_id())]
    tool_results = Message("tool", tuple(ToolResult(c.id, (TextPart("1"),)) for c in calls))
    messages = (user("Weather?"), assistant(*calls), tool_results)
    text = render("mistral-nemo", *messages).text
    ids = re.findall(r'"(?:call_)?id": "(.*?)"', text)
    assert ids[:2] == ids[2:]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call_id) for call_id in ids)
    assert len(set(ids)) == 2
    assert ids[1] == calls[1].id
    assert text == render("mistral-nemo", *messages, tools=()).text


@ALL
def test_new_ids_of_calls_are_rendered_as_they_are(
    renderers: dict[str, ChatRenderer], render: Render, template: str
) -> None:
    call_id = renderers[template].new_call_id()
    result = Message("tool", (ToolResult(call_id, (TextPart("blue"),)),))
    text = render(template, user("a"), assistant(weather("Bonn", call_id)), result).text
    assert template != "mistral-nemo" or text.count(call_id) == 2


@ALL
def test_system_text_is_rendered_wherever_it_is(render: Render, template: str) -> None:
    start = render(template, system("Be brief."), user("Hi"), assistant("Ho"), user("Ha")).text
    midway = render(template, user("Hi"), assistant("Ho"), system("Be brief."), user("Ha")).text
    end = render(template, user("Hi"), assistant("Ho"), user("Ha"), system("Be brief.")).text
    alone = render(template, system("Be brief.")).text
    for text in (start, midway, end, alone):
        assert text.count("Be brief.") == 1
    assert midway.index("Ho") < midway.index("Be brief.") < midway.index("Ha")
    assert end.index("Ha") < end.index("Be brief.")


def test_template_without_a_system_role_gets_its_text_in_the_first_message(render: Render) -> None:
    prompt = render("gemma2", system("Be brief."), user("Hi"), tools=(WEATHER,))
    assert prompt.text.startswith("<s><|start|>user\nBe brief.\n\nYou may call these functions:\n")
    assert '{"name": "weather", "description": "The weather of a city", ' in prompt.text
    assert prompt.text.endswith("</tool_call>\n\nHi<|stop|>\n<|start|>model\n")
    assert len(prompt.warnings) == 2
    assert "system text" in prompt.warnings[1]
    assert not render("qwen2.5", system("Be brief."), user("Hi"), tools=(WEATHER,)).warnings


@pytest.mark.parametrize("template", ["gemma", "gemma2"])
def test_templates_that_alternate_take_results_and_texts(render: Render, template: str) -> None:
    calls = assistant("Wait.", weather("Bonn"), weather("Kiel", "call_2"))
    prompt = render(template, user("a"), calls, results("blue", "rain"), user("So?"))
    assert prompt.text.count("user\n") == 2
    assert (
        "Wait.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>\n<tool_call>\n'
    ) in prompt.text
    assert (
        "<tool_response>\nblue\n</tool_response>\n<tool_response>\nrain\n</tool_response>\n\nSo?"
    ) in prompt.text
    assert any("calls and results are text" in warning for warning in prompt.warnings)


@ALL
@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("No such city.", "Error: No such city."),
        ("", "(error)"),
        ("Error: No such city.", "Error: No such city."),
        ("error 404", "error 404"),
    ],
)
def test_a_result_that_is_an_error_says_so(
    render: Render, template: str, text: str, seen: str
) -> None:
    def rendered(content: str, is_error: bool) -> RenderedPrompt:
        result = ToolResult("call_1", (TextPart(content),), is_error)
        calls = assistant(weather("Bonn"))
        return render(template, user("a"), calls, Message("tool", (result,)), tools=(WEATHER,))

    assert rendered(text, True).ids == rendered(seen, False).ids


def test_media_are_rendered_as_placeholders(render: Render) -> None:
    image = Message("user", (TextPart("Look: "), MediaPart("image", "cat.png")))
    assert "Look: [image cat.png omitted]<|stop|>" in render("qwen2.5", image).text


@ALL
@pytest.mark.parametrize(
    "text",
    ["The answer", " and ", "<think>\n\n</think>\n\n", "<think>\n\n</think>\n\nSo", "<think>\nHm"],
)
def test_prompt_ends_with_the_text_of_an_unfinished_message(
    render: Render, template: str, text: str
) -> None:
    prompt = render(template, user("Hi"), assistant(text))
    assert prompt.text.endswith(text)
    assert prompt.text.count("<think>") == 1 or not text.startswith("<think>")
    assert prompt.starts_in_reasoning == (text == "<think>\nHm")


def test_message_that_the_template_strips_follows_the_generation_prompt(render: Render) -> None:
    def answer(*parts: str | ReasoningPart) -> tuple[str, bool]:
        prompt = render("deepseek-r1", user("Hi"), assistant(*parts))
        return str(prompt.text).removeprefix("<s><|start|>user\nHi"), prompt.starts_in_reasoning

    start = "<|start|>assistant\n"
    assert answer("Yes") == (f"{start}Yes", False)
    assert answer("<think>\n\n</think>\n\n") == (f"{start}<think>\n\n</think>\n\n", False)
    assert answer("a</think>b") == (f"{start}<think>\n\n</think>\n\na</think>b", False)
    assert answer(ReasoningPart("Hm")) == (f"{start}<think>\nHm", True)
    assert answer(ReasoningPart("Hm"), "Yes") == (f"{start}<think>\nHm\n</think>\n\nYes", False)
    assert answer() == (f"{start}<think>\n", True)


def test_markers_of_prefilled_reasoning_are_control_tokens(tmp_path: Path) -> None:
    template = DEEPSEEK_R1.replace("\\n<think>\\n", "") + "{# [TOOL_CALLS] #}"
    renderer = ChatRenderer(write_codec(tmp_path, template, "[THINK]", "[/THINK]"))
    codec = renderer._codec
    begun = assistant(ReasoningPart("Hm [/THINK]"), "Yes [THINK]")
    prompt = renderer.render(Chat((user("Hi"), begun)))
    assert prompt.text.endswith("[THINK]Hm [/THINK][/THINK]Yes [THINK]")
    control = [codec.control_text(token) for token in prompt.ids if codec.is_control(token)]
    assert control[-2:] == ["[THINK]", "[/THINK]"]
    assert len(control) == 5


def test_a_message_is_continued_only_if_it_is_the_assistants_text(render: Render) -> None:
    assert render("qwen2.5", user("Hi"), continue_final=False).text.endswith("assistant\n")
    closed = render("qwen2.5", user("Hi"), assistant("Yes"), continue_final=False).text
    assert closed.endswith("Yes<|stop|>\n<|start|>assistant\n")
    for messages in ([user("Hi")], [user("Hi"), assistant(weather("Bonn"))]):
        with pytest.raises(InvalidArgument, match="to continue the last message"):
            render("qwen2.5", *messages, continue_final=True)


def test_results_without_a_call_and_empty_messages_are_rendered(render: Render) -> None:
    lone = render("gpt-oss", user("Hi"), results("blue"), tools=(WEATHER,))
    assert "<tool_response>\nblue\n</tool_response>" in lone.text
    assert any("result without a call" in warning for warning in lone.warnings)
    assert (
        "[/INST] </s>[INST]So?" in render("mistral-nemo", user("a"), assistant(), user("So?")).text
    )


@pytest.mark.parametrize("template", ["qwen2.5", "command-a-reasoning"])
def test_an_empty_first_answer_follows_an_empty_question(render: Render, template: str) -> None:
    prompt = render(template, assistant())
    assert prompt.text == render(template, user(""), continue_final=False).text
    assert prompt.continues
    assert prompt.warnings == (
        "messages: an empty user message precedes the assistant's, as the chat template requires",
    )


def test_reasoning_options_reach_the_template(render: Render) -> None:
    assert "Reasoning: high" in render("gpt-oss", user("a"), reasoning_effort="high").text
    kwargs = {"reasoning_effort": "low"}
    text = render("gpt-oss", user("a"), reasoning_effort="high", template_kwargs=kwargs).text
    assert "Reasoning: low" in text
    assert text.endswith("<|message|>a<|stop|><|start|>assistant")
    for options in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        prompt = render("qwen", user("a"), **options)
        assert prompt.text.endswith("assistant\n<think>")
        assert prompt.starts_in_reasoning
    assert not render("qwen", user("a"), enable_thinking=True).starts_in_reasoning


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_variables_that_kvkeep_sets_are_refused(render: Render, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"cannot be named {name}"):
        render("qwen", user("a"), template_kwargs={"enable_thinking": False, name: "b"})


def test_no_choice_of_tools_changes_the_prompt(renderers: dict[str, ChatRenderer]) -> None:
    tools = (WEATHER, replace(WEATHER, name="forecast"))
    for choice in (
        ToolChoice("none"),
        ToolChoice("required", ("forecast",)),
        ToolChoice("auto", ("forecast",)),
    ):
        for template in ("qwen2.5", "gemma2"):
            text = renderers[template].render(Chat((user("a"),), tools, choice)).text
            assert text == renderers[template].render(Chat((user("a"),), tools)).text


def test_refusals_of_the_template_do_not_tell_the_folder(tmp_path: Path) -> None:
    template = "{% if messages | length > 1 %}{{ messages[5].content + 1 }}{% endif %}a"
    renderer = ChatRenderer(write_codec(tmp_path, template))
    messages = (user("a"), assistant("b"), user("c"), assistant("d"), user("e"))
    with pytest.raises(InvalidArgument, match="chat template") as refusal:
        renderer.render(Chat(messages))
    assert str(tmp_path) not in str(refusal.value)


@ALL
@settings(max_examples=examples(20), deadline=None)
@given(chat=chats(), continued=st.none() | st.booleans())
def test_any_conversation_is_rendered_without_control_tokens_of_users(
    renderers: dict[str, ChatRenderer], template: str, chat: Chat, continued: bool | None
) -> None:
    renderer, options = renderers[template], RenderOptions(continue_final=continued)

    def control_tokens(replacement: str) -> list[int] | str:
        try:
            prompt = renderer.render(_replaced(chat, replacement), options)
        except InvalidArgument as error:
            return str(error)
        assert renderer._codec.decode(prompt.ids) == prompt.text
        return [token for token in prompt.ids if renderer._codec.is_control(token)]

    assert control_tokens("<|stop|>") == control_tokens("stopping")


def _replaced(value: Any, replacement: str) -> Any:
    """Return a part of a conversation with another text for each "0" that a user wrote."""
    if isinstance(value, str):
        return value.replace("0", replacement)
    if isinstance(value, tuple | list):
        return type(value)(_replaced(item, replacement) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, replacement) for key, item in value.items()}
    changes = {
        "text": (TextPart, ReasoningPart),
        "name": (MediaPart,),
        "arguments": (ToolCall,),
        "content": (ToolResult,),
        "parts": (Message,),
        "messages": (Chat,),
        "description": (Tool,),
    }
    for field, kinds in changes.items():
        if isinstance(value, kinds):
            return replace(value, **{field: _replaced(getattr(value, field), replacement)})
    return value
