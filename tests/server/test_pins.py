"""Pins of prefixes over HTTP: `cache_control`, `prompt_cache_key`, the list, and metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server, serving
from server.test_written_answers import THINKING_TEMPLATE

from kvkeep.client import Client
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys
from tests.scripted_model import ScriptedEngine, model_with_text_of

EPHEMERAL = {"type": "ephemeral"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HOUR = {**EPHEMERAL, "ttl": "1h"}
SYSTEM = "You answer in one word. " * 50
TOOL = {"name": "look", "description": "Look at a thing.", "input_schema": {"type": "object"}}


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        for pin in pins(client):
            client.delete(f"/v1/prefix/pins/{pin['id']}").raise_for_status()
        yield client


def pins(client: httpx.Client) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = client.get("/v1/prefix/pins").json()["data"]
    return data


def block(text: str, mark: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": mark} if mark else {})}


def ask(client: httpx.Client, *texts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Ask with a user message of blocks; return the usage of the answer."""
    messages = [{"role": "user", "content": list(texts)}]
    body = {"max_tokens": 1, "messages": messages, **fields}
    response = client.post("/v1/messages", json=body)
    usage: dict[str, Any] = response.raise_for_status().json()["usage"]
    return usage


def count(client: httpx.Client, *texts: dict[str, Any], **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": list(texts)}], **fields}
    return int(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])


def test_usage_divides_the_prompt_at_the_last_mark(client: httpx.Client) -> None:
    system = [block(f"One. {SYSTEM}", EPHEMERAL)]
    question = block("What is it? " * 10)
    total, short = count(client, question, system=system), count(client, block("-"), system=system)
    first = ask(client, question, system=system)
    created = first["cache_creation_input_tokens"]
    assert abs(created - short) < 10
    assert first["cache_read_input_tokens"] < 128
    assert first["cache_creation"]["ephemeral_5m_input_tokens"] == created
    second = ask(client, question, system=system)
    assert second["cache_read_input_tokens"] >= created - 128
    assert second["cache_creation_input_tokens"] == max(
        0, created + first["cache_read_input_tokens"] - second["cache_read_input_tokens"]
    )
    for usage in (first, second):
        names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[name] for name in names) == total
    (pin,) = pins(client)
    assert (pin["ttl"], pin["hits"]) == (300, 1)
    assert 290 < pin["expires_in"] <= 300


def test_marks_of_an_hour_count_apart(client: httpx.Client) -> None:
    fields = {"system": [block(f"Two. {SYSTEM}", HOUR)], "tools": [TOOL]}
    usage = ask(client, block("What is it? " * 10, EPHEMERAL), block("Say."), **fields)
    creation = usage["cache_creation"]
    assert creation["ephemeral_1h_input_tokens"] > 200
    assert 20 < creation["ephemeral_5m_input_tokens"] < 60
    assert usage["cache_creation_input_tokens"] == sum(creation.values())
    assert 0 < usage["input_tokens"] < 12
    assert [pin["ttl"] for pin in pins(client)] == [300, 3600]


@pytest.mark.parametrize(
    "place", ["tool", "system", "message", "request", "earlier message", "stream"]
)
def test_a_mark_is_found_wherever_it_is(client: httpx.Client, place: str) -> None:
    def mark(at: str) -> dict[str, Any]:
        return {"cache_control": EPHEMERAL} if at == place else {}

    body = {
        "max_tokens": 1,
        "tools": [{**TOOL, **mark("tool")}],
        "system": [{**block(f"{place}. {SYSTEM}"), **mark("system")}],
        "messages": [
            {"role": "user", "content": [{**block("Hi."), **mark("earlier message")}]},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": [{**block("A word."), **mark("message")}]},
        ],
        **mark("request"),
        **({"stream": True, **mark("stream")} if place == "stream" else {}),
    }
    total = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    client.post("/v1/messages", json=body).raise_for_status()
    (pin,) = pins(client)
    assert 200 < pin["tokens"] < total


def test_marks_behind_answers_count_the_tokens_that_were_sampled(client: httpx.Client) -> None:
    messages: list[dict[str, Any]] = []
    for question in ("Name a town.", "And a river?"):
        messages.append({"role": "user", "content": [block(question, EPHEMERAL)]})
        body = {"max_tokens": 40, "messages": messages, "temperature": 0, "system": SYSTEM}
        answer = client.post("/v1/messages", json=body).raise_for_status().json()
        messages.append({"role": "assistant", "content": answer["content"]})
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] > 250
    assert 0 < usage["cache_creation_input_tokens"] < 40
    assert 0 < usage["input_tokens"] < 6
    assert len(pins(client)) == 1


def test_marks_behind_cleared_results_are_found(client: httpx.Client) -> None:
    """The prompt has other text before them than the client sent."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for number in range(4):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "A stone. " * 20}
        messages.append({"role": "assistant", "content": [call]})
        messages.append({"role": "user", "content": [result]})
    messages[-1]["content"].append(block("What was it? " * 10, EPHEMERAL))
    messages += [{"role": "assistant", "content": "-"}, {"role": "user", "content": "Say it."}]
    trigger, keep = {"type": "tool_uses", "value": 1}, {"type": "tool_uses", "value": 1}
    edit = {"type": "clear_tool_uses_20250919", "trigger": trigger, "keep": keep}
    body = {"messages": messages, "tools": [TOOL], "context_management": {"edits": [edit]}}
    answer = client.post("/v1/messages", json={**body, "max_tokens": 1}).raise_for_status().json()
    assert answer["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 3
    usage = answer["usage"]
    total = sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_"))
    (pin,) = pins(client)
    assert total - 30 < pin["tokens"] < total


def test_marks_behind_cleared_thinking_are_found(smollm2: Model, tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = []
    for number in range(3):
        question = block(f"Question {number}? " * 20, EPHEMERAL if number == 2 else None)
        thinking = {"type": "thinking", "thinking": "Hm. " * 40, "signature": ""}
        messages.append({"role": "user", "content": [question]})
        messages.append({"role": "assistant", "content": [thinking, block("Yes.")]})
    messages[-1]["content"] = "-"
    keep = {"type": "thinking_turns", "value": 1}
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]
    body = {"messages": [*messages, {"role": "user", "content": "Say it."}], "max_tokens": 1}
    folder, template = smollm2.text.folder, THINKING_TEMPLATE
    model = model_with_text_of(tmp_path / "model", folder, template=template)
    engine = ScriptedEngine(model, lambda prompt: "Yes.")
    with serving(engine) as server, server.client() as client:
        body["context_management"] = {"edits": edits}
        answer = client.post("/v1/messages", json=body).raise_for_status().json()
        assert answer["context_management"]["applied_edits"][0]["cleared_thinking_turns"] == 1
        usage = answer["usage"]
        total = sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_creation_", "cache_read_"))
        (pin,) = pins(client)
        assert total - 40 < pin["tokens"] < total


def test_a_prompt_without_marks_is_not_pinned(client: httpx.Client) -> None:
    usage = ask(client, block("Hello"), system=f"Three. {SYSTEM}")
    assert usage["cache_creation_input_tokens"] == 0
    assert pins(client) == []


@pytest.mark.parametrize(
    ("api", "fields", "ttl"),
    [
        (CHAT, {"prompt_cache_key": "chat-1", "prompt_cache_retention": "in_memory"}, 300),
        (CHAT, {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_key": "chat-1"}, 1_800),
        (CHAT, {"prompt_cache_retention": "24h"}, 86_400),
        (RESPONSES, {"prompt_cache_key": "chat-1"}, 300),
        (RESPONSES, {"prompt_cache_key": "chat-1", "prompt_cache_retention": "24h"}, 86_400),
    ],
)
def test_openai_keys_and_retentions_pin_the_session(
    client: httpx.Client, api: str, fields: dict[str, Any], ttl: float
) -> None:
    question = [{"role": "user", "content": f"{api}: what is it?"}]
    name = "messages" if api == CHAT else "input"
    limit = "max_tokens" if api == CHAT else "max_output_tokens"
    for _ in range(2):
        response = client.post(api, json={name: question, limit: 1, "store": False, **fields})
        response.raise_for_status()
        assert "X-Kvkeep-Ignored" not in response.headers
    (pin,) = pins(client)
    assert (pin["ttl"], pin["prompt_cache_key"]) == (ttl, fields.get("prompt_cache_key"))
    released = client.delete(f"/v1/prefix/pins/{pin['id']}").json()
    assert released == {"id": pin["id"], "object": "prefix_pin", "deleted": True}
    assert pins(client) == []
    for pin_id in (pin["id"], "pin", "x" * 100):
        again = client.delete(f"/v1/prefix/pins/{pin_id}")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "pin_not_found")


def test_the_python_client_lists_and_releases_pins(
    server: RunningServer, client: httpx.Client
) -> None:
    ask(client, block("Hello", EPHEMERAL))
    with Client(server.url) as python_client:
        (pin,) = python_client.pins()
        assert python_client.release_pin(pin["id"])["deleted"]
        assert python_client.pins() == []


def test_pins_are_invisible_to_other_keys(smollm2: Model, tmp_path: Path) -> None:
    ada_key, bob_key = "a" * 16, "b" * 16
    keys = ApiKeys((ada_key, bob_key))
    with (
        running_server(smollm2, tmp_path / "server", keys) as running,
        running.client(ada_key) as ada,
        running.client(bob_key) as bob,
    ):
        ask(ada, block("Hello", EPHEMERAL))
        (pin,) = pins(ada)
        assert pins(bob) == []
        assert bob.delete(f"/v1/prefix/pins/{pin['id']}").status_code == 404
        assert pins(ada)[0]["id"] == pin["id"]
        assert "kvkeep_prefix_pins 1.0" in ada.get("/metrics").text


def marked(text: str, mark: dict[str, str] | None, kind: str = "input_text") -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part if mark is None else {**part, "prompt_cache_breakpoint": mark}


@pytest.mark.parametrize(
    ("path", "field", "kind"), [(CHAT, "messages", "text"), (RESPONSES, "input", "input_text")]
)
def test_breakpoints_of_parts_pin_the_prompt_up_to_their_end(
    client: httpx.Client, path: str, field: str, kind: str
) -> None:
    explicit = {"mode": "explicit"}
    parts = [marked(f"{field} A. {SYSTEM}", {**explicit, "ttl": "12h"}, kind)]
    parts += [marked("Second. ", None, kind), marked("Third. ", explicit, kind)]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And now?"},
    ]
    client.post(path, json={field: messages, "max_tokens": 1, "max_output_tokens": 1})
    entries = sorted((pin["tokens"], pin["ttl"]) for pin in pins(client))
    assert [seconds for _, seconds in entries] == [43_200, 1_800]
    cut = [{"role": "user", "content": parts[:1]}]
    counted = client.post(f"{path}/input_tokens", json={field: cut}).json()["input_tokens"]
    assert 0 < counted - entries[0][0] < 12  # the end of the message, and the beginning of another
    assert 0 < entries[1][0] - entries[0][0] < 12
    long = {**explicit, "ttl": "12h"}  # of the first of more than four marks, which do not count
    marks = [
        {"role": "user", "content": [marked(f"{i}. ", explicit if i > 1 else long, kind)]}
        for i in range(6)
    ]
    for pin in pins(client):
        client.delete(f"/v1/prefix/pins/{pin['id']}")
    client.post(path, json={field: marks, "max_tokens": 1, "max_output_tokens": 1})
    assert {pin["ttl"] for pin in pins(client)} == {1_800}


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), (RESPONSES, "input")], ids=["chat", "responses"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_prewarming_evaluates_and_pins_the_prompt_without_an_answer(
    client: httpx.Client, path: str, field: str, stream: bool
) -> None:
    text = f"Prewarm {path} {stream}. {SYSTEM}"
    body = {field: [{"role": "user", "content": text}], "prompt_cache_options": {"prewarm": True}}
    body["prompt_cache_options"]["comparison_response_id"] = "resp_1"
    response = client.post(path, json={**body, "stream": stream}).raise_for_status()
    assert response.headers["X-Kvkeep-Ignored"] == "prompt_cache_options.comparison_response_id"
    (pin,) = pins(client)
    assert (pin["ttl"], pin["tokens"] > 200) == (1_800, True)
    if stream:
        assert "delta.content" not in response.text
        assert '"content": "' not in response.text
    elif path == RESPONSES:
        answer = response.json()
        assert (answer["output"], answer["status"]) == ([], "completed")
        assert answer["usage"]["output_tokens"] == 0
    else:
        assert response.json()["choices"][0]["message"]["content"] == ""
        assert response.json()["usage"]["completion_tokens"] == 0
    limits = {"max_tokens": 1, "max_output_tokens": 1}
    usage = client.post(path, json={field: body[field], **limits}).json()["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    assert details["cached_tokens"] > 200


def test_the_explicit_mode_pins_nothing_without_breakpoints(client: httpx.Client) -> None:
    options = {"ttl": "30m", "mode": "explicit"}
    body = {"input": SYSTEM, "prompt_cache_options": options, "max_output_tokens": 1}
    client.post(RESPONSES, json=body).raise_for_status()
    assert pins(client) == []
