"""Filling in the middle: `suffix` of completions, and llama.cpp's `/infill`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server
from small_models import write_small_folder
from tokenizers import AddedToken, Tokenizer

from kvkeep.errors import UnsupportedModel
from kvkeep.loader import load_model
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.fill_in_middle import ContextFile, FillInMiddle

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
QWEN += ("<|repo_name|>", "<|file_sep|>")
CONTEXT = 256


def codec_with(folder: Path, *texts: str) -> TextCodec:
    """Replace the last tokens of the small vocabulary by special tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    bytes_kept = {token: index for token, index in vocabulary.items() if index < 256 - len(texts)}
    tokenizer["model"]["vocab"] = bytes_kept
    changed = Tokenizer.from_str(json.dumps(tokenizer))
    changed.add_special_tokens([AddedToken(text, special=True) for text in texts])
    changed.save(str(folder / "tokenizer.json"))
    return TextCodec.open(folder)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return codec_with(write_small_folder(tmp_path_factory.mktemp("model")), *QWEN)


@pytest.fixture(scope="module")
def infill_server(
    codec: TextCodec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    model = load_model(str(codec.folder), dtype="float32")
    settings = {"max_kv_size": CONTEXT}
    with running_server(model, tmp_path_factory.mktemp("server"), settings=settings) as running:
        yield running


def post(server: RunningServer, path: str, status: int = 200, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == status, response.text
    return response.json()


def test_suffix_and_infill_give_what_the_marked_prompt_gives(
    infill_server: RunningServer, codec: TextCodec
) -> None:
    marked = "<|fim_prefix|>def f(x):<|fim_suffix|>return y<|fim_middle|>"
    params = {"temperature": 0, "seed": 1}
    expected = post(infill_server, "/completion", prompt=marked, n_predict=5, **params)["content"]
    parts = {"input_prefix": "def ", "prompt": "f(x):", "input_suffix": "return y"}
    filled = post(infill_server, "/infill", **parts, n_predict=5, **params)
    assert filled["content"] == expected
    assert filled["prompt"] == marked
    for prompt in ("def f(x):", codec.encode("def f(x):"), ["def f(x):"]):
        body = {"prompt": prompt, "suffix": "return y", "max_tokens": 5}
        (choice,) = post(infill_server, "/v1/completions", **body, **params)["choices"]
        assert choice["text"] == expected


def test_the_end_of_the_last_files_is_put_before_as_far_as_it_fits(
    infill_server: RunningServer,
) -> None:
    files = [{"filename": "a.py", "text": "A" * 300}, {"filename": "b.py", "text": "B" * 50}]
    body = {"input_prefix": "p", "input_suffix": "s", "input_extra": files, "n_predict": 4}
    prompt = post(infill_server, "/infill", **body)["prompt"]
    expected_end = (
        f"<|file_sep|>b.py\n{'B' * 50}<|file_sep|>current\n"
        "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )
    assert prompt.endswith("A" + expected_end)
    answer = post(infill_server, "/infill", **body)
    assert answer["tokens_evaluated"] == CONTEXT - 4
    body["input_extra"] = files[1:]
    prompt = post(infill_server, "/infill", **body)["prompt"]
    assert prompt == f"<|repo_name|>project\n{expected_end}"


@pytest.mark.parametrize("path", ["/infill", "/v1/completions"])
def test_a_token_of_another_file_ends_the_middle(
    infill_server: RunningServer, codec: TextCodec, path: str
) -> None:
    end = codec.tokenizer.token_to_id("<|fim_pad|>")
    body = {"input_prefix": "p", "input_suffix": "s", "prompt": "p", "suffix": "s"}
    answer = post(infill_server, path, **body, logit_bias={str(end): 1000.0})
    if path == "/infill":
        assert (answer["content"], answer["stop_type"]) == ("", "eos")
    else:
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_infill_streams_and_takes_null_for_the_default(infill_server: RunningServer) -> None:
    names = ("n_predict", "temperature", "stop", "stream", "grammar", "id_slot", "input_extra")
    body = {"input_prefix": "p", "input_suffix": "s", **dict.fromkeys(names), "prompt": None}
    post(infill_server, "/infill", **{**body, "n_predict": 2})
    body |= {"stream": True, "n_predict": 3, "temperature": 0}
    expected = post(infill_server, "/infill", **{**body, "stream": False})["content"]
    response = httpx.post(f"{infill_server.url}/infill", json=body, timeout=120)
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == expected


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_prefix": "a"},
        {"input_suffix": "a"},
        {"input_prefix": 1, "input_suffix": "a"},
        {"input_prefix": "a", "input_suffix": "b", "input_extra": "c"},
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c"}]},
        {"input_prefix": "a", "input_suffix": "b", "prompt": 3},
    ],
    ids=repr,
)
def test_malformed_requests_are_refused(infill_server: RunningServer, body: dict[str, Any]) -> None:
    assert post(infill_server, "/infill", 400, **body)["error"]["message"]


def test_a_model_without_the_tokens_says_so(server: RunningServer) -> None:
    parts = {"input_prefix": "a", "input_suffix": "b"}
    for path, body in (("/infill", parts), ("/v1/completions", {"prompt": "a", "suffix": "b"})):
        message = post(server, path, 400, **body)["error"]["message"]
        assert "<|fim_prefix|>" in message


def test_text_of_the_tokens_stays_text(codec: TextCodec) -> None:
    fim = FillInMiddle.of(codec)
    texts = codec.encode("<|fim_suffix|>"), "<|fim_middle|>", [ContextFile("<|repo_name|>", "a")]
    ids = fim.prompt(codec, *texts)
    special = [token for token in ids if codec.is_control(token)]
    separator, repository = fim.file_separator, fim.repository
    assert special == [repository, separator, separator, fim.prefix, fim.suffix, fim.middle]


@pytest.mark.parametrize(
    "texts",
    [("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")],
)
def test_each_family_has_tokens_of_its_own(tmp_path: Path, texts: tuple[str, ...]) -> None:
    codec = codec_with(write_small_folder(tmp_path), *texts)
    fim = FillInMiddle.of(codec)
    ids = [codec.tokenizer.token_to_id(text) for text in texts]
    assert [fim.prefix, fim.suffix, fim.middle] == ids[:3]
    assert fim.end_ids == tuple(sorted(ids))
    assert fim.prompt(codec, codec.encode("a"), "b", [ContextFile("c", "d")], 5) == [
        *(ids[0], *codec.encode("a"), ids[1], *codec.encode("b"), ids[2])
    ]


def test_two_of_the_three_tokens_are_not_enough(tmp_path: Path) -> None:
    codec = codec_with(write_small_folder(tmp_path), "<fim_prefix>", "<fim_suffix>")
    with pytest.raises(UnsupportedModel, match="fill in the middle"):
        FillInMiddle.of(codec)
