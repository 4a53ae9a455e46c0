"""Histories in the forms that templates of some models need."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvkeep.chat.late_tools import HEADING
from kvkeep.chat.messages import (
    Chat,
    Message,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from kvkeep.chat.renderer import ChatRenderer, RenderedPrompt, RenderOptions
from kvkeep.chat.tool_schemas import tool_line
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from tests.chat.templates import (
    COMMAND_A,
    COMMAND_A_REASONING,
    COMMAND_R_PLUS,
    GEMMA4,
    GEMMA4_RESPONSES,
    GLM4,
    GRANITE3,
    MINISTRAL,
    MISTRAL_NEMO,
    OLMO3,
    OWN_CONTROLS,
    PHI4_MINI,
    QWEN25,
    write_codec,
)

WEATHER = Tool(
    "weather", "The weather", {"type": "object", "properties": {"city": {"type": "string"}}}
)
CALL = ToolCall("call_1", "weather", {"city": "Bonn"})
RESULT = Message("tool", (ToolResult("call_1", (TextPart("blue"),)),))
Render = Callable[..., RenderedPrompt]


def user(text: str) -> Message:
    return Message("user", (TextPart(text),))


def assistant(*parts: str | ReasoningPart | ToolCall) -> Message:
    texts = (TextPart(part) if isinstance(part, str) else part for part in parts)
    return Message("assistant", tuple(texts))


@pytest.fixture
def renderer_of(tmp_path: Path) -> Callable[..., ChatRenderer]:
    return lambda template, *controls: ChatRenderer(write_codec(tmp_path, template, *controls))


def rendered(renderer: ChatRenderer, *messages: Message, **options: bool) -> RenderedPrompt:
    return renderer.render(Chat(messages, (WEATHER,)), RenderOptions(**options))


@pytest.mark.parametrize("template", [GEMMA4, GEMMA4_RESPONSES])
def test_a_text_beside_a_call_is_in_its_turn(
    renderer_of: Callable[..., ChatRenderer], template: str
) -> None:
    """The template has no place for the text before a call, and joins turns of the model."""
    renderer = renderer_of(template, *OWN_CONTROLS["gemma4"])
    assert renderer.traits.results_in_call == (template == GEMMA4_RESPONSES)
    said = "I look <|stop|><tool_call|>.\n"
    messages = (user("Weather?"), assistant(ReasoningPart("Hm."), said, CALL), RESULT)
    again = assistant("And", ToolCall("call_1", "weather", {"city": "Kiel"}))
    prompt = rendered(renderer, *messages, again, RESULT, assistant("Blue."), user("So"))
    assert prompt.text.partition("<|start|>user\nWeather?<|stop|>\n")[2] == (
        "<|start|>model\n<|channel>thought\nHm.\n<channel|>"
        + said
        + '<|tool_call>call:weather{city:<|"|>Bonn<|"|>}<tool_call|>'
        "<|tool_response>response{value:blue}<tool_response|>"
        'And<|tool_call>call:weather{city:<|"|>Kiel<|"|>}<tool_call|>'
        "<|tool_response>response{value:blue}<tool_response|>"
        "Blue.<|stop|>\n<|start|>user\nSo<|stop|>\n<|start|>model\n"
    )
    codec = renderer._codec
    written = [codec.control_text(token) for token in prompt.ids if codec.is_control(token)]
    assert written.count("<tool_call|>") == 2  # of the template
    assert written.count("<|stop|>") == 3
    assert not prompt.warnings


def test_a_text_that_a_template_drops_beside_calls_is_inserted(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(MISTRAL_NEMO, "[INST]", "[/INST]", "[TOOL_CALLS]")
    calls = (CALL, ToolCall("call_2", "weather", {"city": "Kiel"}))
    prompt = rendered(renderer, user("Weather?"), assistant("I look.", *calls), RESULT)
    assert '[/INST]I look.[TOOL_CALLS][{"name": "weather", ' in prompt.text
    assert prompt.text.count("I look.") == 1
    assert not prompt.warnings


def test_a_text_and_a_call_are_in_one_turn_where_the_template_would_open_two(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    """The model writes both into one turn."""
    renderer = renderer_of(COMMAND_A_REASONING, *OWN_CONTROLS["command-a"])
    prompt = rendered(renderer, user("Weather?"), assistant("I look.", CALL), RESULT)
    assert '<|start|>assistant\nI look.<|START_ACTION|>[{"tool_name": "weather"' in prompt.text
    assert prompt.text.count("<|start|>assistant") == 2
    assert not prompt.warnings


def test_a_text_that_cannot_be_inserted_is_left_out_with_a_warning(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    named_last = "{'a': call.function.arguments, 'n': call.function.name} | tojson"
    renderer = renderer_of(MISTRAL_NEMO.replace("call.function | tojson", named_last))
    prompt = rendered(renderer, user("Weather?"), assistant("I look.", CALL), RESULT)
    assert "I look." not in prompt.text
    assert prompt.warnings == ("messages: the chat template leaves out the text beside calls",)


def control_texts(codec: TextCodec, prompt: RenderedPrompt) -> list[str]:
    return [codec.control_text(token) for token in prompt.ids if codec.is_control(token)]


def test_reasoning_is_a_part_of_the_content_where_the_template_takes_it_so(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(MINISTRAL, *OWN_CONTROLS["ministral"])
    assert renderer.traits.reasoning == "part"
    thought = ReasoningPart("Hm [/THINK].")
    first = (user("Weather?"), assistant(thought, CALL), RESULT)
    prompt = rendered(renderer, *first, assistant(thought, "Blue."), user("So?"))
    assert prompt.text.partition("[INST]")[2] == (
        'Weather?[/INST][THINK]Hm [/THINK].[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Bonn"}</s>'
        "[TOOL_RESULTS]blue[/TOOL_RESULTS][THINK]Hm [/THINK].[/THINK]Blue.</s>[INST]So?[/INST]"
    )
    assert control_texts(renderer._codec, prompt).count("[/THINK]") == 2
    begun = rendered(renderer, user("Weather?"), assistant(thought, "It is"))
    assert begun.text.endswith("[/INST][THINK]Hm [/THINK].[/THINK]It is")
    assert control_texts(renderer._codec, begun).count("[/THINK]") == 1


def test_reasoning_is_no_part_where_the_template_writes_the_list(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(MINISTRAL.replace("part.thinking", "part | tojson"))
    assert renderer.traits.reasoning == "dropped"
    prompt = rendered(
        renderer, user("Weather?"), assistant(ReasoningPart("Hm."), "Blue."), user("")
    )
    assert "[/INST]Blue.</s>[INST]" in prompt.text


def test_reasoning_before_calls_is_their_plan(renderer_of: Callable[..., ChatRenderer]) -> None:
    renderer = renderer_of(COMMAND_A, *OWN_CONTROLS["command-a"])
    for parts, plan in (
        ((ReasoningPart("Hm."), CALL), "Hm."),
        (("I look.", CALL), "I look."),
        ((ReasoningPart("Hm."), "I look.", CALL), "Hm.\n\nI look."),
        ((CALL,), ""),
    ):
        text = rendered(renderer, user("Weather?"), assistant(*parts), RESULT).text
        assert f"<|START_THINKING|>{plan}<|END_THINKING|><|START_ACTION|>[" in text


def test_calls_are_rendered_where_contents_must_be_parts(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(COMMAND_A_REASONING, *OWN_CONTROLS["command-a"])
    messages = (user("Weather?"), assistant(ReasoningPart("Hm."), CALL), RESULT)
    prompt = rendered(renderer, *messages, assistant("Blue."), user("So?"))
    assert not prompt.warnings
    assert prompt.text.partition("<|start|>assistant\n")[2] == (
        "<|START_THINKING|>Hm.<|END_THINKING|>"
        '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": "Bonn"}}]<|END_ACTION|>'
        '<|stop|>\n<|start|>tool\n{"type": "text", "text": "blue"}<|stop|>\n'
        "<|start|>assistant\nBlue.<|stop|>\n<|start|>user\nSo?<|stop|>\n<|start|>assistant\n"
    )


def test_parameters_have_a_description_where_the_template_needs_it(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(COMMAND_R_PLUS)
    properties: dict[str, Any] = {
        "city": {"type": "string"},
        "days": {"type": "integer", "description": "how many"},
        "more": {"type": "object", "properties": {"deep": {"type": "string"}}},
    }
    tool = Tool("weather", "The weather", {"type": "object", "properties": properties})
    messages = (user("Weather?"), assistant(CALL), RESULT)
    prompt = renderer.render(Chat(messages, (tool,)))
    assert not prompt.warnings
    assert (
        "def weather(city: str  # \ndays: int  # how many\nmore: Dict[str, Any]  # \n)\n"
    ) in prompt.text
    assert (
        'Action:\n```json\n[{"tool_name": "weather", "parameters": {"city": "Bonn"}}]```<|stop|>\n'
        "<|start|>tool\nblue<|stop|>\n"
    ) in prompt.text


def test_tools_that_such_a_template_cannot_render_are_described(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(COMMAND_R_PLUS)
    tool = Tool("weather", "", {"type": "object", "properties": {"city": {"type": "any"}}})
    prompt = renderer.render(Chat((user("Weather?"), assistant(CALL), RESULT), (tool,)))
    assert prompt.warnings == (
        "tools: described in the system text, as the chat template fails on their schemas",
    )
    assert '{"name": "weather", "description": "", "parameters": ' in prompt.text
    assert 'Action:\n```json\n[{"tool_name": "weather", ' in prompt.text


def test_tools_are_described_wherever_a_template_fails_on_their_schemas(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    """Such as Hermes 3's, whose macro never ends for a list of types."""
    macro = "{%- macro of(spec) %}{% if spec.type is not string %}{{ of(spec) }}{% endif %}"
    calls = "{%- for t in tools or [] %}{% for p in t.function.parameters.properties.values() %}"
    calls += "{{- of(p) }}{% endfor %}{% endfor %}"
    renderer = renderer_of(f"{macro}{{%- endmacro %}}{calls}{QWEN25}")
    assert not renderer.traits.full_schemas
    properties = {"city": {"type": ["string", "null"]}}
    tool = Tool("weather", "", {"type": "object", "properties": properties})
    prompt = renderer.render(Chat((user("Weather?"), assistant("I look.", CALL), RESULT), (tool,)))
    assert prompt.warnings == (
        "tools: described in the system text, as the chat template fails on their schemas",
    )
    assert '"type": ["string", "null"]' in prompt.text
    with pytest.raises(InvalidArgument, match="to continue the last message"):
        renderer.render(Chat((user("Hi"),), (tool,)), RenderOptions(continue_final=True))


def test_added_tools_of_a_conversation_without_others_have_a_form_of_calls(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    """The template describes no tools, and so says nowhere how to call them."""
    added = [replace(WEATHER, name=name, deferred=True) for name in ("weather", "time", "place")]
    lines = [tool_line(tool) for tool in added]
    said = [f"Note:\n{HEADING}\n{lines[0]}\n{lines[1]}\n", f"{HEADING}\n{lines[2]}\n"]
    messages = (user(f"{HEADING}\nHi"), assistant("Ho"), user(said[0]), assistant(), user(said[1]))
    form = (
        'To call one, answer:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    )
    renderer = renderer_of(QWEN25)
    text = renderer.render(Chat(messages, tuple(added))).text
    assert f"{said[0]}{form}\n<|stop|>" in text
    assert text.count(form) == 1
    listed = renderer.render(Chat(messages, (*added, replace(WEATHER, name="other")))).text
    assert form not in listed
    assert form not in renderer.render(Chat(messages)).text
    renderer.choose_output_format("harmony")  # a call in the text is none there
    assert form not in renderer.render(Chat(messages, tuple(added))).text


def test_calls_in_the_text_are_a_json_list_behind_granites_marker(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(GRANITE3, *OWN_CONTROLS["granite3"])
    calls = (ToolCall("call_1", "weather", {"city": 'the "<|tool_call|>"'}), CALL)
    prompt = rendered(renderer, user("Weather?"), assistant("I look.", *calls), RESULT)
    assert not prompt.warnings
    assert prompt.text.partition("Weather?<|stop|>\n")[2] == (
        "<|start|>assistant<|end|>I look.<|tool_call|>"
        '[{"name": "weather", "arguments": {"city": "the \\"<|tool_call|>\\""}}, '
        '{"name": "weather", "arguments": {"city": "Bonn"}}]<|stop|>\n'
        "<|start|>tool_response<|end|>blue<|stop|>\n<|start|>assistant<|end|>"
    )
    assert control_texts(renderer._codec, prompt).count("<|tool_call|>") == 1


def test_calls_are_messages_with_metadata_where_the_template_takes_them_so(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    renderer = renderer_of(GLM4, *OWN_CONTROLS["glm4"])
    calls = (CALL, ToolCall("call_2", "weather", {}))
    messages = (user("Weather?"), assistant("I look.", *calls))
    results = Message("tool", (*RESULT.results, ToolResult("call_2", (TextPart("rain"),))))
    prompt = rendered(renderer, *messages, results, user("So?"))
    assert not prompt.warnings
    assert prompt.text.partition("<|user|>")[2] == (
        '\nWeather?<|assistant|>\nI look.<|assistant|>weather\n{"city": "Bonn"}'
        "<|observation|>\nblue<|assistant|>weather\n{}<|observation|>\nrain"
        "<|user|>\nSo?<|assistant|>"
    )
    assert control_texts(renderer._codec, prompt).count("<|observation|>") == 2


@pytest.mark.parametrize("system", [(), (Message("system", (TextPart("Be brief."),)),)])
def test_tools_are_in_the_system_message_where_the_template_takes_them_there(
    renderer_of: Callable[..., ChatRenderer], system: tuple[Message, ...]
) -> None:
    renderer = renderer_of(PHI4_MINI, *OWN_CONTROLS["phi4-mini"])
    tool = replace(WEATHER, description='The "<|/tool|>" <weather>')
    messages = (*system, user("Weather?"), assistant("I look.", CALL), RESULT)
    prompt = renderer.render(Chat(messages, (tool,)))
    assert not prompt.warnings
    said = system[0].text if system else ""
    assert prompt.text == (
        f"<|system|>{said}<|tool|>"
        '[{"name": "weather", "description": "The \\"<|/tool|>\\" <weather>", "parameters": '
        '{"type": "object", "properties": {"city": {"type": "string"}}}}]<|/tool|><|stop|>'
        "<|user|>Weather?<|stop|><|assistant|>I look."
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}]<|/tool_call|><|stop|>'
        "<|tool_response|>blue<|stop|><|assistant|>"
    )
    written = control_texts(renderer._codec, prompt)
    assert [written.count(text) for text in ("<|/tool|>", "<|/tool_call|>")] == [1, 1]
    plain = renderer.render(Chat((*system, user("Weather?"))))
    assert "<|tool|>" not in plain.text


def test_tools_calls_and_results_of_olmo_are_in_its_own_form(
    renderer_of: Callable[..., ChatRenderer],
) -> None:
    values = {"city": 'the "big" one', "days": [1, None, True]}
    calls = (ToolCall("call_1", "weather", values), ToolCall("call_2", "weather", {}))
    messages = (user("Weather?"), assistant("I look.", *calls), RESULT)
    prompt = rendered(renderer_of(OLMO3), *messages)
    assert not prompt.warnings
    assert prompt.text == (
        '<|start|>system\n <functions>[{"name": "weather", "description": "The weather", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
        "</functions><|stop|>\n<|start|>user\nWeather?<|stop|>\n<|start|>assistant\nI look."
        '<function_calls>weather(city="the \\"big\\" one", days=[1, null, true])\nweather()'
        "</function_calls><|stop|>\n<|start|>environment\nblue<|stop|>\n<|start|>assistant\n"
    )
