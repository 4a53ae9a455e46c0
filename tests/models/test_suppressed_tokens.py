"""Tokens that a model's files suppress are never sampled, in any way of sampling."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_tokenizer, write_small_folder
from speculation_cases import whole_drafts
from tiny_gguf import tiny_llama, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from kvkeep import Sampling, errors, load_model
from kvkeep.engine import Engine, GeneratedToken, GenerationRequest
from kvkeep.integrations.transformers import from_transformers
from kvkeep.model import Model
from kvkeep.session.drafts import Draft, DraftPlanner
from kvkeep.session.group import SessionGroup
from kvkeep.session.speculation import Speculation

PROMPT, COUNT = [5, 9, 20], 12
GREEDY = Sampling()


def write_config(folder: Path, suppressed: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM, set[int]]:
    """A folder, its transformers model, and the tokens of its greedy text, which it suppresses."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    model.generation_config.update(eos_token_id=None, bos_token_id=None)
    text = generated(model)
    model.generation_config.suppress_tokens = sorted(set(text))
    model.save_pretrained(folder)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    return folder, model, set(text)


@pytest.fixture(scope="module")
def model(llama: tuple[Path, LlamaForCausalLM, set[int]]) -> Model:
    return load_model(str(llama[0]), dtype="float32")


def generated(model: LlamaForCausalLM) -> list[int]:
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False)
    return list(ids[0, len(PROMPT) :].tolist())


def test_greedy_text_is_that_of_transformers_in_every_way_of_sampling(
    llama: tuple[Path, LlamaForCausalLM, set[int]], model: Model
) -> None:
    _, reference, suppressed = llama
    expected = generated(reference)
    assert not suppressed & set(expected)
    session, streamed, speculated = (model.session() for _ in range(3))
    for each in (session, streamed, speculated):
        each.feed(PROMPT)
    group = SessionGroup([session.fork(), session.fork()])
    assert [session.next_token(GREEDY) for _ in range(COUNT)] == expected
    assert [group.next_tokens() for _ in range(COUNT)] == [[token] * 2 for token in expected]
    for each, speculate in ((streamed, False), (speculated, True)):
        list(each.stream(COUNT, GREEDY, ignore_eos=True, speculate=speculate))
        assert list(each.tokens[len(PROMPT) :]) == expected
    with Engine(model) as engine:
        request = GenerationRequest(PROMPT, COUNT, ignore_eos=True, logprobs=1)
        futures = [engine.submit(request, owner=name) for name in "ab"]
        for (generation,) in [future.result() for future in futures]:
            assert [e.token for e in generation if isinstance(e, GeneratedToken)] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_them_is_not_accepted(
    model: Model, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    likely = int(model.suppressed_tokens[0])
    sampling = Sampling(temperature, seed=3, logit_bias=((likely, 1000.0),))
    expected, speculating = model.session(), model.session()
    for session in (expected, speculating):
        session.feed(PROMPT)
    list(expected.stream(COUNT, sampling, ignore_eos=True))
    draft = Draft([likely] * 3, matched=3)
    monkeypatch.setattr(Speculation, "draft", lambda *_: draft)
    monkeypatch.setattr(DraftPlanner, "choose", whole_drafts)
    list(speculating.stream(COUNT, sampling, ignore_eos=True, speculate=True))
    accepted, drafted = speculating.speculated
    assert (accepted, drafted > 0) == (0, True)
    assert list(speculating.tokens) == list(expected.tokens)
    assert likely not in speculating.tokens


def test_neither_a_temperature_nor_a_bias_nor_penalties_bring_them_back(model: Model) -> None:
    suppressed = set(model.suppressed_tokens.tolist())
    biases = tuple((token, 100.0) for token in suppressed)
    session = model.session()
    session.feed(PROMPT)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"repetition_penalty": 0.01}):
        for temperature in (0.0, 3.0):
            sampling = Sampling(temperature, seed=1, logit_bias=biases, **filters)
            assert not suppressed & {session.fork().next_token(sampling) for _ in range(5)}


@dataclass
class Allowing:
    """A constraint that allows some tokens."""

    ids: list[int]

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, -torch.inf)
        masked[self.ids] = logits[self.ids]
        return masked

    def accept(self, token: int) -> None:
        assert token in self.ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_has_them_only_where_it_allows_no_others(
    model: Model, temperature: float
) -> None:
    first, second, *_ = model.suppressed_tokens.tolist()
    other = next(i for i in range(256) if i not in model.suppressed_tokens)
    session = model.session()
    session.feed(PROMPT)
    for allowed in ([first, second, other], [first, second]):
        sampling = Sampling(temperature, constraint=Allowing(allowed))
        token = session.fork().next_token(sampling)
        assert token == other if other in allowed else token in (first, second)


def test_scores_and_logits_are_those_of_all_tokens(model: Model) -> None:
    session = model.session()
    token = int(model.suppressed_tokens[0])
    assert session.score([*PROMPT, token]).isfinite().tolist() == [False, True, True, True]
    assert session.logits.isfinite().all()


def test_ids_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder = write_config(write_small_folder(tmp_path), [7, -1, 256, 10**30, 3, 7])
    assert load_model(str(folder), dtype="float32").suppressed_tokens.tolist() == [3, 7]


@pytest.mark.parametrize("value", [5, "5", [1.5], [True], [[1]], {"1": 2}])
def test_invalid_ones_are_refused_when_the_model_is_loaded(tmp_path: Path, value: Any) -> None:
    folder = write_config(write_small_folder(tmp_path), value)
    with pytest.raises(errors.BadModelFile, match=r"generation_config.json: suppress_tokens"):
        load_model(str(folder), dtype="float32")


def test_they_are_read_at_load_since_the_folder_may_be_removed(tmp_path: Path) -> None:
    folder = write_config(write_small_folder(tmp_path), [7])
    model = load_model(str(folder), dtype="float32")
    (folder / "generation_config.json").unlink()
    assert model.suppressed_tokens.tolist() == [7]


def test_a_gguf_file_states_them_in_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    key = "tokenizer.ggml.suppress_tokens"
    file = write_gguf(
        tmp_path / "tiny.gguf", tiny_llama(), edit=lambda writer: writer.add_array(key, [3, 7, 999])
    )
    assert load_model(str(file), dtype="float32").suppressed_tokens.tolist() == [3, 7]


def test_a_transformers_model_has_those_of_its_generation_config(
    llama: tuple[Path, LlamaForCausalLM, set[int]],
) -> None:
    _, reference, suppressed = llama
    expected = generated(reference)
    session = from_transformers(reference).session()
    session.feed(PROMPT)
    assert session.core.model.suppressed_tokens.tolist() == sorted(suppressed)
    assert [session.next_token(GREEDY) for _ in range(COUNT)] == expected
