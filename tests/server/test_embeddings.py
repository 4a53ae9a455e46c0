"""Embeddings in OpenAI's, llama.cpp's and Ollama's form, compared with transformers."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from server.conftest import RunningServer, running_server
from server.test_hang_ups import send_request, wait_until
from small_models import write_small_folder
from tiny_gguf import tiny_llama, write_gguf
from transformers import LlamaForCausalLM

from kvkeep.engine import Engine, GenerationRequest, Limits
from kvkeep.engine.memory_bound import max_session_bytes
from kvkeep.errors import NoRoom, UnsupportedModel
from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.models.gguf.convert import convert
from kvkeep.models.spec.pooling import Pooling, read_pooling
from kvkeep.session.embedding import embed

TEXTS = ["A cat sat on the mat.", "Grüße", "long " * 60]  # the last one takes several steps
CONTEXT = 512


def write_pooling(folder: Path, mode: str, *more_modules: str) -> None:
    kinds = ("Transformer", "Pooling", *more_modules)
    modules = [
        {"idx": n, "name": str(n), "path": "" if n == 0 else f"{n}_{kind}"}
        | {"type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    flags: dict[str, Any] = {f"pooling_mode_{name}": name == mode for name in names}
    flags |= {"word_embedding_dimension": 64, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))


def embedding_folder(folder: Path, mode: str, *more_modules: str) -> Path:
    write_small_folder(folder)
    write_pooling(folder, mode, *more_modules)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def hidden_states(folder: Path, ids: list[int]) -> torch.Tensor:
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = reference.model(torch.tensor([ids]))
    return output.last_hidden_state[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_folder(tmp_path_factory.mktemp("model"), "mean_tokens", "Normalize")


@pytest.fixture(scope="module")
def embedding_server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    model = load_model(str(folder), dtype="float32")
    settings = {"max_kv_size": CONTEXT}
    with running_server(model, tmp_path_factory.mktemp("server"), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[float]]:
    means = [hidden_states(folder, encode(folder, text)).mean(0) for text in TEXTS]
    vectors: list[list[float]] = [(mean / mean.norm()).tolist() for mean in means]
    return vectors


def encode(folder: Path, text: str) -> list[int]:
    return load_model(str(folder), dtype="float32").text.encode(text)


def post(server: RunningServer, path: str, status: int = 200, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json={"model": "m", **body}, timeout=120)
    assert response.status_code == status, response.text
    return response.json()


def close(vectors: list[list[float]], expected: list[list[float]]) -> bool:
    return torch.allclose(torch.tensor(vectors), torch.tensor(expected), atol=1e-4)


def test_openais_client_gets_the_vectors_of_transformers(
    embedding_server: RunningServer, folder: Path, expected: list[list[float]]
) -> None:
    """Embed texts and token ids, as numbers and as base64, which is the client's default."""
    client = openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="none", max_retries=0)
    ids = [encode(folder, text) for text in TEXTS]
    for inputs in (TEXTS, ids):
        for options in ({}, {"encoding_format": "float"}):
            result = client.embeddings.create(model="m", input=inputs, **options)  # type: ignore
            assert close([entry.embedding for entry in result.data], expected)
            assert [entry.index for entry in result.data] == [0, 1, 2]
            assert result.usage.prompt_tokens == result.usage.total_tokens == sum(map(len, ids))
    for single in (TEXTS[0], ids[0]):
        (entry,) = client.embeddings.create(model="m", input=single).data
        assert close([entry.embedding], expected[:1])


def test_token_ids_of_another_tokenizer_are_reported(
    embedding_server: RunningServer, folder: Path
) -> None:
    text = "the long and the short of it, and then the rest of the text " * 3
    own_ids = encode(folder, text)
    foreign_ids = encode(folder, "é")[-1:] * 20  # no text has these bytes
    url = f"{embedding_server.url}/v1/embeddings"
    for inputs, is_foreign in (
        (text, False),
        (own_ids, False),
        ([own_ids[3:-3], encode(folder, "A")], False),
        ([own_ids, foreign_ids], True),
    ):
        response = httpx.post(url, json={"model": "m", "input": inputs}, timeout=120)
        assert response.status_code == 200, response.text
        warning = response.headers.get("X-Kvkeep-Warning", "")
        assert ("check_embedding_ctx_length=False" in warning) == is_foreign


def test_fewer_dimensions_are_the_first_ones_of_length_one(
    embedding_server: RunningServer, expected: list[list[float]]
) -> None:
    result = post(embedding_server, "/v1/embeddings", input=TEXTS[0], dimensions=5)
    first = torch.tensor(expected[0][:5])
    assert close([result["data"][0]["embedding"]], [(first / first.norm()).tolist()])


def test_llamacpp_and_ollama_have_their_own_forms(
    embedding_server: RunningServer, expected: list[list[float]]
) -> None:
    for path in ("/embedding", "/embeddings"):
        result = post(embedding_server, path, content=TEXTS)
        assert [entry["index"] for entry in result] == [0, 1, 2]
        assert close([entry["embedding"][0] for entry in result], expected)
    (entry,) = post(embedding_server, "/embedding", input=TEXTS[0], embd_normalize=1)
    assert sum(map(abs, entry["embedding"][0])) == pytest.approx(1)
    result = post(embedding_server, "/api/embed", input=TEXTS)
    assert close(result["embeddings"], expected)
    assert result["prompt_eval_count"] > 0
    assert close(
        [post(embedding_server, "/api/embeddings", prompt=TEXTS[0])["embedding"]], expected[:1]
    )
    assert post(embedding_server, "/api/embed")["embeddings"] == []


def test_a_text_that_is_too_long_is_refused_or_truncated(embedding_server: RunningServer) -> None:
    text = "a" * (CONTEXT + 1)
    error = post(embedding_server, "/v1/embeddings", 400, input=["b", text])["error"]
    assert error["type"] == "exceed_context_size_error"
    assert post(embedding_server, "/api/embed", input=text)["prompt_eval_count"] == CONTEXT
    assert post(embedding_server, "/api/embed", 400, input=text, truncate=False)["error"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": ""},
        {"input": []},
        {"input": ["a", ""]},
        {"input": [[]]},
        {"input": [300]},
        {"input": [-1]},
        {"input": None},
        {"input": "a", "dimensions": 65},
        {"input": "a", "dimensions": 0},
        {"input": "a", "encoding_format": "int8"},
        {"input": ["a"] * 2049},
    ],
    ids=lambda body: repr(body)[:40],
)
def test_malformed_requests_are_refused(
    embedding_server: RunningServer, body: dict[str, Any]
) -> None:
    assert post(embedding_server, "/v1/embeddings", 400, **body)["error"]["message"]


def test_no_session_is_left_behind_and_null_is_the_default(
    embedding_server: RunningServer,
) -> None:
    body = {"input": TEXTS, "dimensions": None, "encoding_format": None, "user": None}
    post(embedding_server, "/v1/embeddings", **body)
    assert embedding_server.service.engine.sessions(unnamed=True).result() == []


def test_the_memory_of_a_text_counts_in_the_limit(folder: Path) -> None:
    """Idle sessions make room for it; a text that can never fit is refused."""
    model, ids = load_model(str(folder), dtype="float32"), [5] * CONTEXT
    needed = max_session_bytes(model.session(CONTEXT, policy="full", prefill_step=128), CONTEXT)
    with Engine(model, limits=Limits(memory=needed - 1)) as small:
        with pytest.raises(NoRoom, match="memory limit") as caught:
            small.embed(ids).result()
        assert caught.value.retry_after == float("inf")
        assert len(small.embed(ids[:5]).result()) == model.spec.hidden_size
    with Engine(model, settings={"policy": "full"}, limits=Limits(memory=needed)) as engine:
        list(engine.generate(GenerationRequest(tuple(ids[:100]), 1)))
        assert engine.totals().result().nbytes > 0
        vector = engine.embed(ids).result()
        assert torch.equal(vector, embed(model, ids, model.pooling, 128))
        assert engine.totals().result().nbytes == 0
        assert engine.sessions(unnamed=True).result() == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding", "/api/embed"])
def test_a_model_for_text_says_what_is_missing(server: RunningServer, path: str) -> None:
    error = post(server, path, 400, input="a")["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "1_Pooling/config.json" in message


def test_the_last_tokens_state_is_a_models_vector_without_normalising(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path / "model", "lasttoken")
    model = load_model(str(folder), dtype="float32")
    assert model.pooling == Pooling("last", normalized=False)
    ids = model.text.encode(TEXTS[2])
    with running_server(model, tmp_path / "server", settings={"max_kv_size": CONTEXT}) as running:
        vector = post(running, "/v1/embeddings", input=ids)["data"][0]["embedding"]
    assert close([vector], [hidden_states(folder, ids)[-1].tolist()])


@pytest.mark.parametrize(
    ("mode", "modules", "message"),
    [
        ("max_tokens", (), "found max"),
        ("cls_token", ("Normalize",), "found cls"),
        ("mean_tokens", ("Dense", "Normalize"), "Dense"),
    ],
)
def test_other_poolings_are_refused_by_name(
    tmp_path: Path, mode: str, modules: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_pooling(embedding_folder(tmp_path, mode, *modules))


def test_bidirectional_models_are_refused(tmp_path: Path) -> None:
    folder = embedding_folder(tmp_path, "mean_tokens")
    config = json.loads((folder / "config.json").read_text())
    for fields, named in (
        ({"is_causal": False}, "is_causal"),
        ({"use_bidirectional_attention": True, "is_causal": True}, "use_bidirectional_attention"),
    ):
        (folder / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(UnsupportedModel, match=rf"bidirectional \({named}\)"):
            read_pooling(folder)
        with pytest.raises(UnsupportedModel, match=rf"bidirectional.*\({named}\)"):
            load_model(str(folder), dtype="float32")


def test_a_checkpoint_without_a_head_is_loaded(folder: Path, tmp_path: Path) -> None:
    """As embedding models are published: the names of its tensors have no prefix."""
    headless = embedding_folder(tmp_path, "mean_tokens", "Normalize")
    tensors = load_file(headless / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, headless / "model.safetensors")
    models = [load_model(str(path), dtype="float32") for path in (folder, headless)]
    first, second = (model.session() for model in models)
    first.feed("a")
    second.feed("a")
    assert first.logits is not None
    assert second.logits is not None
    assert torch.allclose(first.logits, second.logits, atol=1e-5)


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean"), (3, "last")])
def test_the_pooling_of_a_gguf_file_is_kept(tmp_path: Path, kind: int, mode: str) -> None:
    def add_pooling(writer: Any) -> None:
        writer.add_uint32("llama.pooling_type", kind)

    gguf_path = write_gguf(tmp_path / "model.gguf", tiny_llama(), edit=add_pooling)
    convert(gguf_path, tmp_path / "model", progress=False)
    assert read_pooling(tmp_path / "model") == Pooling(mode, normalized=True)  # type: ignore


def test_a_gguf_file_without_pooling_has_none(tmp_path: Path, smollm2: Model) -> None:
    gguf_path = write_gguf(tmp_path / "model.gguf", tiny_llama())
    convert(gguf_path, tmp_path / "model", progress=False)
    with pytest.raises(UnsupportedModel, match="not made for embeddings"):
        read_pooling(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="not made for embeddings"):
        _ = smollm2.pooling


def test_embeddings_end_with_their_client(
    embedding_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the midst of a text."""
    texts: list[Any] = []

    def embed_forever(model: Model, ids: Any, pooling: Any, step: int, progress: Any) -> None:
        texts.append(ids)
        while True:
            progress(0)
            time.sleep(0.001)

    monkeypatch.setattr("kvkeep.engine.engine.embed", embed_forever)
    body = {"model": "m", "input": TEXTS}
    with closing(send_request(embedding_server, "/v1/embeddings", body)):
        wait_until(lambda: texts)
    monkeypatch.undo()
    with embedding_server.client() as client:  # one long call at a time
        response = client.post("/v1/embeddings", json=body)
    assert len(response.json()["data"]) == len(TEXTS)
    assert len(texts) == 1
