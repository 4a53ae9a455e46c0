"""Try kvkeep's cache with every causal language model of transformers; list which work and why not.

    python -m benchmarks.architectures [NAME ...] [--into docs/transformers.md]

Each architecture is built small from its config, with random float32 weights, and evaluated with a
KvkeepCache and with transformers' own cache: whole, in chunks, and in a padded batch.
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
MAX_WEIGHTS, MAX_SECONDS = 40_000_000, 120
TOLERANCE = 1e-4  # relative to the largest logit, or to 1
LAYERS = 4
# Applied to the fields that a config has.
SMALL_FIELDS = {
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
# Further fields of single architectures.
EXTRA_FIELDS: dict[str, dict[str, Any]] = {
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
class Outcome:
    """The result for one architecture.

    works: None if no small model could be built. why: the reason if it does not work.
    """

    name: str
    kind: str
    works: bool | None
    why: str = ""


def small_config(name: str) -> Any:
    """Return a config of an architecture with few and narrow layers."""
    config_class = CONFIG_MAPPING[name]
    return config_class(**_small_fields(config_class, name))


def _small_fields(config_class: Any, name: str) -> dict[str, Any]:
    """Return the arguments of a small config, those of nested configs included."""
    default = config_class()
    default_fields = default.to_dict()
    fields: dict[str, Any] = {
        key: value for key, value in SMALL_FIELDS.items() if key in default_fields
    }
    if default_fields.get("sliding_window") is None:
        fields.pop("sliding_window", None)
    if default_fields.get("layer_types") and not isinstance(
        getattr(config_class, "layer_types", None), property
    ):
        layer_kinds = list(dict.fromkeys(default_fields["layer_types"]))
        fields["layer_types"] = [layer_kinds[i % len(layer_kinds)] for i in range(LAYERS)]
        if fields.get("sliding_window") and "full_attention" in layer_kinds:
            fields["sliding_window"] = 16  # shorter than the text
    if "kv_lora_rank" in default_fields:  # latent attention has as many KV heads as heads
        fields["num_key_value_heads"] = 4
    for part, part_class in config_class.sub_configs.items():
        part_config = getattr(default, part, None)
        if part_config is not None and part_class is not AutoConfig:
            fields[part] = _small_fields(type(part_config), part_config.model_type)
        elif part_config is not None:
            fields[part] = {
                **_small_fields(type(part_config), part_config.model_type),
                "model_type": part_config.model_type,
            }
    return {**fields, **EXTRA_FIELDS.get(name, {})}


def small_model(name: str) -> PreTrainedModel:
    """Return a small model with random weights, norms included.

    Raises what transformers raises if it cannot be built.
    """
    config = small_config(name)
    with torch.device("meta"):
        count = sum(x.numel() for x in _from_config(config).parameters())
    if count > MAX_WEIGHTS:
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
    """Return the relative error of logits with a KvkeepCache against DynamicCache, by case."""
    ids = torch.randint(3, 90, (2, 26), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def run(cache: Any, rows: Tensor, mask: Tensor | None, steps: list[int]) -> Tensor:
        logits, position = [], 0
        for count in steps:
            step_mask = None if mask is None else mask[:, : position + count]
            step = rows[:, position : position + count]
            logits.append(model(step, attention_mask=step_mask, past_key_values=cache).logits)
            position += count
        return torch.cat(logits, 1)

    def kvkeep_cache() -> KvkeepCache:
        return KvkeepCache(model, 64, policy="full")

    def dynamic_cache() -> DynamicCache:
        return DynamicCache(config=model.config)

    single_row = ids[1:]
    expected = run(dynamic_cache(), single_row, None, [26])
    padded_expected = run(dynamic_cache(), ids, mask, [26])
    steps = [11, 1, 1, 13]
    real_tokens = mask.bool()
    return {
        "whole": _relative_error(run(kvkeep_cache(), single_row, None, [26]), expected),
        "in chunks": _relative_error(run(kvkeep_cache(), single_row, None, steps), expected),
        "padded": _relative_error(
            run(kvkeep_cache(), ids, mask, [26])[real_tokens], padded_expected[real_tokens]
        ),
        "padded, in chunks": _relative_error(
            run(kvkeep_cache(), ids, mask, steps)[real_tokens], padded_expected[real_tokens]
        ),
    }


def _relative_error(logits: Tensor, expected: Tensor) -> float:
    return ((logits - expected).abs().max() / expected.abs().max().clamp_min(1)).item()


def try_architecture(name: str) -> Outcome:
    """Build, run and compare one architecture."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    try:
        with time_limit(MAX_SECONDS):
            model = small_model(name)
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True)
    except Exception as error:
        return Outcome(name, kind, None, _one_line(error))
    try:
        with time_limit(MAX_SECONDS):
            KvkeepCache(model)
            errors = differences(model)
    except (KvkeepError, ImportError) as error:
        return Outcome(name, kind, False, _one_line(error))
    too_large = {way: error for way, error in errors.items() if not error <= TOLERANCE}
    if too_large:
        raise AssertionError(f"{name}: logits are off by {too_large}")
    return Outcome(name, kind, True, "")


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error) or type(error).__name__)[:400]


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as Markdown."""
    working = [outcome for outcome in outcomes if outcome.works]
    refused = [outcome for outcome in outcomes if outcome.works is False]
    not_built = [outcome for outcome in outcomes if outcome.works is None]
    reasons: dict[str, list[str]] = {}
    for outcome in refused:
        reasons.setdefault(_without_model_names(outcome.why), []).append(outcome.name)
    lines = [
        f"Of transformers {transformers.__version__}: {len(working)} work, {len(refused)} are "
        f"refused, {len(not_built)} could not be built small from their config.",
        "",
        "Work: " + ", ".join(f"`{outcome.name}`" for outcome in working) + ".",
        "",
        "| Why it is refused | Architectures |",
        "|---|---|",
    ]
    for why, names in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"| {why} | {', '.join(f'`{name}`' for name in names)} |")
    lines += ["", "Not built: " + ", ".join(f"`{outcome.name}`" for outcome in not_built) + "."]
    return "\n".join(lines)


def _without_model_names(why: str) -> str:
    """Return a reason without the names of single models, so that equal reasons can be grouped."""
    why = why.split("supported by kvkeep: ")[-1]
    why = re.sub(r"\b[A-Z]\w*(Attention|ForCausalLM|Layer)\b", "a layer", why)
    why = re.sub(r"\b\d+\b", "n", why)
    return why.split(";")[0].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--into", type=Path, help="the Markdown file to update")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    outcomes = []
    for name in arguments.names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            outcomes.append(try_architecture(name))
        except AssertionError as error:
            sys.exit(f"{error}: kvkeep accepted it, and its logits are wrong")
        state = {True: "works", False: "refused", None: "not built"}[outcomes[-1].works]
        print(f"{name}: {state} {outcomes[-1].why}", file=sys.stderr, flush=True)
    if arguments.into is None:
        print(table(outcomes))
        return
    text = arguments.into.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    updated = f"{before}{BEGIN}\n\n{table(outcomes)}\n\n{END}{after}"
    arguments.into.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
