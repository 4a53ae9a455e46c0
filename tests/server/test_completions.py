"""Completions by OpenAI's client."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server.conftest import RunningServer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from kvkeep.engine import GeneratedToken, TokenLogprob
from kvkeep.model import Model
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.openai.completion_logprobs import CompletionLogprobs

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **params: Any) -> Any:
    params = {"temperature": 0, "max_tokens": 10, **params}
    return client.completions.create(model="smollm2", prompt=prompt, **params)


def test_a_completion_equals_a_session_in_python(client: openai.OpenAI, smollm2: Model) -> None:
    session = smollm2.session(2048, prefill_step=128)
    session.feed(PROMPT)
    expected = "".join(session.stream(10))
    for prompt in (PROMPT, [PROMPT], smollm2.text.encode(PROMPT), [smollm2.text.encode(PROMPT)]):
        assert complete(client, prompt).choices[0].text == expected
    assert complete(client, echo=True).choices[0].text == PROMPT + expected


def test_a_stream_equals_the_whole_response(client: openai.OpenAI) -> None:
    expected = complete(client, logprobs=2)
    chunks = list(complete(client, stream=True, logprobs=2))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.choices[0].text
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert tokens == expected.choices[0].logprobs.tokens
    assert len(tokens) == 10
    assert all(len(top) == 2 for top in expected.choices[0].logprobs.top_logprobs)


def test_max_tokens_may_be_zero(client: openai.OpenAI) -> None:
    result = complete(client, max_tokens=0)
    assert result.choices[0].text == ""
    assert result.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [10**6]},
        {"prompt": [10**30]},
        {"prompt": [""]},
        {"prompt": ["a", []]},
        {"prompt": ["a"] * 65},
        {"prompt": ["a"] * 33, "n": 2},
        {"prompt": "a", "n": 2, "best_of": 1},
        {"prompt": "a", "best_of": 2, "stream": True},
        {"prompt": "a", "echo": True, "suffix": "b"},
        {"prompt": "def f(x):\n", "suffix": "\n    return y\n"},
        {"prompt": None},
        {"prompt": "a", "n": 1000},
        {"prompt": "a", "logprobs": 1000},
        {"prompt": "a", "max_tokens": -2},
        {"prompt": "a", "seed": 10**30},
        {"prompt": "\ud800"},
    ],
    ids=repr,
)
def test_malformed_requests_are_refused(server: RunningServer, body: dict[str, Any]) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"prompt"', b"\xff\xfe", b"1" * 5000])
def test_a_body_that_is_not_json_is_refused(server: RunningServer, content: bytes) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=content)
    assert response.status_code == 400


@pytest.mark.parametrize("streamed", [True, False])
def test_an_empty_prompt_is_refused_before_a_stream_starts(
    server: RunningServer, streamed: bool
) -> None:
    with server.client() as client:
        for prompt in ("", [], [[]], ["a", ""]):
            body = {"prompt": prompt, "stream": streamed}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 400
            assert "a prompt is empty" in response.json()["error"]["message"]
        name = client.post("/v1/sessions", json={}).json()["name"]
        params = client.post(f"/v1/sessions/{name}/generate", json={"stream": streamed})
        assert params.status_code == 400
        assert "nothing to continue" in params.json()["error"]["message"]


def test_an_echoed_prompt_has_the_log_probabilities_of_its_tokens(
    client: openai.OpenAI, smollm2: Model
) -> None:
    """Also when its cells are cached, over several prefill steps, and for each of its choices."""
    text = " ".join(f"Item {number} is the square of {number * number}." for number in range(25))
    session = smollm2.session(2048, prefill_step=128)
    expected = session.score(text).tolist()
    assert len(expected) > 2 * 128
    prompts = [text, smollm2.text.encode(text)]
    results = [complete(client, prompt, echo=True, logprobs=3, max_tokens=0) for prompt in prompts]
    results += [complete(client, text, echo=True, logprobs=3, max_tokens=2, n=2)]
    choices = [choice for result in results for choice in result.choices]
    assert [choice.text[: len(text)] for choice in choices] == [text] * 4
    for logprobs in (choice.logprobs for choice in choices):
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1 : len(expected)] == expected[1:]
        tops = logprobs.top_logprobs[1:]
        assert all(3 <= len(top) <= 4 for top in tops)
        assert all(
            top[token] == logprob
            for top, token, logprob in zip(
                tops, logprobs.tokens[1:], logprobs.token_logprobs[1:], strict=True
            )
        )
        assert "".join(logprobs.tokens[: len(expected)]) == text
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choices[-1].text.startswith(token, offset) or offset >= len(text)
    assert len(choices[-1].logprobs.tokens) == len(expected) + 2
    assert results[0].choices[0].finish_reason == "length"


def test_a_stream_echoes_the_prompt_and_its_log_probabilities(client: openai.OpenAI) -> None:
    params = {"echo": True, "logprobs": 2, "max_tokens": 3, "n": 2, "temperature": 1, "seed": 1}
    expected = complete(client, [PROMPT, "Once upon"], **params).choices
    choices = [c.choices[0] for c in complete(client, [PROMPT, "Once upon"], stream=True, **params)]
    assert len(expected) == 4
    for whole in expected:
        parts = [choice for choice in choices if choice.index == whole.index]
        assert "".join(part.text for part in parts) == whole.text
        entries = [part.logprobs for part in parts if part.logprobs]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [item for entry in entries for item in getattr(entry, field)]
            assert joined == getattr(whole.logprobs, field)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_formatted_and_encoded_outside_of_the_event_loop(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    calls: list[tuple[str, bool]] = []
    format_entry, encode = CompletionLogprobs.prompt_entry, json.dumps

    def prompt_entry(*arguments: Any) -> dict[str, Any]:
        calls.append(("format", in_event_loop()))
        return format_entry(*arguments)

    def dumps(value: Any, *arguments: Any, **fields: Any) -> str:
        text = encode(value, *arguments, **fields)
        if '"top_logprobs":[null,' in text:
            calls.append(("encode", in_event_loop()))
        return text

    monkeypatch.setattr(CompletionLogprobs, "prompt_entry", prompt_entry)
    monkeypatch.setattr(json, "dumps", dumps)
    result = complete(client, echo=True, logprobs=2, max_tokens=0, stream=stream)
    if stream:
        result = next(iter(result))
    assert result.choices[0].text == PROMPT
    assert calls == [("format", False), ("encode", False)]


def in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_top_tokens_may_have_any_text(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI's encoder leaves out fields that begin with "_sa"."""
    monkeypatch.setattr(TextCodec, "token_bytes", lambda _, token: b"_sa%d" % token)
    (choice,) = complete(client, [5, 6, 7], echo=True, logprobs=0, max_tokens=0).choices
    assert [list(top) for top in choice.logprobs.top_logprobs[1:]] == [["_sa6"], ["_sa7"]]


def test_several_prompts_get_the_choices_that_each_gets_alone(
    client: openai.OpenAI, smollm2: Model
) -> None:
    prompts = [PROMPT, "Once upon a time", "2 + 2 ="]
    alone = [complete(client, prompt, max_tokens=5) for prompt in prompts]
    expected = [result.choices[0].text for result in alone]
    for batch in (prompts, [smollm2.text.encode(prompt) for prompt in prompts]):
        result = complete(client, batch, max_tokens=5)
        assert [choice.text for choice in result.choices] == expected
        assert [choice.index for choice in result.choices] == [0, 1, 2]
        assert result.usage.prompt_tokens == sum(r.usage.prompt_tokens for r in alone)
        assert result.usage.completion_tokens == 15


def test_best_of_returns_the_choices_of_the_highest_mean_log_probability(
    client: openai.OpenAI,
) -> None:
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 4}
    candidates = complete(client, n=5, logprobs=0, **params).choices
    means = {
        choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
        for choice in candidates
    }
    best = sorted(means, key=means.__getitem__, reverse=True)
    result = complete(client, n=2, best_of=5, **params)
    assert [choice.text for choice in result.choices] == best[:2]
    assert all(choice.logprobs is None for choice in result.choices)
    assert result.usage.completion_tokens == 20


def test_the_end_token_has_a_log_probability_and_no_text(
    client: openai.OpenAI, smollm2: Model
) -> None:
    end = smollm2.end_token_ids[0]
    bias = {str(end): 100}
    logprobs = complete(client, logprobs=1, max_tokens=1, echo=True, logit_bias=bias).choices[0]
    assert logprobs.finish_reason == "stop"
    assert logprobs.text == PROMPT
    assert logprobs.logprobs.tokens[-1] == smollm2.text.decode([end])
    assert logprobs.logprobs.text_offset[-1] == len(PROMPT)
    chunks = complete(client, logprobs=1, max_tokens=1, logit_bias=bias, stream=True)
    tokens = [c.choices[0].logprobs.tokens for c in chunks if c.choices[0].logprobs]
    assert tokens == [logprobs.logprobs.tokens[-1:]]


def test_null_stands_for_the_default(server: RunningServer) -> None:
    names = ["suffix", "max_tokens", "n", "best_of", "stream", "echo", "logprobs", "stop", "seed"]
    names += ["temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"]
    names += ["stream_options", "user"]
    with server.client() as client:
        body = {"prompt": PROMPT, **dict.fromkeys(names)}
        response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("prompt", ["Emoji: 🎉 🎊 🎈 ", PROMPT])
def test_top_tokens_have_unique_names_and_offsets_match_the_text(
    client: openai.OpenAI, prompt: str
) -> None:
    """Also with tokens that are parts of characters, and with the prompt echoed."""
    response = complete(client, prompt, logprobs=20, echo=True, max_tokens=12)
    text, logprobs = response.choices[0].text, response.choices[0].logprobs
    tops = logprobs.top_logprobs[1:]
    assert all(len(top) >= 20 for top in tops)
    names = [*logprobs.tokens, *(name for top in tops for name in top)]
    assert any(name.startswith("bytes:") for name in names)
    assert logprobs.text_offset[0] == 0
    assert len(prompt) in logprobs.text_offset
    for name, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert name.startswith("bytes:") or text.startswith(name, offset)
    chunks = complete(client, prompt, logprobs=20, echo=True, max_tokens=12, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [at for part in parts for at in part.text_offset] == logprobs.text_offset


def test_tokens_of_a_sentencepiece_vocabulary_keep_their_spaces(tmp_path: Path) -> None:
    """Two tokens of one text, a piece and a byte, are both reported."""
    codec = sentencepiece_codec(tmp_path)
    a, byte, the = (codec.tokenizer.token_to_id(item) for item in ("a", "<0x61>", "▁the"))
    top = [
        TokenLogprob(a, -1.0),
        TokenLogprob(byte, -2.0),
        TokenLogprob(the, -3.0),
        TokenLogprob(10**6, -4.0),
    ]
    events = [GeneratedToken(the, " the", TokenLogprob(the, -3.0), top) for _ in range(2)]
    entry = CompletionLogprobs(codec).entry(events)
    assert entry is not None
    assert entry["tokens"] == [" the", " the"]
    assert entry["text_offset"] == [0, 4]
    names = {"a": -1.0, f"token_id:{byte}": -2.0, " the": -3.0, "": -4.0}
    assert entry["top_logprobs"] == [names, names]


def sentencepiece_codec(folder: Path) -> TextCodec:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "▁the"]
    tokenizer = Tokenizer(BPE({item: n for n, item in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), _STRIP]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec.open(folder)


_STRIP = decoders.Strip(" ", 1, 0)
