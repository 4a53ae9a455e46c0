"""The format of a model's answers is found in its chat template or its vocabulary."""

import pytest

from kvkeep.chat.formats.registry import FORMATS, detect_format, format_by_name
from kvkeep.chat.renderer import ChatRenderer
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model

# Parts of published templates.
TEMPLATES = {
    "hermes": """{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}""",
    "qwen3-coder": "'<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' + args_name",
    "glm": "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "seed-oss": "{%- set toolcall_begin_token = '<seed:tool_call>' %}<function=<parameter=",
    "minimax": '<minimax:tool_call>\\n<invoke name="tool-name-1">',
    "apertus": "{%- set tool_calls_token = '<|tools_prefix|>' %}",
    "functionary": "Respond in this format:\\n>>>${recipient}{{ '>>>all\\n' + content }}",
    "apriel": "[BEGIN FINAL RESPONSE] ... <tool_calls>[{",
    "ernie": "<tool_call>\\n{}</tool_call>{{ '<response>\\n' + content }}",
    "llama3": """<|start_header_id|>{{ '{"name": "' + name + '", "parameters": ' }}""",
    "mistral": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "gemma3": "{{ '<start_of_turn>' + role }}",
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
    "function-gemma": "<start_function_call>call:",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "command-r7b": "<|START_THINKING|>{{thoughts}}<|END_THINKING|><|START_ACTION|>[",
    "command-r": "<|CHATBOT_TOKEN|>Action:\\n```json\\n[\\n",
    "lfm2": "'List of tools: <|tool_list_start|>[' + tools + ']<|tool_list_end|>'",
    "nemotron2": '\'<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>\'',
    "phi4-mini": "'<|tool|>' + message['tools'] + '<|/tool|>'",
    "granite": "respond only with <|tool_call|> followed by a JSON list",
    "olmo3": "<function_calls>{{ message['function_calls'] }}</function_calls>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_the_format(name: str) -> None:
    assert detect_format(TEMPLATES[name], ()).name == name


def test_templates_without_tools_are_read_as_hermes_or_by_their_control_tokens() -> None:
    assert detect_format("", ()).name == "hermes"
    assert detect_format("{{ messages }}", ["<|im_end|>"]).name == "hermes"
    assert detect_format("{{ messages }}", ["[INST]", "[TOOL_CALLS]"]).name == "mistral"
    assert detect_format("List of tools: {{ tools }}", ["<|tool_call_start|>"]).name == "lfm2"
    assert detect_format("<|tool|>{{ tools }}", ["<|tool_call|>"]).name == "phi4-mini"


def test_the_text_of_a_control_token_is_no_marker() -> None:
    found = detect_format(TEMPLATES["mistral"], ["[TOOL_CALLS]", "</s>"])
    assert found.control_markers == {"[TOOL_CALLS]"}


def test_formats_are_chosen_by_name() -> None:
    assert all(format_by_name(name).name == name for name in FORMATS)
    with pytest.raises(InvalidArgument, match="hermes"):
        format_by_name("xml")


def test_a_models_format_can_be_chosen_by_name(smollm2: Model) -> None:
    renderer = ChatRenderer(smollm2.text)
    assert renderer.output_format.name == "hermes"
    renderer.choose_output_format("mistral")
    assert renderer.output_format.name == "mistral"
    with pytest.raises(InvalidArgument, match="hermes"):
        renderer.choose_output_format("xml")


def test_every_format_but_channels_reads_the_calls_that_the_system_text_describes() -> None:
    names = {name for name, form in FORMATS.items() if "<tool_call>" in form.markers}
    assert names == set(FORMATS) - {"plain", "harmony"}
