"""What clients of llama.cpp's server ask for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import Running, running
from small import write_small_folder
from topics import topic_text

from kvkeep.model import Model, load_model

PROMPT = "The capital of France is"
LONG = topic_text()[:2000]


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def completed(client: httpx.Client, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "n_predict": 10, "temperature": 0, **body}
    answer = client.post("/completion", json=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_completion_is_what_a_session_writes(client: httpx.Client, smollm2: Model) -> None:
    session = smollm2.session(2048, prefill_step=128)
    session.feed(PROMPT)
    expected = "".join(session.stream(10))
    ids = smollm2.text.encode(PROMPT)
    for prompt in (PROMPT, ids, [*ids[:2], *[smollm2.text.decode(ids[2:])]]):
        found = completed(client, prompt, return_tokens=True)
        assert found["content"] == expected
        assert (found["tokens_predicted"], found["tokens_evaluated"]) == (10, len(ids))
        assert found["stop_type"] == "limit"
        assert smollm2.text.decode(found["tokens"]) == expected


def test_a_stream_says_the_same(client: httpx.Client) -> None:
    whole, parts = completed(client, LONG, n_probs=3), []
    body = {"prompt": LONG, "n_predict": 10, "temperature": 0, "stream": True, "n_probs": 3}
    body["return_progress"] = True
    with client.stream("POST", "/completion", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                parts.append(json.loads(line[6:]))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    likely = [each for part in parts for each in part.get("completion_probabilities", ())]
    assert likely == whole["completion_probabilities"]
    assert all(len(each["top_logprobs"]) == 3 for each in likely)
    assert parts[0]["prompt_progress"]["total"] == whole["tokens_evaluated"]
    assert parts[-1]["timings"]["predicted_n"] == 10


def test_a_word_ends_it_and_is_named(client: httpx.Client) -> None:
    text = completed(client)["content"]
    stop = text[len(text) // 2 :][:3]
    found = completed(client, stop=[stop])
    assert (found["stop_type"], found["stopping_word"]) == ("word", stop)
    assert found["content"] == text[: text.index(stop)]


def test_tokens_and_text_go_both_ways(client: httpx.Client, smollm2: Model) -> None:
    text = "Hello, w\u00f6rld \U0001f9e0 <|im_end|>"
    ids = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids == smollm2.text.encode(text, special=True)
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == text
    plain = client.post("/tokenize", json={"content": text, "parse_special": False}).json()
    assert plain["tokens"] == smollm2.text.encode(text)
    pieces = client.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    raw = b"".join(
        p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces
    )
    assert raw.decode() == text
    parts = [bytes(p["piece"]) for p in pieces if isinstance(p["piece"], list)]
    assert b"".join(parts).strip() == "\U0001f9e0".encode()
    assert any(isinstance(piece["piece"], list) for piece in pieces)


def test_a_template_is_applied(client: httpx.Client, smollm2: Model) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    found = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert found == smollm2.text.chat(messages)


def test_it_says_what_it_is_and_no_path(client: httpx.Client) -> None:
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["total_slots"] == len(client.get("/slots").json())
    assert "/" not in props["model_path"]
    assert "im_start" in props["chat_template"]
    assert props["eos_token"] == "<|im_end|>"


def test_a_bias_bans_a_token_in_each_form(client: httpx.Client) -> None:
    first = completed(client, return_tokens=True)["tokens"][0]
    for bias in ({str(first): -1000}, [[first, False]], [[first, -1000]]):
        found = completed(client, return_tokens=True, logit_bias=bias)
        assert found["tokens"][0] != first


def test_a_slot_is_saved_restored_and_erased(client: httpx.Client) -> None:
    text = topic_text()[5000:7000]
    first = completed(client, text, id_slot=1)
    assert first["tokens_cached"] == 0
    whole = client.post("/slots/1?action=save", json={"filename": "one.bin"}).json()
    assert whole["n_saved"] == first["tokens_evaluated"] + first["tokens_predicted"]
    again = completed(client, text, id_slot=1)
    assert again["content"] == first["content"]
    assert again["tokens_cached"] > 256
    assert client.post("/slots/1?action=erase").json()["n_erased"] > 0
    found = client.post("/slots/0?action=restore", json={"filename": "one.bin"}).json()
    assert found["n_restored"] == whole["n_saved"]
    restored = completed(client, text, id_slot=0)
    assert restored["content"] == first["content"]
    assert restored["tokens_cached"] > 256
    on = completed(client, text + first["content"] + " And", id_slot=0, n_predict=3)
    assert on["tokens_cached"] >= first["tokens_evaluated"]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "a" * 150, "\u0000", "never"])
def test_a_slots_file_is_a_name_and_no_path(client: httpx.Client, name: str) -> None:
    completed(client, id_slot=2)
    for action in ("save", "restore") if name != "never" else ("restore",):
        answer = client.post(f"/slots/2?action={action}", json={"filename": name})
        assert answer.status_code == 400, answer.text
    assert completed(client, id_slot=2)["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": ""}),
        ("/completion", {"prompt": None}),
        ("/completion", {"prompt": [10**6]}),
        ("/completion", {"prompt": [-1]}),
        ("/completion", {"prompt": [[[1]]]}),
        ("/completion", {"prompt": "a", "n_predict": 1e30}),
        ("/completion", {"prompt": "a", "n_predict": -2}),
        ("/completion", {"prompt": "a", "n_probs": 10**9}),
        ("/completion", {"prompt": "a", "repeat_last_n": 10**12}),
        ("/completion", {"prompt": "a", "top_k": 10**30}),
        ("/completion", {"prompt": "a", "id_slot": 99}),
        ("/completion", {"prompt": "a", "temperature": "NaN"}),
        ("/tokenize", {}),
        ("/tokenize", {"content": 5}),
        ("/detokenize", {"tokens": [-5]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/apply-template", {"messages": []}),
        ("/slots/0?action=explode", {}),
        ("/slots/99?action=save", {"filename": "a"}),
        ("/slots/x?action=save", {"filename": "a"}),
    ],
    ids=repr,
)
def test_what_is_malformed_is_refused(client: httpx.Client, path: str, body: Any) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_several_prompts_have_an_answer_each(client: httpx.Client) -> None:
    """Texts, tokens, objects, and both in one; each as if it were alone."""
    ids = client.post("/tokenize", json={"content": PROMPT}).json()["tokens"]
    body = {"n_predict": 4, "temperature": 0}
    alone = client.post("/completion", json={"prompt": PROMPT, **body}).json()["content"]
    prompts = [
        PROMPT,
        ids,
        {"prompt_string": PROMPT},
        [*ids[:2], client.post("/detokenize", json={"tokens": ids[2:]}).json()["content"]],
    ]
    answers = client.post("/completion", json={"prompt": prompts, **body}).json()
    assert [answer["content"] for answer in answers] == [alone] * 4
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    one = client.post("/completion", json={"prompt": [PROMPT], **body}).json()
    assert one[0]["content"] == alone
    assert client.post("/completion", json={"prompt": prompts, "stream": True}).status_code == 400
    picture = {"prompt_string": PROMPT, "multimodal_data": ["aGk="]}
    assert client.post("/completion", json={"prompt": picture}).status_code == 400


def test_only_what_is_wanted_is_told(client: httpx.Client) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing/there"]
    body = {"prompt": PROMPT, "n_predict": 3, "response_fields": fields}
    found = client.post("/completion", json=body).json()
    assert set(found) == {"content", "generation_settings/n_predict"}
    assert found["generation_settings/n_predict"] == 3


def test_biases_of_texts_are_of_their_tokens(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0}
    plain = client.post("/completion", json=body).json()["content"]
    word = plain.split()[0]
    for bias in ([[f" {word}", False]], {f" {word}": -100.0}):
        other = client.post("/completion", json={**body, "logit_bias": bias}).json()["content"]
        assert f" {word}" not in other


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_an_answer_is_held_to_a_grammar(client: httpx.Client, path: str) -> None:
    """As llama.cpp's clients write it, and to a schema at the top of a request."""

    def said(**more: object) -> httpx.Response:
        messages = [{"role": "user", "content": PROMPT}]
        body = {"prompt": PROMPT, "messages": messages, "max_tokens": 12, "n_predict": 12}
        return client.post(path, json={**body, **more})

    def text(answer: httpx.Response) -> str:
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found["content"] if "content" in found else found["choices"][0]["message"]["content"]

    assert text(said(grammar='root ::= "a"{5,5}')) == "aaaaa"
    assert text(said(json_schema={"const": "42"})) == '"42"'
    assert said(grammar="root ::= (not valid").status_code == 400
    assert said(grammar='root ::= "a"', json_schema={"const": 1}).status_code == 400


def test_the_bytes_of_a_part_of_a_character_are_its_own(
    client: httpx.Client, smollm2: Model
) -> None:
    first = smollm2.text.encode("🎉")[0]
    forced = {"logit_bias": [[first, 1000]], "n_predict": 1, "n_probs": 1}
    (entry,) = completed(client, **forced)["completion_probabilities"]
    assert entry["bytes"] == list(smollm2.text.token_bytes(first))
    assert bytes(entry["bytes"]) in "🎉".encode()
    assert entry["token"] == ""  # as llama.cpp has it
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "logprobs": True}
    body["logit_bias"] = {str(first): 100}
    answer = client.post("/v1/chat/completions", json=body).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert bytes(entry["bytes"]) == smollm2.text.token_bytes(first)
    assert entry["token"].startswith("\\xf0")


def test_a_schema_ends_an_answer_of_a_model_without_an_end(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(str(folder), dtype="float32")
    with running(model, tmp_path / "server") as server, server.client() as client:
        found = completed(client, n_predict=-1, json_schema={"enum": ["one", "two"]})
        assert json.loads(found["content"]) in ("one", "two")
        assert found["stop_type"] == "eos"
        body = {"prompt": PROMPT, "grammar": 'root ::= ""'}
        assert client.post("/completion", json=body).status_code == 400
