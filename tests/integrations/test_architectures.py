"""Every causal language model of transformers: correct to 1e-4, or refused with a reason."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from rerotating import streaming_logits
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.architectures import BEGIN, END, TOLERANCE, small_model, try_architecture
from kvkeep.integrations.transformers import KvkeepCache

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
LISTED = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
WORK = LISTED.split("Work: ")[1].split("\n")[0]


def is_listed(name: str) -> bool:
    return f"`{name}`" in WORK


FIRST_TIER = ("llama", "mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "gpt_neox", "bamba")
# One of each reason for which an architecture is refused, and every fourth of the others; all
# before releases.
REASONS = re.findall(r"^\| .* \| `([^`]+)`.*\|$", LISTED, re.MULTILINE)
SECOND_TIER = (*REASONS, *(name for name in re.findall(r"`([^`]+)`", WORK)[::4]))


def tier_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name in FIRST_TIER:
        return ()
    return (pytest.mark.extended if name in SECOND_TIER else pytest.mark.slow,)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=tier_of(name)) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES],
)
def test_architecture_works_as_documented(name: str) -> None:
    result = try_architecture(name)  # raises if kvkeep accepts the model and its logits are wrong
    assert result.works or result.why
    if f"transformers {transformers.__version__}:" in LISTED:
        assert bool(result.works) == is_listed(name), result.why


def test_at_least_seventy_architectures_work() -> None:
    assert WORK.count("`") // 2 >= 70


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "glm", "gpt_neox"])
@pytest.mark.parametrize(("budget", "keep"), [(24, 4), (20, 0)])
@torch.no_grad()
def test_bounded_logits_equal_streaming_with_the_models_own_attention(
    name: str, budget: int, keep: int
) -> None:
    model = small_model(name)
    ids = torch.randint(3, 90, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = streaming_logits(model, ids, budget, keep)
    for steps in ([1] * 70, [33, 1, 7, 29]):
        cache, chunks = KvkeepCache(model, budget, keep), []
        for count in steps:
            done = cache.get_seq_length()
            output = model(
                input_ids=torch.tensor([ids[done : done + count]]), past_key_values=cache
            )
            chunks.append(output.logits[0])
        assert cache.session.cache.cells == budget
        logits = torch.cat(chunks)
        assert (logits - expected).abs().max() / expected.abs().max().clamp_min(1) <= TOLERANCE
