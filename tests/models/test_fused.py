"""Families that store several matrices as one: read where they lie, and computed as any other."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvkeep import load_model
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.errors import BadModelFile
from kvkeep.models.spec.config import read_spec
from kvkeep.models.weights.checkpoint import decoder_tensors
from kvkeep.models.weights.packing import MatrixBits, quantise

TOKENS = [(17 * i * i + 5 * i) % 40_000 for i in range(90)]


@pytest.fixture
def phi(tmp_path: Path, smollm2_folder: Path) -> Path:
    """A Phi-3 in bfloat16, of sizes that the compiled kernels take, with a tokenizer."""
    config = transformers.Phi3Config(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=480,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    model = transformers.Phi3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1 if name.endswith("norm.weight") else 0, 0.1)
    model.save_pretrained(tmp_path / "phi")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_folder / name, tmp_path / "phi")
    return tmp_path / "phi"


def theirs(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = transformers.Phi3ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float()


def test_parts_of_a_fused_matrix_are_views_of_its_rows(phi: Path) -> None:
    whole = load_file(phi / "model.safetensors")
    parts = decoder_tensors(read_spec(phi), whole)
    assert not any("qkv" in name or "gate_up" in name for name in parts)
    for part, fused, first in (
        ("self_attn.q_proj", "self_attn.qkv_proj", 0),
        ("self_attn.k_proj", "self_attn.qkv_proj", 256),
        ("self_attn.v_proj", "self_attn.qkv_proj", 384),
        ("mlp.up_proj", "mlp.gate_up_proj", 480),
    ):
        there = whole[f"model.layers.2.{fused}.weight"]
        found = parts[f"model.layers.2.{part}.weight"]
        assert found.data_ptr() == there.data_ptr() + 2 * first * there.shape[1]
        assert torch.equal(found, there[first : first + len(found)])


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels on this machine")
def test_the_kernels_are_as_near_to_float32_as_torch_in_bfloat16(phi: Path) -> None:
    model = load_model(str(phi))
    assert isinstance(model.decoder.executor, CompiledExecutor)
    session, found = model.session(policy="full"), []
    for token in TOKENS:
        session.feed([token])
        found.append(session.logits)
    exact, rounded = theirs(phi, torch.float32), theirs(phi, torch.bfloat16)
    error = (torch.stack(found) - exact).square().mean().sqrt()
    assert error <= 1.1 * (rounded - exact).square().mean().sqrt()
    whole = model.session(policy="full")
    whole.feed(TOKENS)
    assert (whole.logits - exact[-1]).abs().max() <= 1.5 * (rounded - exact)[-1].abs().max()


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels on this machine")
@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
def test_fused_matrices_are_packed_part_by_part(
    phi: Path, weights: str, bits: MatrixBits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    model = load_model(str(phi), weights=weights)
    for part in ("self_attn.k_proj", "mlp.up_proj"):
        name = f"model.layers.1.{part}.weight"
        wanted = quantise(model.decoder.tensors[name], bits).values()
        assert torch.equal(model.decoder.packed[name].unpack().values(), wanted)
    session = model.session(policy="full")
    session.feed(TOKENS[:20])
    assert len([session.next_token() for _ in range(3)]) == 3


def test_a_fused_matrix_of_another_size_is_refused(phi: Path) -> None:
    tensors = load_file(phi / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-64].clone()
    save_file(tensors, phi / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadModelFile, match=r"lacks 3 of .*layers\.1\.self_attn\.q_proj"):
        load_model(str(phi))


def test_fused_matrices_in_another_family_are_refused(phi: Path) -> None:
    path = phi / "config.json"
    path.write_text(path.read_text().replace("Phi3ForCausalLM", "LlamaForCausalLM"))
    with pytest.raises(BadModelFile, match=r"of a LlamaForCausalLM, among them .*q_proj"):
        load_model(str(phi))
