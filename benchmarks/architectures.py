"""Which causal language models of transformers work with kvkeep's cache, and why others do not.

    python -m benchmarks.architectures [NAME ...] [--into docs/transformers.md]

Each is built small from its config, with random weights in float32, and read with a KvkeepCache and
with transformers' own cache: whole, in chunks, and in a batch with padding.
"""

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvkeep.errors import KvkeepError
from kvkeep.integrations.transformers import KvkeepCache

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
MOST_WEIGHTS, MOST_SECONDS = 40_000_000, 120
WITHIN = 1e-4  # of the greatest logit, or of 1
LAYERS = 4
# What configs say, where they say it at all.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 4096,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 96,
    "ffn_dim": 96,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 64,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_ssm": 128,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "is_decoder": True,
}
# What else these need.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bart": {"decoder_layers": 2, "encoder_layers": 2, "num_hidden_layers": 2},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["full_attention"] * LAYERS},
    "ctrl": {"dff": 96},
    "falcon": {"multi_query": False, "num_kv_heads": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "intermediate_size": [96] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 32,
    },
    "qwen2_moe": {"sliding_window": None},
    "zamba": {"mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_headdim": 32,
        "n_mamba_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "kv_channels": 16,
        "adapter_rank": 8,
    },
    "dbrx": {"attn_config": None, "ffn_config": None},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Found:
    """works: None where it could not be built small. why: what else became of it."""

    name: str
    kind: str
    works: bool | None
    why: str = ""


def small_config(name: str) -> Any:
    """A config of an architecture, with few and narrow layers."""
    made = CONFIG_MAPPING[name]
    return made(**_small(made, name))


def _small(made: Any, name: str) -> dict[str, Any]:
    """What to make such a config with, and the configs of the parts that it has."""
    default = made()
    stated = default.to_dict()
    chosen: dict[str, Any] = {key: value for key, value in SMALL.items() if key in stated}
    if stated.get("sliding_window") is None:
        chosen.pop("sliding_window", None)
    if stated.get("layer_types") and not isinstance(getattr(made, "layer_types", None), property):
        kinds = list(dict.fromkeys(stated["layer_types"]))
        chosen["layer_types"] = [kinds[i % len(kinds)] for i in range(LAYERS)]
        if chosen.get("sliding_window") and "full_attention" in kinds:
            chosen["sliding_window"] = 16  # shorter than the text
    if "kv_lora_rank" in stated:  # latent attention has as many KV heads as heads
        chosen["num_key_value_heads"] = 4
    for part, kind in made.sub_configs.items():
        own = getattr(default, part, None)
        if own is not None and kind is not AutoConfig:
            chosen[part] = _small(type(own), own.model_type)
        elif own is not None:
            chosen[part] = {**_small(type(own), own.model_type), "model_type": own.model_type}
    return {**chosen, **MORE.get(name, {})}


def small_model(name: str) -> PreTrainedModel:
    """One with random weights, its norms' too. Raises whatever transformers does."""
    config = small_config(name)
    with torch.device("meta"):
        count = sum(x.numel() for x in _from_config(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{count / 1e6:,.0f} million weights at its smallest")
    torch.manual_seed(0)
    model = _from_config(config)
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def _from_config(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def differences(model: PreTrainedModel) -> dict[str, float]:
    """How far logits with a KvkeepCache are from those with transformers' own, in each way."""
    ids = torch.randint(3, 90, (2, 26), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def read(cache: Any, rows: Tensor, mask: Tensor | None, steps: list[int]) -> Tensor:
        found, done = [], 0
        for count in steps:
            seen = None if mask is None else mask[:, : done + count]
            step = rows[:, done : done + count]
            found.append(model(step, attention_mask=seen, past_key_values=cache).logits)
            done += count
        return torch.cat(found, 1)

    def ours() -> KvkeepCache:
        return KvkeepCache(model, 64, policy="full")

    def theirs() -> DynamicCache:
        return DynamicCache(config=model.config)

    one = ids[1:]
    whole = read(theirs(), one, None, [26])
    padded = read(theirs(), ids, mask, [26])
    steps = [11, 1, 1, 13]
    there = mask.bool()
    return {
        "whole": _off(read(ours(), one, None, [26]), whole),
        "in chunks": _off(read(ours(), one, None, steps), whole),
        "padded": _off(read(ours(), ids, mask, [26])[there], padded[there]),
        "padded, in chunks": _off(read(ours(), ids, mask, steps)[there], padded[there]),
    }


def _off(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1)).item()


def tried(name: str) -> Found:
    """What becomes of one architecture."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    try:
        with at_most(MOST_SECONDS):
            model = small_model(name)
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True)
    except Exception as error:
        return Found(name, kind, None, _line(error))
    try:
        with at_most(MOST_SECONDS):
            KvkeepCache(model)
            off = differences(model)
    except (KvkeepError, ImportError) as error:
        return Found(name, kind, False, _line(error))
    wrong = {how: by for how, by in off.items() if not by <= WITHIN}
    if wrong:
        raise AssertionError(f"{name}: logits are off by {wrong}")
    return Found(name, kind, True, "")


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error) or type(error).__name__)[:400]


def table(found: list[Found]) -> str:
    """Markdown."""
    works = [each for each in found if each.works]
    refused = [each for each in found if each.works is False]
    absent = [each for each in found if each.works is None]
    reasons: dict[str, list[str]] = {}
    for each in refused:
        reasons.setdefault(_general(each.why), []).append(each.name)
    lines = [
        f"Of transformers {transformers.__version__}: {len(works)} work, {len(refused)} are "
        f"refused, {len(absent)} could not be built small from their config.",
        "",
        "Work: " + ", ".join(f"`{each.name}`" for each in works) + ".",
        "",
        "| Refused, since | |",
        "|---|---|",
    ]
    for why, names in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"| {why} | {', '.join(f'`{name}`' for name in names)} |")
    lines += ["", "Not built: " + ", ".join(f"`{each.name}`" for each in absent) + "."]
    return "\n".join(lines)


def _general(why: str) -> str:
    """Without the names of one model."""
    why = why.split("kvkeep's memory: ")[-1]
    why = re.sub(r"\b[A-Z]\w*(Attention|ForCausalLM|Layer)\b", "a layer", why)
    why = re.sub(r"\b\d+\b", "n", why)
    return why.split(";")[0].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--into", type=Path, help="a Markdown file that has the marks for it")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for name in asked.names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            found.append(tried(name))
        except AssertionError as error:
            sys.exit(f"{error}: kvkeep took it, and is wrong")
        state = {True: "works", False: "refused", None: "not built"}[found[-1].works]
        print(f"{name}: {state} {found[-1].why}", file=sys.stderr, flush=True)
    if asked.into is None:
        print(table(found))
        return
    text = asked.into.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    made = f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}"
    asked.into.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
