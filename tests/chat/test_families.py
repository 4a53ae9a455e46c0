"""Answers of all families of models, through the whole server: every API gives the same parts."""

import re
from pathlib import Path

import pytest

from kvkeep.chat.formats.registry import FORMATS
from kvkeep.chat.messages import (
    Chat,
    Message,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from tests.chat.api_answers import APIS, Part, form_cases, streams, write
from tests.chat.written_answers import FORMS
from tests.scripted_model import ScriptedEngine, family_model
from tests.server.conftest import serving

SIGNS = {  # texts of a template by which a format is detected
    "hermes": (),
    "qwen3-coder": ("<function=", "<parameter="),
    "glm": ("<arg_key>",),
    "seed-oss": ("<seed:tool_call>",),
    "minimax": ("<minimax:tool_call>",),
    "apertus": ("<|tools_prefix|>",),
    "apriel": ("<tool_calls>", "[BEGIN FINAL RESPONSE]"),
    "ernie": ("<response>", "<tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "gemma3": ("<start_of_turn>",),
    "gemma4": ("<|tool_call>",),
    "function-gemma": ("<start_function_call>",),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "command-r7b": ("<|START_ACTION|>",),
    "command-r": ("<|CHATBOT_TOKEN|>", "Action:"),
    "phi4-mini": ("<|tool|>", "<|/tool|>"),
    "granite": ("<|tool_call|>",),
    "olmo3": ("<function_calls>",),
    "lfm2": ("<|tool_list_start|>",),
    "nemotron2": ("<TOOLCALL>",),
    "harmony": ("<|channel|>", "<|message|>"),
    "functionary": (">>>all",),
}
WEATHER = Tool(
    "weather",
    "Tell the weather.",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["text"],
    },
)
CALLS = [("weather", {"text": "Paris", "count": 2}), ("weather", {"text": 'Nice "É"\n'})]
QUESTION = Message("user", (TextPart("How is the weather?"),))


_MARKER = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")


@pytest.mark.parametrize(("name", "api"), form_cases(FORMS))
def test_every_api_gives_the_parts_that_a_family_writes(
    name: str, api: str, tmp_path: Path
) -> None:
    form = FORMS[name]
    markers = FORMATS[form.output_format].markers
    control_texts = [marker for marker in markers if _MARKER.fullmatch(marker)]
    model = family_model(tmp_path, control_texts, SIGNS[form.output_format])
    assert model.renderer.output_format.name == form.output_format
    calls = CALLS[:1] if FORMATS[form.output_format].channels else CALLS  # a call ends an answer
    thought = ("reasoning", "It depends on the place.")
    spoken = [("text", "I will look.")] if form.text_first else []
    first: list[Part] = [thought, *spoken, *(("call", call) for call in calls)]
    last: list[Part] = [("reasoning", "Sunny, then."), ("text", "It is <b>sunny</b>.\n\nGo out!")]
    results = [
        Message(
            "assistant",
            (
                ReasoningPart(thought[1]),
                *(TextPart(text) for _, text in spoken),
                *(ToolCall(f"call_{i}", *call) for i, call in enumerate(calls)),
            ),
        ),
        Message(
            "tool",
            tuple(ToolResult(f"call_{i}", (TextPart(f"sunny {i}"),)) for i in range(len(calls))),
        ),
    ]
    answers: list[str] = []
    engine = ScriptedEngine(model, lambda prompt: answers.pop(0), settings={"max_kv_size": 4096})
    with serving(engine) as server, server.client() as client:
        for turn, (messages, parts) in enumerate(
            (([QUESTION], first), ([QUESTION, *results], last))
        ):
            answers.append(write(form, parts))
            chat = Chat(tuple(messages), (WEATHER,))
            assert APIS[api](client, chat, streams(name, api, turn)) == parts
