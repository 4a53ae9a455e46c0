"""The language models of multimodal models: their logits equal transformers'."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvkeep import load_model
from kvkeep.model_facts import model_facts
from kvkeep.models.spec.config import read_spec

TOKENS = [(17 * i * i + 5 * i) % 40_000 for i in range(90)]
TEXT: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
IMAGES: dict[str, dict[str, Any]] = {
    "Qwen3VL": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 96,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "Qwen3_5": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 96,
        "num_position_embeddings": 16,
    },
    "Qwen3_5Moe": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 96,
        "num_position_embeddings": 16,
    },
    "Qwen2_5_VL": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 96,
        "fullatt_block_indexes": [0],
    },
    "Mistral3": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "head_dim": 16,
    },
    "Gemma3": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "Gemma4": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 8,
    },
}
TEXT_OF: dict[str, dict[str, Any]] = {
    "Mistral3": {"model_type": "mistral", "sliding_window": None},
    "Qwen3_5": DELTA_NET,
    "Qwen3_5Moe": DELTA_NET
    | {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "Gemma3": {
        "num_hidden_layers": 7,
        "sliding_window": 20,
        "rope_parameters": None,
        "final_logit_softcapping": 2.0,  # which the class that reads images does not heed
    },
    "Gemma4": {
        "num_hidden_layers": 12,
        "sliding_window": 20,
        "rope_parameters": None,
        "global_head_dim": 32,
        "num_kv_shared_layers": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 49152,
    },
}


def write_checkpoint(folder: Path, kind: str, tokenizer: Path, tied: bool) -> torch.Tensor:
    """Write a random checkpoint; return transformers' logits of `TOKENS`, `[n, vocab]`."""
    text = deepcopy(TEXT | TEXT_OF.get(kind, {}))  # some config classes change their arguments
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=IMAGES[kind], tie_word_embeddings=tied
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            usual = weight[0].item() if name.endswith("norm.weight") else 0  # 1, or 0 for 1 + 0
            if kind == "Gemma4" and name.endswith("q_norm.weight"):
                usual = 0.15  # products are not scaled
            weight.normal_(usual, 0.15)
        logits = model(torch.tensor([TOKENS])).logits[0]
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", IMAGES)
def test_logits_equal_transformers(
    kind: str, tied: bool, tmp_path: Path, smollm2_folder: Path
) -> None:
    expected = write_checkpoint(tmp_path, kind, smollm2_folder, tied)
    model = load_model(str(tmp_path), dtype="float32")
    assert not any("vis" in name for name in model.decoder.tensors)
    session, logits = model.session(policy="full"), []
    session.feed(TOKENS[:50])
    logits.append(session.logits)
    for token in TOKENS[50:]:
        session.feed([token])
        logits.append(session.logits)
    assert (torch.stack(logits) - expected[49:]).abs().max() <= 1e-4 * expected.abs().max()


def test_gemma_3n_reads_the_tensor_names_of_published_files(
    tmp_path: Path, smollm2_folder: Path
) -> None:
    """Its image encoder needs another library (timm): here only tensors with its names exist."""
    text = TEXT | {
        "rope_parameters": None,
        "num_hidden_layers": 10,
        "sliding_window": 20,
        "num_kv_shared_layers": 5,
        "laurel_rank": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 39_000,
    }
    torch.manual_seed(1)
    reference = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**text)).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            usual = 1 if name.endswith("norm.weight") else 0
            weight.normal_(0.15 if name.endswith("q_norm.weight") else usual, 0.15)
        expected = reference(torch.tensor([TOKENS])).logits[0]
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {  # as transformers 4 wrote it, with what no forward heeds
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
        "rope_scaling": None,
        "query_pre_attn_scalar": 256,
        "altup_lr_multiplier": 1.0,
    }
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    images = {"audio_config": {"hidden_size": 1536}, "vision_config": {"hidden_size": 2048}}
    (tmp_path / "config.json").write_text(json.dumps(whole | images | {"text_config": config}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in load_file(tmp_path / "model.safetensors").items()
    }
    others = (
        "model.vision_tower.timm_model.conv_stem.conv.weight",
        "model.audio_tower.conformer.0.norm.weight",
        "model.embed_vision.embedding.weight",
        "model.embed_audio.embedding_projection.weight",
    )
    save_file(
        tensors | {name: torch.ones(3) for name in others},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_folder / name, tmp_path)
    model = load_model(str(tmp_path), dtype="float32")
    assert not any("vision" in name or "audio" in name for name in model.decoder.tensors)
    assert "(AltUp)" in model_facts(str(tmp_path)).decode
    session = model.session(policy="full")
    session.feed(TOKENS)
    assert (session.logits - expected[-1]).abs().max() <= 1e-4 * expected.abs().max()


def test_older_config_layout_gives_the_same_spec(tmp_path: Path, smollm2_folder: Path) -> None:
    """A flat config with RoPE of type "mrope"."""
    new, old = tmp_path / "new", tmp_path / "old"
    expected = write_checkpoint(new, "Qwen2_5_VL", smollm2_folder, tied=False)
    shutil.copytree(new, old)
    config = json.loads((old / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (old / "config.json").write_text(json.dumps(flat))
    assert read_spec(old) == read_spec(new)
    tensors = load_file(old / "model.safetensors")
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}": x
        for name, x in tensors.items()
        if name.startswith("model.")
    }
    others = {name: x for name, x in tensors.items() if not name.startswith("model.")}
    save_file(renamed | others, old / "model.safetensors", {"format": "pt"})
    session = load_model(str(old), dtype="float32").session(policy="full")
    session.feed(TOKENS)
    assert (session.logits - expected[-1]).abs().max() <= 1e-4 * expected.abs().max()
