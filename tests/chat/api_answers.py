"""The parts of an answer that each API gives, streamed or whole."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from kvkeep.chat import anthropic_messages, ollama_chat, openai_chat, openai_responses
from kvkeep.chat.formats.registry import FORMATS
from kvkeep.chat.messages import Chat
from tests.chat.written_answers import FORMS, Form

Part = tuple[str, Any]  # kind, and a text or (name, arguments)
Schema = Mapping[str, Any] | None


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


def ask_chat(client: httpx.Client, chat: Chat, stream: bool, schema: Schema = None) -> list[Part]:
    body = {**openai_chat.format_chat(chat), "stream": stream}
    if schema is not None:
        named = {"name": "answer", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
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


def ask_responses(
    client: httpx.Client, chat: Chat, stream: bool, schema: Schema = None
) -> list[Part]:
    body = {**openai_responses.format_chat(chat), "stream": stream}
    if schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
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


def ask_messages(
    client: httpx.Client, chat: Chat, stream: bool, schema: Schema = None
) -> list[Part]:
    body = {**anthropic_messages.format_chat(chat), "max_tokens": 2_000, "stream": stream}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1_500}
    if schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
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


def ask_ollama(client: httpx.Client, chat: Chat, stream: bool, schema: Schema = None) -> list[Part]:
    body: dict[str, Any] = {"model": "smollm2", "stream": stream, "think": True}
    body["messages"] = ollama_chat.format_messages(chat.messages)
    body["tools"] = ollama_chat.format_tools(chat.tools)
    if schema is not None:
        body["format"] = schema
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


APIS: dict[str, Callable[..., list[Part]]] = {
    "chat": ask_chat,
    "responses": ask_responses,
    "messages": ask_messages,
    "ollama": ask_ollama,
}

# Forms that differ in how they go through an API: with and without channels, with bare JSON, and
# with other markers of reasoning and of calls. `test_output_reader.py` reads all forms.
_IN_CI = {
    ("hermes", "chat"),
    ("llama3", "responses"),
    ("mistral", "messages"),
    ("gemma4", "ollama"),
    ("deepseek", "messages"),
    ("harmony", "responses"),
    ("harmony", "chat"),
}


def form_cases(names: Iterable[str]) -> list[Any]:
    """Return all pairs of a form and an API; most run before releases only."""
    pairs = [(name, api) for name in names for api in APIS]
    return [pytest.param(*x, marks=() if x in _IN_CI else pytest.mark.slow) for x in pairs]


def streams(name: str, api: str, number: int) -> bool:
    """Whether an answer is streamed: by turns, for forms, APIs and answers."""
    return bool((list(FORMS).index(name) + list(APIS).index(api) + number) % 2)
