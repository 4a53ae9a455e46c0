"""Default sampling parameters: kvkeep's, a model's, and those of a request that names some."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_models import write_small_folder
from tiny_gguf import tiny_llama, write_gguf

from kvkeep import Sampling, errors, load_model
from kvkeep.model import Model
from kvkeep.session.default_sampling import DEFAULT_SAMPLING, model_sampling, with_parameters


def test_a_model_without_recommendations_has_kvkeeps_defaults(smollm2: Model) -> None:
    assert smollm2.default_sampling == DEFAULT_SAMPLING
    assert not smollm2.default_sampling.greedy
    assert smollm2.session().policy  # the session's own methods stay greedy
    assert Sampling().greedy


def test_generation_config_replaces_single_parameters(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    values = {"do_sample": False, "temperature": 0.6, "top_k": 20, "min_p": None, "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(values))
    expected = replace(DEFAULT_SAMPLING, temperature=0.6, top_k=20)
    assert load_model(str(folder), dtype="float32").default_sampling == expected


def test_a_recommended_temperature_of_zero_is_not_taken_over() -> None:
    assert model_sampling({"temperature": 0.0, "top_p": 0.5}, "x").temperature == 0.7


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (-1.0, 0), (50.0, 50)])
def test_a_recommended_top_k_of_minus_one_stands_for_all(top_k: float, expected: int) -> None:
    sampling = model_sampling({"top_k": top_k}, "generation_config.json")
    assert (sampling.top_k, type(sampling.top_k)) == (expected, int)


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_p": "high"}, {"top_k": 1.5}])
def test_an_invalid_recommendation_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(errors.BadModelFile, match=rf"generation_config.json: {next(iter(values))}"):
        model_sampling(values, "generation_config.json")


@pytest.mark.parametrize(("top_k", "expected_top_k"), [(64, 64), (-1, 0), (-40, 0)])
def test_a_gguf_file_recommends_by_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top_k: int, expected_top_k: int
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))

    def recommend(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.3)
        writer.add_int32("general.sampling.top_k", top_k)
        writer.add_float32("general.sampling.penalty_repeat", 1.0)

    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), edit=recommend)
    expected = Sampling(0.3, expected_top_k, 0.95, 0.05, 1.0, 256)
    assert load_model(str(file), dtype="float32").default_sampling == expected


def test_explicit_parameters_win_and_temperature_zero_is_plain_greedy() -> None:
    assert with_parameters(DEFAULT_SAMPLING, {"top_k": 0, "min_p": None}).top_k == 0
    greedy = with_parameters(DEFAULT_SAMPLING, {"temperature": 0})
    assert (greedy.greedy, greedy.repetition_penalty) == (True, 1.0)
    penalised = with_parameters(DEFAULT_SAMPLING, {"temperature": 0, "repetition_penalty": 1.2})
    assert penalised.repetition_penalty == 1.2
