"""The default model on a GPU, from its files to an HTTP answer."""

import time
from pathlib import Path

import pytest
import torch
from topics import topic_ids

from kvkeep import Snapshot
from kvkeep.errors import KvkeepError
from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.models.hub.source import DEFAULT_MODEL


def logits(model: Model, ids: list[int], **settings: object) -> torch.Tensor:
    session = model.session(**settings)  # type: ignore[arg-type]
    session.feed(ids)
    assert session.logits is not None
    return session.logits.cpu()


def test_logits_equal_those_of_a_cpu(default_fp32: Model, default_model: Model) -> None:
    """In float32 to rounding; in bfloat16 as near to float32 as the CPU's are, but for a half."""
    fp32, bf16 = load_model(DEFAULT_MODEL, dtype="float32"), load_model(DEFAULT_MODEL)
    ids = topic_ids(fp32)[:1200]
    for settings in (
        {"policy": "full"},
        {"max_kv_size": 256},
        {"max_kv_size": 256, "kv_bits": "8"},
    ):
        exact = logits(fp32, ids, **settings)
        found = logits(default_fp32, ids, **settings)
        assert (found - exact).abs().max() < (0.3 if "kv_bits" in settings else 2e-3)
        errors = [(logits(m, ids, **settings) - exact).norm() for m in (default_model, bf16)]
        assert errors[0] < 1.5 * errors[1] + 0.01 * exact.norm()


def test_greedy_text_equals_that_of_a_cpu(default_fp32: Model) -> None:
    on_cpu = load_model(DEFAULT_MODEL, dtype="float32")
    ids = topic_ids(on_cpu)[:200]
    texts = []
    for model in (default_fp32, on_cpu):
        session = model.session(max_kv_size=160)  # a full ring after the prompt: replayed steps
        session.feed(ids)
        texts.append([session.next_token() for _ in range(64)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("settings", [{"max_kv_size": 300}, {"policy": "full"}], ids=str)
def test_a_file_goes_on_to_the_bit_and_on_a_cpu(
    settings: dict[str, object], default_model: Model, tmp_path: Path
) -> None:
    session = default_model.session(**settings)  # type: ignore[arg-type]
    session.feed(topic_ids(default_model)[:700])
    for _ in range(20):
        session.next_token()
    session.snapshot().save(tmp_path / "file")
    restored = default_model.restore(Snapshot.load(tmp_path / "file"))
    on_cpu = load_model(DEFAULT_MODEL).restore(Snapshot.load(tmp_path / "file"))
    for _ in range(40):
        assert session.next_token() == restored.next_token()
    assert session.logits is not None
    assert restored.logits is not None
    assert torch.equal(session.logits, restored.logits)
    assert len({on_cpu.next_token() for _ in range(10)}) > 1


def test_kvzip_recalls_a_fact_at_ratio_8(default_model: Model) -> None:
    text = default_model.text
    fact = "The secret number of the blue house is 7341."
    ids = text.encode(fact) + topic_ids(default_model)[:900]
    session = default_model.session(policy="full")
    session.feed(ids)
    try:
        report = session.compress(8.0)
    except KvkeepError as error:
        pytest.fail(str(error))
    assert report.cells_after <= report.cells_before / 7
    session.feed(
        "\n\nQuestion: What is the secret number of the blue house?\nAnswer: The secret"
        " number of the blue house is"
    )
    assert "7341" in "".join(session.stream(12))


def test_a_server_answers(default_model: Model, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("llguidance")
    from server.conftest import running_server

    message = {"role": "user", "content": "Say hello."}
    body = {"messages": [message], "max_tokens": 24, "temperature": 0}
    with running_server(default_model, tmp_path) as running:
        answers = []
        for _ in range(2):
            started = time.perf_counter()
            answer = running.client().post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["message"]["content"])
            assert time.perf_counter() - started < 60
    assert answers[0] == answers[1] != ""


def test_transformers_generate_with_a_cache_of_kvkeep(
    default_folder: Path, device: torch.device, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from kvkeep.integrations.transformers import KvkeepCache

    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval().to(device)
    ids = torch.tensor([[(7 * i * i) % 319 + 1 for i in range(60)]], device=device)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    cache = KvkeepCache(model, 256, policy="full")
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    bounded = model.generate(ids, past_key_values=KvkeepCache(model, 48), **options)
    assert bounded.shape == expected.shape
