"""Answers of all families of models, through the whole server: every API gives the same parts."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvkeep.chat import anthropic_messages, ollama_chat, openai_chat, openai_responses
from kvkeep.chat.messages import (
    Chat,
    Message,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from kvkeep.chat.output_format import FORMATS
from tests.chat.written_answers import FORMS, Form
from tests.scripted_model import ScriptedEngine, family_model
from tests.server.conftest import serving

Part = tuple[str, Any]  # kind, and a text or (name, arguments)
SIGNS = {  # texts of a template by which a format is detected
    "hermes": (),
    "qwen3-coder": ("<function=", "<parameter="),
    "glm": ("<arg_key>",),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "gemma3": ("<start_of_turn>",),
    "gemma4": ("<|tool_call>",),
    "function-gemma": ("<start_function_call>",),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "command-r7b": ("<|START_ACTION|>",),
    "command-r": ("<|CHATBOT_TOKEN|>", "Action:"),
    "granite": ("<|tool_call|>",),
    "olmo3": ("<function_calls>",),
    "harmony": ("<|channel|>", "<|message|>"),
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


def write(form: Form, parts: list[Part]) -> str:
    """Write parts as a model of a family does."""
    is_harmony = FORMATS[form.output_format].channels
    texts, calls = [], [value for kind, value in parts if kind == "call"]
    for kind, value in parts:
        if kind == "reasoning":
            texts.append(f"{form.reasoning[0]}{value}{form.reasoning[1]}")
        elif kind == "text" and is_harmony:
            texts.append(f"<|channel|>final<|message|>{value}<|end|>")
        elif kind == "text":
            texts.append(value)
    if calls:
        texts.append(form.write_calls(calls))
    between = "<|start|>assistant" if is_harmony else "\n"
    return between.join(texts).replace("\x00", "")


def ask_chat(client: httpx.Client, chat: Chat, stream: bool) -> list[Part]:
    body = {**openai_chat.format_chat(chat), "stream": stream}
    if not stream:
        message = post(client, "/v1/chat/completions", body)["choices"][0]["message"]
        return openai_parts(message)
    joined: dict[str, Any] = {"tool_calls": []}
    for event in events(client, "/v1/chat/completions", body):
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            for field in ("reasoning_content", "content"):
                joined[field] = joined.get(field, "") + (delta.get(field) or "")
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(joined["tool_calls"]):
                    joined["tool_calls"].append(call)
                else:
                    function = joined["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return openai_parts(joined)


def openai_parts(message: Mapping[str, Any]) -> list[Part]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [
        *(
            [("reasoning", message["reasoning_content"])]
            if message.get("reasoning_content")
            else []
        ),
        *([("text", message["content"].strip())] if (message.get("content") or "").strip() else []),
        *(("call", (call["name"], json.loads(call["arguments"]))) for call in calls),
    ]


def ask_responses(client: httpx.Client, chat: Chat, stream: bool) -> list[Part]:
    body = {**openai_responses.format_chat(chat), "stream": stream}
    if not stream:
        return response_parts(post(client, "/v1/responses", body))
    deltas: dict[str, str] = {}
    done: dict[str, Any] = {}
    for event in events(client, "/v1/responses", body):
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        if event["type"] == "response.completed":
            done = event["response"]
    for item in done["output"]:  # what came in pieces is the whole item
        text = item.get("arguments") or "".join(p["text"] for p in item.get("content") or ())
        text = text or "".join(part["text"] for part in item.get("summary") or ())
        assert deltas[item["id"]] == text
    return response_parts(done)


def response_parts(response: Mapping[str, Any]) -> list[Part]:
    parts: list[Part] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            parts.append(("call", (item["name"], json.loads(item["arguments"]))))
            continue
        kind = "reasoning" if item["type"] == "reasoning" else "text"
        texts = [part["text"] for part in item.get("content") or item.get("summary") or ()]
        if "".join(texts).strip():
            parts.append((kind, "".join(texts).strip()))
    return parts


def ask_messages(client: httpx.Client, chat: Chat, stream: bool) -> list[Part]:
    body = {**anthropic_messages.format_chat(chat), "max_tokens": 2_000, "stream": stream}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1_500}
    if not stream:
        return block_parts(post(client, "/v1/messages", body)["content"])
    blocks: list[dict[str, Any]] = []
    for event in events(client, "/v1/messages", body):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for field in ("text", "thinking"):
                if field in delta:
                    block[field] += delta[field]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    return block_parts(blocks)


def block_parts(blocks: list[dict[str, Any]]) -> list[Part]:
    parts: list[Part] = []
    for block in blocks:
        if block["type"] == "tool_use":
            parts.append(("call", (block["name"], block["input"])))
        elif block["type"] == "thinking":
            parts.append(("reasoning", block["thinking"]))
        elif block["text"].strip():
            parts.append(("text", block["text"].strip()))
    return parts


def ask_ollama(client: httpx.Client, chat: Chat, stream: bool) -> list[Part]:
    body: dict[str, Any] = {"model": "smollm2", "stream": stream, "think": True}
    body["messages"] = ollama_chat.format_messages(chat.messages)
    body["tools"] = ollama_chat.format_tools(chat.tools)
    with client.stream("POST", "/api/chat", json=body) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
        assert response.status_code == 200, lines
    messages = [line["message"] for line in lines]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    joined = {
        "reasoning_content": "".join(message.get("thinking") or "" for message in messages),
        "content": "".join(message.get("content") or "" for message in messages),
    }
    return [*openai_parts(joined), *(("call", (c["name"], c["arguments"])) for c in calls)]


def post(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event


APIS: dict[str, Callable[[httpx.Client, Chat, bool], list[Part]]] = {
    "chat": ask_chat,
    "responses": ask_responses,
    "messages": ask_messages,
    "ollama": ask_ollama,
}
_MARKER = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]")


IN_FIRST_TIER = ("hermes", "mistral", "harmony")
CASES = [
    pytest.param(name, marks=() if name in IN_FIRST_TIER else pytest.mark.extended)
    for name in FORMS
]


@pytest.mark.parametrize("name", CASES)
def test_every_api_gives_the_parts_that_a_family_writes(name: str, tmp_path: Path) -> None:
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
        for ask in APIS.values():
            for stream in (False, True):
                for messages, parts in (([QUESTION], first), ([QUESTION, *results], last)):
                    answers.append(write(form, parts))
                    chat = Chat(tuple(messages), (WEATHER,))
                    assert ask(client, chat, stream) == parts, (ask, stream)
