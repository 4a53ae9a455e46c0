"""Answers that clients send back in other bytes: their history reuses the tokens of the model."""

import json
import os
import random
import shutil
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from full_disk import small_files_only

from kvkeep.chat.messages import Message, TextPart
from kvkeep.chat.written import WrittenAnswer, WrittenAnswers, tokens_digest
from kvkeep.engine.answer_files import AnswerLog
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys
from tests.scripted_model import ScriptedEngine, model_with_text_of
from tests.server.conftest import RunningServer, ScriptedServer, running_server, serving

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
QUESTION = [{"role": "user", "content": "What is the weather in Cologne?"}]
# Other spaces, order of keys and escapes than those of any template, and a line break behind it.
CALL = '<tool_call>{"name":"weather","arguments" :{"days":3,  "city":"K\\u00f6ln"}}\n</tool_call>\n'
TEXT = "\n\nIt is sunny.\n"
Api = Callable[[httpx.Client, list[Any], bool], list[Any]]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def canonical(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


def openai_chat(client: httpx.Client, history: list[Any], stream: bool) -> list[Any]:
    body = {"messages": history, "tools": [TOOL], "stream": stream}
    response = client.post("/v1/chat/completions", json=body)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(response)]
        content = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        ids = [call["id"] for call in calls if "id" in call]
    else:
        message = response.json()["choices"][0]["message"]
        content, calls = message["content"], message.get("tool_calls", ())
        arguments = "".join(call["function"]["arguments"] for call in calls)
        ids = [call["id"] for call in calls]
    if not ids:
        return [{"role": "assistant", "content": content.strip()}]
    function = {"name": "weather", "arguments": canonical(arguments)}
    call = {"id": ids[0], "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": ids[0], "content": "sunny"}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, result]


def openai_responses(client: httpx.Client, history: list[Any], stream: bool) -> list[Any]:
    tool = {"type": "function", **FUNCTION}
    body = {"input": history, "tools": [tool], "stream": stream, "store": False}
    response = client.post("/v1/responses", json=body)
    answer = events(response)[-1]["response"] if stream else response.json()
    items = list[Any]()
    for item in answer["output"]:
        if item["type"] == "function_call":
            output = {"type": "function_call_output", "call_id": item["call_id"]}
            items += [{**item, "arguments": canonical(item["arguments"])}]
            items += [{**output, "output": "sunny"}]
        else:
            items.append(item)
    return items


def anthropic(client: httpx.Client, history: list[Any], stream: bool) -> list[Any]:
    tool = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
    body = {"messages": history, "tools": [tool], "max_tokens": 99, "stream": stream}
    response = client.post("/v1/messages", json=body)
    blocks = list[dict[str, Any]]()
    if stream:
        for event in events(response):
            delta = event.get("delta", {})
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                blocks[-1]["json"] += delta.get("partial_json", "")
                if "text" in delta:
                    blocks[-1]["text"] += delta["text"]
        for block in blocks:
            if arguments := block.pop("json"):
                block["input"] = json.loads(arguments)
    else:
        blocks = response.json()["content"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    for call in calls:
        call["input"] = dict(sorted(call["input"].items()))
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} for call in calls
    ]
    answer = [{"role": "assistant", "content": blocks}]
    return [*answer, {"role": "user", "content": results}] if results else answer


def ollama(client: httpx.Client, history: list[Any], stream: bool) -> list[Any]:
    body = {"messages": history, "tools": [TOOL], "stream": stream}
    lines = [json.loads(line) for line in client.post("/api/chat", json=body).text.splitlines()]
    content = "".join(line["message"]["content"] for line in lines)
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    if not calls:
        return [{"role": "assistant", "content": content.strip()}]
    functions = [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
    message = {"role": "assistant", "content": content}
    message["tool_calls"] = [{"function": function} for function in functions]
    return [message, {"role": "tool", "tool_name": "weather", "content": "sunny"}]


APIS = [openai_chat, openai_responses, anthropic, ollama]


def counts(server: RunningServer) -> tuple[int, int]:
    """Return how many prompt tokens were reused, and how many tokens were evaluated."""
    totals = server.service.engine.totals().result()
    return totals.reused, totals.prefilled + totals.generated


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_each_turn_resumes_the_session_of_the_turn_before(
    scripted: ScriptedServer, api: Api, stream: bool
) -> None:
    scripted.write(CALL, CALL.replace("3", "4"), TEXT, "Bye.")
    with scripted.client() as client:
        history: list[Any] = [{"role": "user", "content": f"{api.__name__} {stream}: weather?"}]
        held = 0
        for turn in range(4):
            reused, evaluated = counts(scripted)
            answer = api(client, history, stream)
            now_reused, now_evaluated = counts(scripted)
            assert turn == 0 or now_reused - reused >= held - 1  # the end token is not reused
            held = now_reused - reused + now_evaluated - evaluated
            history += answer
            if turn > 1:
                history.append({"role": "user", "content": "And now?"})


def test_answers_are_remembered_for_their_owner_alone(smollm2: Model, tmp_path: Path) -> None:
    model = model_with_text_of(tmp_path / "model", smollm2.text.folder)
    engine = ScriptedEngine(model, lambda prompt: CALL, settings={"max_kv_size": 2048})
    with serving(engine, ApiKeys(("one", "two"))) as server:
        with server.client("one") as client:
            history = QUESTION + openai_chat(client, QUESTION, False)
        lengths = set()
        for key in ("one", "two"):
            with server.client(key) as client:
                body = {"messages": history, "tools": [TOOL]}
                count = client.post("/v1/chat/completions/input_tokens", json=body).json()
                lengths.add(count["input_tokens"])
        assert len(lengths) == 2


def test_answers_in_saved_sessions_are_remembered_after_a_restart(
    smollm2: Model, tmp_path: Path
) -> None:
    """Stored responses, and pinned sessions; not by another owner."""
    model, keys = model_with_text_of(tmp_path / "model", smollm2.text.folder), ApiKeys(("1", "2"))
    settings = {"settings": {"max_kv_size": 2048}, "folder": tmp_path / "sessions"}
    body = {"input": "What is the weather in Cologne?", "tools": [{"type": "function", **FUNCTION}]}
    chat = {"tools": [TOOL], "prompt_cache_key": "k"}
    with (
        serving(ScriptedEngine(model, lambda prompt: CALL, **settings), keys) as server,
        server.client("1") as client,
    ):
        response = client.post("/v1/responses", json=body).json()
        answer = client.post("/v1/chat/completions", json=chat | {"messages": QUESTION}).json()
    length = len(model.text.encode(CALL, special=True))
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    later = body | {"input": [result], "previous_response_id": response["id"]}
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = canonical(call["function"]["arguments"])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    history = [*QUESTION, message, *results]
    with serving(ScriptedEngine(model, lambda prompt: TEXT, **settings), keys) as server:
        with server.client("2") as client:
            other = client.post("/v1/chat/completions", json=chat | {"messages": history}).json()
            assert "x_kvkeep" not in other
        with server.client("1") as client:
            again = client.post("/v1/chat/completions", json=chat | {"messages": history}).json()
            assert again["x_kvkeep"]["written"] == length
            cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= answer["usage"]["total_tokens"] - 1
            second = client.post("/v1/responses", json=later).json()
            assert second["x_kvkeep"]["written"] == length


def test_with_a_prefix_cache_all_answers_are_remembered_after_a_kill(
    smollm2: Model, tmp_path: Path
) -> None:
    """Those of unnamed chats without a pin, of one token and more, by the same model alone."""
    model = model_with_text_of(tmp_path / "model", smollm2.text.folder)
    keys, log = ApiKeys(("1", "2")), tmp_path / "a" / "answers.jsonl"

    def engine(name: str, answer: str = CALL) -> ScriptedEngine:
        folders = {"folder": tmp_path / name, "stores": tmp_path / name / "prefixes"}
        return ScriptedEngine(model, lambda _: answer, settings={"max_kv_size": 2048}, **folders)

    with serving(engine("a"), keys) as server, server.client("1") as client:
        history = [*QUESTION, *openai_chat(client, QUESTION, False)]
        while len(log.read_text().splitlines()) < 2:
            time.sleep(0.01)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    with (tmp_path / "b" / log.name).open("a") as file:
        damaged = {"owner": "1", "says": "00", "prompt": "00", "ids": [2**40]}
        file.write(f"{json.dumps(damaged)}\n{'[' * 100_000}\n")
        file.write('{"owner": "1", "says"')  # a line that was cut off by the kill
    length = len(model.text.encode(CALL, special=True))
    body = {"messages": history, "tools": [TOOL]}
    with serving(engine("b", "Yes"), keys) as server:
        with server.client("2") as client:
            assert client.post("/v1/prefix/explain", json=body).json()["written"] == 0
        with server.client("1") as client:
            assert client.post("/v1/prefix/explain", json=body).json()["written"] == length
            history += openai_chat(client, history, False)
    history.append({"role": "user", "content": "And now?"})
    with serving(engine("b"), keys) as server, server.client("1") as client:
        assert client.post("/v1/prefix/explain", json=body).json()["written"] == length + 1
    log = tmp_path / "b" / log.name  # as if it were another model's
    log.write_text('{"model": "other"}\n' + log.read_text().partition("\n")[2])
    with serving(engine("b"), keys) as server, server.client("1") as client:
        assert client.post("/v1/prefix/explain", json=body).json()["written"] == 0


def test_the_log_of_answers_is_bounded_and_keeps_the_last_used(
    smollm2: Model, tmp_path: Path
) -> None:
    path, message = tmp_path / "answers.jsonl", Message("assistant", (TextPart("first"),))
    with ThreadPoolExecutor(1) as writer:
        written = WrittenAnswers()
        AnswerLog(written, path, smollm2, writer, max_bytes=4000).load()
        for number in range(60):
            one = Message("assistant", (TextPart(f"answer {number}"),)) if number else message
            written.add("0", one, WrittenAnswer(array("i", range(number, number + 9)), b"p"))
            assert written.find("0", message)
            assert writer.submit(path.stat).result().st_size <= 4000
    again = WrittenAnswers()
    AnswerLog(again, path, smollm2, writer).load()
    entries = again.entries()
    assert 5 < len(entries) < 40
    assert all(entry in written.entries() for entry in entries)
    assert again.find("0", one) == written.find("0", one)
    assert again.find("0", message)


def test_answers_are_logged_for_their_user_alone_once_the_folder_can_be_written(
    smollm2: Model, tmp_path: Path
) -> None:
    """The log has its header, so that the next start finds the answers."""
    folder, message = tmp_path / "folder", Message("assistant", (TextPart("first"),))
    path = folder / "answers.jsonl"
    folder.touch()  # no folder: nothing can be written in it
    written, answer = WrittenAnswers(), WrittenAnswer(array("i", [1]), b"p")
    with ThreadPoolExecutor(1) as writer:
        AnswerLog(written, path, smollm2, writer).load()
        folder.unlink()
        folder.mkdir()
        for number in range(3):
            written.add("0", Message("assistant", (TextPart(f"{number}"),)), answer)
        writer.submit(path.unlink).result()
        written.add("0", message, answer)
        assert writer.submit(path.stat).result().st_mode & 0o777 == 0o600
        again = WrittenAnswers()
        AnswerLog(again, path, smollm2, writer).load()
    assert again.find("0", message)
    assert len(again.entries()) == 4


def numbered(number: int) -> Message:
    return Message("assistant", (TextPart(f"answer {number}"),))


@pytest.mark.parametrize("damage", [b"\xff", b"?", b"\x00", b"\r"])
def test_a_damaged_byte_costs_one_answer(smollm2: Model, tmp_path: Path, damage: bytes) -> None:
    path, answer = tmp_path / "answers.jsonl", WrittenAnswer(array("i", [1, 2]), b"p")
    with ThreadPoolExecutor(1) as writer:
        written = WrittenAnswers()
        AnswerLog(written, path, smollm2, writer).load()
        for number in range(5):
            written.add("0", numbered(number), answer)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:20] + damage + lines[3][21:]
    path.write_bytes(b"".join(lines))
    again = WrittenAnswers()
    AnswerLog(again, path, smollm2, writer).load()
    found = [bool(again.find("0", numbered(number))) for number in range(5)]
    assert found == [True, True, False, True, True]


def test_a_line_that_did_not_fit_on_the_disk_costs_no_later_answer(
    smollm2: Model, tmp_path: Path
) -> None:
    path, answer = tmp_path / "answers.jsonl", WrittenAnswer(array("i", range(50)), b"p")
    with ThreadPoolExecutor(1) as writer:
        written = WrittenAnswers()
        AnswerLog(written, path, smollm2, writer).load()
        written.add("0", numbered(0), answer)
        with small_files_only(writer.submit(path.stat).result().st_size + 20):
            written.add("0", numbered(1), answer)
            writer.submit(int).result()
        for number in (2, 3):
            written.add("0", numbered(number), answer)
    again = WrittenAnswers()
    AnswerLog(again, path, smollm2, writer).load()
    assert all(again.find("0", numbered(number)) for number in range(4))


@pytest.mark.parametrize("earlier", [None, 0o644], ids=["new", "readable"])
def test_the_log_of_answers_is_never_readable_by_others(
    smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int | None
) -> None:
    """It has its permissions before it is renamed."""
    path, modes, rename = tmp_path / "answers.jsonl", list[int](), os.replace
    if earlier is not None:
        path.touch()
        path.chmod(earlier)

    def recorded(source: Path, target: Path) -> None:
        modes.append(source.stat().st_mode & 0o777)
        rename(source, target)

    monkeypatch.setattr(os, "replace", recorded)
    with ThreadPoolExecutor(1) as writer:
        AnswerLog(WrittenAnswers(), path, smollm2, writer).load()
    assert modes == [0o600]


def test_an_answer_of_one_token_in_a_saved_text_is_the_one_behind_its_prompt() -> None:
    written, text = WrittenAnswers(), [4, 7, 5, 7, 6, 7]
    message = Message("assistant", (TextPart("seven"),))
    written.add("0", message, WrittenAnswer(array("i", [7]), tokens_digest(text[:3])))
    (note,) = notes = written.notes_of("0", text)
    assert note["start"] == 3
    assert written.notes_of("0", [7, 7, 7]) == []
    again = WrittenAnswers()
    again.add_noted("0", text, notes)
    assert again.find("0", message) == written.find("0", message)


def slow_notes(written: WrittenAnswers, text: list[int]) -> list[tuple[str, int, int]]:
    """Return what each note says of the answers of several tokens, compared at each place."""
    notes = list[tuple[str, int, int]]()
    for owner, digest, answer in written.entries():
        length = len(answer.ids)
        for start in range(len(text) - length + 1) if owner == "0" and length > 1 else ():
            if text[start : start + length] == list(answer.ids):
                notes.append((digest.hex(), start, length))
                break
    return notes


def test_the_notes_of_a_text_are_those_of_a_comparison_at_each_place() -> None:
    rng = random.Random(0)
    common = [rng.randrange(3) for _ in range(140)]
    for _ in range(60):
        written, text = WrittenAnswers(), list[int]()
        for number in range(30):
            ids = common[: rng.choice((0, 1, 2, 20, 62, 63, 64, 65, 66, 130))]
            ids += [rng.randrange(3) for _ in range(rng.choice((0, 1, 2, 3, 70)))]
            if len(ids) > 1:
                answer = WrittenAnswer(array("i", ids), b"prompt")
                written.restore(rng.choice("0001"), (number // 2).to_bytes(2, "big"), answer)
                text += [rng.randrange(4) for _ in range(rng.randrange(3))]
                text += ids[: rng.choice((2, 63, 64, 200, 200))]
        notes = [(n["says"], n["start"], n["tokens"]) for n in written.notes_of("0", text)]
        assert notes == slow_notes(written, text)


class CountedIds(array):  # type: ignore[type-arg]
    """Token ids that count their comparisons."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedIds.comparisons += 1
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]


def test_notes_compare_each_answer_with_few_places_of_the_same_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All calls of one tool begin with the same tokens."""
    monkeypatch.setattr(CountedIds, "comparisons", 0)
    written, text = WrittenAnswers(), list[int]()
    for number in range(100):
        ids = [*range(40), 100 + number, *range(60)]
        written.restore("0", bytes([number]), WrittenAnswer(CountedIds("i", ids), b"prompt"))
        text += ids
    assert len(written.notes_of("0", text)) == 100
    assert CountedIds.comparisons <= 100


def test_the_default_model_reuses_its_own_answers(smollm2: Model, tmp_path: Path) -> None:
    with running_server(smollm2, tmp_path) as server, server.client() as client:
        history, held = list[Any](QUESTION), 0
        for choice in ("required", "auto"):
            body = {"messages": history, "tools": [TOOL], "max_tokens": 99, "temperature": 0}
            answer = client.post("/v1/chat/completions", json={**body, "tool_choice": choice})
            usage, (chosen,) = answer.json()["usage"], answer.json()["choices"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= held - 1
            held = usage["prompt_tokens"] + usage["completion_tokens"]
            message = chosen["message"]
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = canonical(call["function"]["arguments"])
            history += [{**message, "content": (message["content"] or "").strip()}]
            for call in message.get("tool_calls", ()):
                history.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})
            history.append({"role": "user", "content": "And tomorrow?"})


def test_explanations_are_about_the_tokens_of_the_next_turn(scripted: ScriptedServer) -> None:
    scripted.write(TEXT)
    with scripted.client() as client:
        messages = [{"role": "user", "content": "explain: weather?"}]
        body = {"messages": messages, "tools": [TOOL]}
        answer = client.post("/v1/chat/completions", json=body).json()
        messages.append({"role": "assistant", "content": TEXT.strip()})
        messages.append({"role": "user", "content": "And now?"})
        report = client.post("/v1/prefix/explain", json=body).json()
        assert report["reused"] >= answer["usage"]["total_tokens"] - 1
        assert report["written"] == answer["usage"]["completion_tokens"] - 1
        text = client.post("/v1/prefix/explain", json={"text": "Hello"}).json()
        assert text["written"] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_say_how_many_tokens_of_their_history_were_sampled(
    scripted: ScriptedServer, stream: bool
) -> None:
    model = scripted.service.model.text
    scripted.write(CALL, TEXT, "Bye.")
    fields, history = list[Any](), [{"role": "user", "content": f"written {stream}: weather?"}]
    with scripted.client() as client:
        for _ in range(3):
            body = {"messages": history, "tools": [TOOL], "stream": stream}
            response = client.post("/v1/chat/completions", json=body)
            chunks = events(response) if stream else [response.json()]
            fields.append([chunk["x_kvkeep"] for chunk in chunks if "x_kvkeep" in chunk])
            # The same answer again, whose prompt is another.
            scripted.write(*[CALL, TEXT, "Bye."][len(fields) - 1 :])
            history += openai_chat(client, history, stream)
            history.append({"role": "user", "content": "And now?"})
    lengths = [len(model.encode(text, special=True)) for text in (CALL, TEXT)]
    assert fields == [[], [{"written": lengths[0]}], [{"written": sum(lengths)}]]


THINKING_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_thinking_that_a_request_clears_does_not_come_back(smollm2: Model, tmp_path: Path) -> None:
    """Even where the template would write it."""
    source = smollm2.text.folder
    model = model_with_text_of(tmp_path / "model", source, template=THINKING_TEMPLATE)
    prompts = list[str]()

    def write(prompt: str) -> str:
        prompts.append(prompt)
        return f"<think>\nThought {len(prompts)}\n</think>\n\nAnswer {len(prompts)}."

    keep = {"type": "thinking_turns", "value": 1}
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]
    with serving(ScriptedEngine(model, write)) as server, server.client() as client:
        history = list[Any]()
        for _ in range(3):
            history.append({"role": "user", "content": "And now?"})
            body = {"messages": history, "context_management": {"edits": edits}}
            answer = client.post("/v1/messages", json={**body, "max_tokens": 99}).json()
            history.append({"role": "assistant", "content": answer["content"]})
    (edit,) = answer["context_management"]["applied_edits"]
    assert edit["cleared_thinking_turns"] == 1
    assert [f"Thought {number}" in prompts[2] for number in (1, 2)] == [False, True]
