"""llama.cpp's API."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server
from small_models import write_small_folder
from topics import topic_text

from kvkeep.loader import load_model
from kvkeep.model import Model

PROMPT = "The capital of France is"
LONG = topic_text()[:2000]


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def complete(client: httpx.Client, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
    params = {"prompt": prompt, "n_predict": 10, "temperature": 0, **body}
    response = client.post("/completion", json=params)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def test_a_completion_equals_a_session_in_python(client: httpx.Client, smollm2: Model) -> None:
    session = smollm2.session(2048, prefill_step=128)
    session.feed(PROMPT)
    expected = "".join(session.stream(10))
    ids = smollm2.text.encode(PROMPT)
    for prompt in (PROMPT, ids, [*ids[:2], *[smollm2.text.decode(ids[2:])]]):
        result = complete(client, prompt, return_tokens=True)
        assert result["content"] == expected
        assert (result["tokens_predicted"], result["tokens_evaluated"]) == (10, len(ids))
        assert result["stop_type"] == "limit"
        assert smollm2.text.decode(result["tokens"]) == expected


def test_a_stream_equals_the_whole_response(client: httpx.Client) -> None:
    expected, parts = complete(client, LONG, n_probs=3), []
    body = {"prompt": LONG, "n_predict": 10, "temperature": 0, "stream": True, "n_probs": 3}
    body["return_progress"] = True
    with client.stream("POST", "/completion", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                parts.append(json.loads(line[6:]))
    assert "".join(part["content"] for part in parts) == expected["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    likely = [item for part in parts for item in part.get("completion_probabilities", ())]
    assert likely == expected["completion_probabilities"]
    assert all(len(item["top_logprobs"]) == 3 for item in likely)
    assert parts[0]["prompt_progress"]["total"] == expected["tokens_evaluated"]
    assert parts[-1]["timings"]["predicted_n"] == 10


def test_a_stop_word_ends_the_completion_and_is_reported(client: httpx.Client) -> None:
    text = complete(client)["content"]
    stop = text[len(text) // 2 :][:3]
    result = complete(client, stop=[stop])
    assert (result["stop_type"], result["stopping_word"]) == ("word", stop)
    assert result["content"] == text[: text.index(stop)]


def test_tokenize_and_detokenize_round_trip(client: httpx.Client, smollm2: Model) -> None:
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


def test_apply_template_renders_the_chat_template(client: httpx.Client, smollm2: Model) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    result = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert result == smollm2.text.chat(messages)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    response = client.post("/apply-template", json={"messages": messages, "tools": [tool]})
    assert '"name": "weather"' in response.json()["prompt"]
    assert "tools: described in the system text" in response.headers["X-Kvkeep-Warning"]
    begun = [*messages, {"role": "assistant", "content": "Hi"}]
    body = {"messages": begun, "add_generation_prompt": False}
    closed = client.post("/apply-template", json=body).json()["prompt"]
    assert closed == smollm2.text.chat(begun, add_generation_prompt=False)
    continued = client.post("/apply-template", json={"messages": begun}).json()["prompt"]
    assert closed == f"{continued}<|im_end|>\n"


def test_props_describe_the_server_without_paths(client: httpx.Client) -> None:
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["total_slots"] == len(client.get("/slots").json())
    assert "/" not in props["model_path"]
    assert "im_start" in props["chat_template"]
    assert props["eos_token"] == "<|im_end|>"


def test_a_bias_bans_a_token_in_each_form(client: httpx.Client) -> None:
    first = complete(client, return_tokens=True)["tokens"][0]
    for bias in ({str(first): -1000}, [[first, False]], [[first, -1000]]):
        result = complete(client, return_tokens=True, logit_bias=bias)
        assert result["tokens"][0] != first


def test_a_slot_is_saved_restored_and_erased(client: httpx.Client) -> None:
    text = topic_text()[5000:7000]
    first = complete(client, text, id_slot=1)
    assert first["tokens_cached"] == 0
    saved = client.post("/slots/1?action=save", json={"filename": "one.bin"}).json()
    assert saved["n_saved"] == first["tokens_evaluated"] + first["tokens_predicted"]
    again = complete(client, text, id_slot=1)
    assert again["content"] == first["content"]
    assert again["tokens_cached"] > 256
    assert client.post("/slots/1?action=erase").json()["n_erased"] > 0
    result = client.post("/slots/0?action=restore", json={"filename": "one.bin"}).json()
    assert result["n_restored"] == saved["n_saved"]
    restored = complete(client, text, id_slot=0)
    assert restored["content"] == first["content"]
    assert restored["tokens_cached"] > 256
    on = complete(client, text + first["content"] + " And", id_slot=0, n_predict=3)
    assert on["tokens_cached"] >= first["tokens_evaluated"]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "a" * 150, "\u0000"])
def test_a_slot_file_must_be_a_plain_name(client: httpx.Client, name: str) -> None:
    complete(client, id_slot=2)
    for action in ("save", "restore"):
        response = client.post(f"/slots/2?action={action}", json={"filename": name})
        assert response.status_code == 400, response.text
    assert complete(client, id_slot=2)["content"]


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
        ("/detokenize", {"tokens": [1, 99_999_999, 5]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/apply-template", {"messages": []}),
        ("/slots/0?action=explode", {}),
        ("/slots/99?action=save", {"filename": "a"}),
        ("/slots/x?action=save", {"filename": "a"}),
    ],
    ids=repr,
)
def test_malformed_requests_are_refused(client: httpx.Client, path: str, body: Any) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_each_of_several_prompts_is_completed(client: httpx.Client) -> None:
    """Prompts are texts, token ids, objects or mixed lists; each result is as if alone."""
    ids = client.post("/tokenize", json={"content": PROMPT}).json()["tokens"]
    body = {"n_predict": 4, "temperature": 0}
    alone = client.post("/completion", json={"prompt": PROMPT, **body}).json()["content"]
    prompts = [
        PROMPT,
        ids,
        {"prompt_string": PROMPT},
        [*ids[:2], client.post("/detokenize", json={"tokens": ids[2:]}).json()["content"]],
    ]
    responses = client.post("/completion", json={"prompt": prompts, **body}).json()
    assert [response["content"] for response in responses] == [alone] * 4
    assert [response["index"] for response in responses] == [0, 1, 2, 3]
    single = client.post("/completion", json={"prompt": [PROMPT], **body}).json()
    assert single[0]["content"] == alone
    assert client.post("/completion", json={"prompt": prompts, "stream": True}).status_code == 400
    picture = {"prompt_string": PROMPT, "multimodal_data": ["aGk="]}
    assert client.post("/completion", json={"prompt": picture}).status_code == 400


def test_response_fields_selects_fields(client: httpx.Client) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing/there"]
    body = {"prompt": PROMPT, "n_predict": 3, "response_fields": fields}
    result = client.post("/completion", json=body).json()
    assert set(result) == {"content", "generation_settings/n_predict"}
    assert result["generation_settings/n_predict"] == 3


def test_a_text_bias_applies_to_each_of_its_tokens(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0}
    plain = client.post("/completion", json=body).json()["content"]
    word = plain.split()[0]
    for bias in ([[f" {word}", False]], {f" {word}": -100.0}):
        other = client.post("/completion", json={**body, "logit_bias": bias}).json()["content"]
        assert f" {word}" not in other


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions"])
def test_a_grammar_constrains_the_output(client: httpx.Client, path: str) -> None:
    """As a GBNF grammar, and as a `json_schema` field of the request."""

    def complete_constrained(**extra: object) -> httpx.Response:
        messages = [{"role": "user", "content": PROMPT}]
        body = {"prompt": PROMPT, "messages": messages, "max_tokens": 12, "n_predict": 12}
        return client.post(path, json={**body, **extra})

    def text(response: httpx.Response) -> str:
        assert response.status_code == 200, response.text
        result = response.json()
        return (
            result["content"] if "content" in result else result["choices"][0]["message"]["content"]
        )

    assert text(complete_constrained(grammar='root ::= "a"{5,5}')) == "aaaaa"
    assert text(complete_constrained(json_schema={"const": "42"})) == '"42"'
    assert complete_constrained(grammar="root ::= (not valid").status_code == 400
    assert complete_constrained(grammar='root ::= "a"', json_schema={"const": 1}).status_code == 400


def test_bytes_of_partial_characters_are_reported(client: httpx.Client, smollm2: Model) -> None:
    first = smollm2.text.encode("🎉")[0]
    forced = {"logit_bias": [[first, 1000]], "n_predict": 1, "n_probs": 1}
    (entry,) = complete(client, **forced)["completion_probabilities"]
    assert entry["bytes"] == list(smollm2.text.token_bytes(first))
    assert bytes(entry["bytes"]) in "🎉".encode()
    assert entry["token"] == ""  # as in llama.cpp
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "logprobs": True}
    body["logit_bias"] = {str(first): 100}
    response = client.post("/v1/chat/completions", json=body).json()
    (entry,) = response["choices"][0]["logprobs"]["content"]
    assert bytes(entry["bytes"]) == smollm2.text.token_bytes(first)
    assert entry["token"].startswith("\\xf0")


def test_a_schema_ends_the_output_of_a_model_without_end_tokens(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(str(folder), dtype="float32")
    with running_server(model, tmp_path / "server") as server, server.client() as client:
        result = complete(client, n_predict=-1, json_schema={"enum": ["one", "two"]})
        assert json.loads(result["content"]) in ("one", "two")
        assert result["stop_type"] == "eos"
        body = {"prompt": PROMPT, "grammar": 'root ::= ""'}
        assert client.post("/completion", json=body).status_code == 400
