"""The random GGUF files of `benchmarks/gguf_fuzz.py`."""

import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gguf_fuzz import TOKENS, damaged, judge
from benchmarks.gguf_fuzz_cases import Case, draw
from benchmarks.gguf_fuzz_tensors import ARCHITECTURES, VOCABULARY
from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.convert import convert


@cache  # not on import: it takes seconds
def cases() -> dict[str, Case]:
    """The first case of each architecture."""
    first: dict[str, Case] = {}
    for seed in range(200):
        drawn = draw(seed)
        first.setdefault(drawn.architecture, drawn)
        if len(first) == len(ARCHITECTURES):
            break
    return first


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_files_of_every_architecture_can_be_converted(architecture: str, tmp_path: Path) -> None:
    cases()[architecture].write(tmp_path / "m.gguf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            convert(tmp_path / "m.gguf", tmp_path / "out", False)
        except UnsupportedModel:  # for one combination of fields: all tensors are there
            return
    assert (tmp_path / "out" / "config.json").exists()


def test_a_case_is_the_same_each_time_and_a_damaged_one_differs_in_one_field() -> None:
    first, repeated, with_wrong_field = draw(7), draw(7), damaged(draw(7), 7)
    assert first.fields == repeated.fields
    assert all(
        np.array_equal(first.tensors[name], repeated.tensors[name]) for name in first.tensors
    )
    assert (
        sum(
            repr(with_wrong_field.fields[key]) != repr(value) for key, value in first.fields.items()
        )
        == 1
    )


def test_verdicts_distinguish_logits_from_refusals() -> None:
    case, logits = cases()["llama"], np.ones((len(TOKENS), VOCABULARY), np.float32)
    ours, other = logits[[23, -1]], logits[[23, -1]] * np.float32(1.01)
    assert judge(case, ours, logits)[0] == "same"
    assert judge(case, other, logits)[0] == "differ"
    assert judge(case, "why", logits) == ("only kvkeep refuses", "why")
    assert judge(case, ours, "why")[0] == "only llama.cpp refuses"
    assert judge(case, "why", "why")[0] == "both refuse"
