"""Logits on a GPU equal transformers' on the same GPU, and those on a CPU."""

from pathlib import Path

import pytest
import torch
from small_models import small_tokenizer

from kvkeep.loader import load_model

# Local layers, softcaps, sinks, experts, shared cells, residual streams, and kinds of states.
FAMILIES = [
    *("llama", "cohere", "gemma2", "gemma3-two-ropes", "gemma3n", "gemma4", "smollm3-local-yarn"),
    *("gpt-oss", "qwen3-moe", "lfm2", "falcon-h1", "nemotron-h-experts", "qwen3.5"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_and_of_a_cpu(
    family: str, tmp_path: Path, device: torch.device
) -> None:
    pytest.importorskip("transformers")
    from models.family_checkpoints import TOKENS, write_checkpoint

    try:
        reference = write_checkpoint(tmp_path, family).to(device)
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this transformers has another {family}: {error}")
    reference.set_attn_implementation("eager")  # in some releases others ignore softcaps
    tokens = [token % 300 for token in TOKENS]  # all that a table of per-layer embeddings has
    (tmp_path / "tokenizer.json").write_text(small_tokenizer().to_str())
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens], device=device)).logits[0].float().cpu()
    placed, on_cpu = (
        load_model(str(tmp_path), dtype="float32", device=each) for each in (str(device), "cpu")
    )
    for settings in ({"prefill_step": 32}, {"prefill_step": 150}):
        session = placed.session(policy="full", **settings)
        there = on_cpu.session(policy="full", **settings)
        done = 0
        for count in (45, 80, 1, 1, 1, 2, 1, 19):
            for each in (session, there):
                each.feed(tokens[done : done + count])
            done += count
            assert session.logits is not None
            assert there.logits is not None
            found = session.logits.cpu()
            scale = expected[done - 1].abs().max()
            assert (found - expected[done - 1]).abs().max() < 2e-4 * scale, (done, "transformers")
            assert (found - there.logits).abs().max() < 2e-4 * scale, (done, "CPU")
