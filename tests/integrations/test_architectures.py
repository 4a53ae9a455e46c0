"""Every causal language model of transformers: works to 1e-4, or is refused with the reason."""

from pathlib import Path

import pytest
import torch
import transformers
from rerotating import streaming_logits
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures import BEGIN, END, WITHIN, small_model, tried
from kvkeep.integrations.transformers import KvkeepCache

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
LISTED = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
WORK = LISTED.split("Work: ")[1].split("\n")[0]


def is_listed(name: str) -> bool:
    return f"`{name}`" in WORK


FIRST = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox")
FIRST += ("mixtral", "cohere2", "bamba", "mamba")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST else pytest.mark.extended)
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ],
)
def test_it_works_as_the_page_says(name: str) -> None:
    found = tried(name)  # raises where kvkeep takes a model and is wrong
    assert found.works or found.why
    if f"transformers {transformers.__version__}:" in LISTED:
        assert bool(found.works) == is_listed(name), found.why


def test_at_least_seventy_work() -> None:
    assert WORK.count("`") // 2 >= 70


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "glm", "gpt_neox"])
@pytest.mark.parametrize(("budget", "keep"), [(24, 4), (20, 0)])
@torch.no_grad()
def test_bounded_logits_equal_streaming_by_the_models_own_attention(
    name: str, budget: int, keep: int
) -> None:
    model = small_model(name)
    ids = torch.randint(3, 90, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = streaming_logits(model, ids, budget, keep)
    for steps in ([1] * 70, [33, 1, 7, 29]):
        cache, found = KvkeepCache(model, budget, keep), []
        for count in steps:
            done = cache.get_seq_length()
            out = model(input_ids=torch.tensor([ids[done : done + count]]), past_key_values=cache)
            found.append(out.logits[0])
        assert cache.session.cache.cells == budget
        off = (torch.cat(found) - expected).abs().max() / expected.abs().max().clamp_min(1)
        assert off <= WITHIN
