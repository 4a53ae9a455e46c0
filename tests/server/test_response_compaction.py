"""`/v1/responses/compact`: the item, its cells, restarts, other owners, and its text fallback."""

import asyncio
import base64
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvkeep.chat.compaction_items import (
    CompactedHistory,
    compaction_item,
    expand_compaction,
    read_compaction,
)
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys
from kvkeep.server.limits import MAX_ENTRIES, MAX_MESSAGES, MAX_VALUES
from kvkeep.server.openai import compaction
from tests.scripted_model import model_with_text_of
from tests.server.conftest import ScriptedServer, running_server

RESULT = "The harbour of the old town has seen many ships come and go. " * 5
SETTINGS = {"max_kv_size": 1200, "policy": "full"}


@contextmanager
def serving_client(model: Model, folder: Path) -> Iterator[httpx.Client]:
    with running_server(model, folder, settings=SETTINGS) as running, running.client() as client:
        yield client


def agent_items(calls: int = 6) -> list[dict[str, Any]]:
    """A task, and calls with long results."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "The gate code is 4711. Read on."}]
    for number in range(calls):
        call = {"call_id": f"call_{number}", "name": "read", "arguments": f'{{"page": {number}}}'}
        output = {"type": "function_call_output", "call_id": f"call_{number}", "output": RESULT}
        items += [{"type": "function_call", **call}, output]
    return items


def ask(client: httpx.Client, items: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"input": items, "max_output_tokens": 6, "temperature": 0, "store": False, **fields}
    response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def compact(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/responses/compact", json={"model": "x", **body})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def evaluated(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"])


def test_a_conversation_goes_on_from_compacted_cells_also_after_a_restart(
    smollm2: Model, tmp_path: Path
) -> None:
    question = {"role": "user", "content": "What is the gate code?"}
    with (
        running_server(smollm2, tmp_path, settings=SETTINGS) as running,
        running.client() as client,
    ):
        whole = ask(client, [*agent_items(), question])
        result = compact(client, input=agent_items())
        assert result["object"] == "response.compaction"
        *messages, item = result["output"]
        assert [message["role"] for message in messages] == ["user"]
        assert item["type"] == "compaction"
        history = [*result["output"], question]
        first = ask(client, history)
        assert evaluated(first) < 60
        assert first["usage"]["input_tokens"] < whole["usage"]["input_tokens"] - 200
        history += [*first["output"], {"role": "user", "content": "Thank you. And now?"}]
        assert evaluated(ask(client, history)) < 60  # from the session of the turn before
        again = compact(client, input=history)
        assert again["output"][-1]["type"] == "compaction"
        assert evaluated(ask(client, [*again["output"], question])) < 60
    with (
        running_server(smollm2, tmp_path, settings=SETTINGS) as running,
        running.client() as client,
    ):
        resumed = ask(client, [*result["output"], question])
        assert evaluated(resumed) < 60
        assert resumed["output"][0]["content"] == first["output"][0]["content"]


def test_items_are_text_for_other_owners_and_where_the_session_is_gone(
    smollm2: Model, tmp_path: Path
) -> None:
    question = {"role": "user", "content": "What is the gate code?"}
    file, names = tmp_path / "keys", ("the-first-owners-key", "the-second-owners-key")
    file.write_text("\n".join(names))
    keys = ApiKeys.read(file, tmp_path)
    with (
        running_server(smollm2, tmp_path / "server", keys, settings=SETTINGS) as running,
        running.client(names[0]) as first,
        running.client(names[1]) as second,
    ):
        result = compact(first, input=agent_items(4))
        history = read_compaction(result["output"][-1])
        assert history is not None
        assert evaluated(ask(first, [*result["output"], question])) < 60
        other = ask(second, [*result["output"], question])
        assert other["usage"]["input_tokens_details"]["cached_tokens"] == 0
        for path in ("", "/memory", "/text"):
            assert second.get(f"/v1/sessions/{history.handle}{path}").status_code == 404
        assert second.post(f"/v1/sessions/{history.handle}/compact", json={}).status_code == 404
        forged = compaction_item(CompactedHistory(history.handle, (question,)))
        assert ask(second, [forged])["usage"]["input_tokens_details"]["cached_tokens"] < 40
        assert first.delete(f"/v1/sessions/{history.handle}").status_code == 200
        assert ask(first, [*result["output"], question])["status"] in (
            "completed",
            "incomplete",
        )


def test_a_repeated_request_with_its_key_compacts_once(smollm2: Model, tmp_path: Path) -> None:
    with serving_client(smollm2, tmp_path) as client:
        body = {"model": "x", "input": agent_items(1)}
        results = [
            client.post(path, json=body, headers={"Idempotency-Key": key}).json()
            for path, key in (("/v1/responses/compact", "a"),) * 2 + (("/responses/compact", "b"),)
        ]
        assert results[0] == results[1]
        assert results[0]["id"] != results[2]["id"]
        assert len(client.get("/v1/sessions").json()["data"]) == 2
        other = {"model": "x", "input": agent_items(2)}
        headers = {"Idempotency-Key": "a"}
        refused = client.post("/v1/responses/compact", json=other, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "key_reused")


def test_a_response_compacts_its_conversation_beyond_a_threshold(
    smollm2: Model, tmp_path: Path
) -> None:
    question = {"role": "user", "content": "What is the gate code?"}
    fields: dict[str, Any] = {
        "context_management": [
            {"type": "compaction", "compact_threshold": 300},
            {"type": "other_kind"},
        ]
    }
    with serving_client(smollm2, tmp_path) as client:
        short = ask(client, [question], **fields)
        assert [item["type"] for item in short["output"]] == ["message"]
        history = [*agent_items(5), question]
        answer = ask(client, history, store=True, **fields)
        assert [item["type"] for item in answer["output"]] == ["compaction", "message"]
        assert read_compaction(answer["output"][0]) is not None
        assert evaluated(answer) < 60  # from the cells that were compacted
        thanks = {"role": "user", "content": "Thank you. And now?"}
        for items, more in (
            ([*history, *answer["output"], thanks], {}),
            ([*answer["output"], thanks], {}),  # without what came before the item
            ([thanks], {"previous_response_id": answer["id"]}),
        ):
            later = ask(client, items, **fields, **more)
            assert [item["type"] for item in later["output"]] == ["message"]
            assert evaluated(later) < 60
        body = {"input": history, "max_output_tokens": 4, "stream": True, **fields}
        response = client.post("/v1/responses", json=body)
        assert "context_management.other_kind" in response.headers["X-Kvkeep-Ignored"]
        events = [
            json.loads(line[6:]) for line in response.text.splitlines() if line[:6] == "data: "
        ]
        added = [event for event in events if event["type"] == "response.output_item.added"]
        assert [event["output_index"] for event in added] == [0, 1]
        assert [event["item"]["type"] for event in added] == ["compaction", "message"]
        assert events[-1]["response"]["output"][0] == added[0]["item"]


def test_foreign_items_are_left_out_with_a_warning(smollm2: Model, tmp_path: Path) -> None:
    with (
        running_server(smollm2, tmp_path, settings=SETTINGS) as running,
        running.client() as client,
    ):
        foreign = {"type": "compaction", "encrypted_content": "gAAAAABo_opaque"}
        body = {"input": [foreign, {"role": "user", "content": "Hi"}], "max_output_tokens": 2}
        response = client.post("/v1/responses", json=body)
        assert response.status_code == 200
        assert "compaction item" in response.headers["X-Kvkeep-Warning"]
        for bad in ({"input": []}, {"input": 7}, {"input": [{"type": "message", "role": "x"}]}):
            assert client.post("/v1/responses/compact", json=bad).status_code == 400


def test_expanded_items_are_the_history_then_what_it_does_not_contain() -> None:
    task = {"role": "user", "content": "Do it."}
    item = compaction_item(CompactedHistory("cmp_1", (task,)))
    news = {"role": "developer", "content": "It is Monday."}
    later = {"role": "user", "content": "Go on."}
    old = compaction_item(CompactedHistory("cmp_0", ()))
    expanded, handle, warnings = expand_compaction([news, old, task, item, later])
    assert expanded == [task, news, later]
    assert (handle, warnings) == ("cmp_1", [])
    assert expand_compaction([task, later]) == ([task, later], None, [])


@pytest.mark.parametrize("content", [None, "", "kvkeep1.", "kvkeep1.AAAA", "kvkeep1.!!!", 5])
def test_damaged_items_are_not_read(content: Any) -> None:
    assert read_compaction({"type": "compaction", "encrypted_content": content}) is None


def item_of(text: str, encoding: str = "utf-8") -> dict[str, Any]:
    """A compaction item of any text in place of its JSON."""
    packed = base64.urlsafe_b64encode(zlib.compress(text.encode(encoding))).decode()
    return {"type": "compaction", "encrypted_content": f"kvkeep1.{packed}"}


def test_a_history_in_another_encoding_than_utf_8_is_not_read() -> None:
    """Its values would not be counted."""
    text = '{"handle": "cmp_1", "items": []}'
    assert read_compaction(item_of(text), compaction._parse_history)
    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        assert read_compaction(item_of(text, encoding), compaction._parse_history) is None


def test_one_item_of_ours_is_unpacked_at_most() -> None:
    task, tried = {"role": "user", "content": "Do it."}, list[bytes]()

    def parse(document: bytes) -> CompactedHistory:
        tried.append(document)
        raise ValueError

    older = compaction_item(CompactedHistory("cmp_0", ({"role": "user", "content": "Before."},)))
    foreign = {"type": "compaction", "encrypted_content": "gAAAAABo_opaque"}
    items = [older, item_of("broken"), foreign, task]
    expanded, handle, warnings = expand_compaction(items, parse)
    assert (expanded, handle, tried) == ([task], None, [b"broken"])
    assert [warning.split()[-1] for warning in warnings] == ["read", "out"]
    assert expand_compaction(items)[0] == [task]


MESSAGE = '{"role": "user", "content": "Before."}'


@pytest.mark.parametrize(
    "text",
    [
        '{"handle": "cmp_1", "items": [' + "[]," * MAX_VALUES + "[]]}",
        '{"handle": "cmp_1", "items": [' + f"{MESSAGE}," * MAX_MESSAGES + f"{MESSAGE}]}}",
        f'{{"handle": "cmp_1", "items": [{MESSAGE}, {{"a": [{"0," * MAX_ENTRIES}0]}}]}}',
        f'{{"handle": "cmp_1", "items": [{MESSAGE}, {{"a": {"[" * 900}{"]" * 900}}}]}}',
        '{"handle": "cmp_1", "items": [{"role": "user", "content": "\\ud800"}]}',
        '{"handle": "cmp_1", "items": [{"role": "user", "content": NaN}]}',
    ],
    ids=["values", "messages", "entries", "nesting", "surrogate", "NaN"],
)
def test_the_history_in_an_item_has_the_limits_of_a_body(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """It is left out, and unpacked in another thread than the event loop's."""
    in_loop, expand = set[bool](), compaction.expand_compaction

    def recorded(*arguments: Any) -> Any:
        in_loop.add(asyncio._get_running_loop() is not None)
        return expand(*arguments)

    monkeypatch.setattr(compaction, "expand_compaction", recorded)
    scripted.write("Yes.")
    question = {"role": "user", "content": "Hi"}
    with scripted.client() as client:
        response = client.post("/v1/responses", json={"input": [item_of(text), question]})
        whole = client.post("/v1/responses", json={"input": [question]}).json()
    assert response.status_code == 200, response.text
    assert "damaged or too large" in response.headers["X-Kvkeep-Warning"]
    assert in_loop == {False}
    assert response.json()["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_the_oldest_compacted_sessions_are_dropped(smollm2: Model, tmp_path: Path) -> None:
    small = model_with_text_of(tmp_path / "model", smollm2.text.folder)
    with serving_client(small, tmp_path / "server") as client:
        items = agent_items(1)
        client.post("/v1/sessions", json={"name": "cmp_notes"}).raise_for_status()
        results = [compact(client, input=[*items, *items[:number]]) for number in range(2)]
        results += [compact(client, input=items) for _ in range(16)]
        names = [each["name"] for each in client.get("/v1/sessions").json()["data"]]
        assert len(names) == 1 + 16
        assert "cmp_notes" in names
        question = {"role": "user", "content": "What is the gate code?"}
        assert ask(client, [*results[0]["output"], question])["output"]  # from its text
