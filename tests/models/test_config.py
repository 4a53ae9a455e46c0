"""Reading config.json, of transformers 4 and 5, into a ModelSpec."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.families import FAMILIES

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 16,
}
PLAIN = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "head_dim"),
    [
        (LlamaConfig(**SIZES), False, False, False, False, 8),
        (LlamaConfig(**SIZES, attention_bias=True), True, True, False, False, 8),
        (LlamaConfig(**SIZES, mlp_bias=True, head_dim=16), False, False, True, False, 16),
        (MistralConfig(**SIZES), False, False, False, False, 8),
        (Qwen2Config(**SIZES), True, False, False, False, 8),
        (Qwen3Config(**SIZES), False, False, False, True, 128),
        (Qwen3Config(**SIZES, attention_bias=True, head_dim=8), True, True, False, True, 8),
    ],
    ids=["llama", "llama-bias", "llama-mlp", "mistral", "qwen2", "qwen3", "qwen3-bias"],
)
def test_reads_configs_saved_by_transformers_5(
    tmp_path: Path,
    config: Any,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    head_dim: int,
) -> None:
    name = type(config).__name__.removesuffix("Config") + "ForCausalLM"
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    assert spec.architecture == name
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (qkv_bias, output_bias, mlp_bias)
    assert (spec.qk_norm, spec.head_dim) == (qk_norm, head_dim)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (97, 48, 80)
    assert (spec.layers, spec.heads, spec.kv_heads) == (3, 6, 2)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_head is config.tie_word_embeddings
    assert spec.max_positions == 512
    assert len(spec.rope.inverse_frequencies) == head_dim // 2


def test_rope_settings_of_transformers_4_and_5_give_the_same_spec(tmp_path: Path) -> None:
    old = tmp_path / "4"
    new = tmp_path / "5"
    old.mkdir()
    new.mkdir()
    scaling = {"factor": 3.0}
    write(old, {**PLAIN, "rope_theta": 5e5, "rope_scaling": {"type": "linear", **scaling}})
    write(new, {**PLAIN, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, **scaling}})
    assert read_spec(old) == read_spec(new)
    assert read_spec(old).rope.inverse_frequencies[1] == pytest.approx(5e5 ** (-1 / 4) / 3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"]}, 4096),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, 1024),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 9000),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024}, 9000),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 1024,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            1024,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 1024,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            9000,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 1024,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            1024,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, 9000),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 9000,
                }
            },
            36000,
        ),
    ],
)
def test_sliding_window_bounds_the_trained_length(
    tmp_path: Path, fields: dict[str, Any], expected: int
) -> None:
    write(tmp_path, {**PLAIN, "max_position_embeddings": 9000, **fields})
    assert read_spec(tmp_path).max_positions == expected


def test_generation_config_overrides_end_tokens(tmp_path: Path) -> None:
    config = {**PLAIN, "eos_token_id": 7, "bos_token_id": 1}
    assert read_spec(write(tmp_path, config)).eos_token_ids == (7,)
    spec = read_spec(write(tmp_path, config, {"eos_token_id": [8, 9]}))
    assert spec.eos_token_ids == (8, 9)
    assert spec.bos_token_id == 1
    bare = read_spec(write(tmp_path, PLAIN, {}))
    assert bare.eos_token_ids == ()
    assert bare.bos_token_id is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "su"}}, "su"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "RoPE in each layer"),
    ],
)
def test_unsupported_configs_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named) as caught:
        read_spec(write(tmp_path, {**PLAIN, **fields}))
    if named == "GemmaForCausalLM":
        assert all(name in str(caught.value) for name in FAMILIES)
    if named == "dynamic":
        assert "default, linear, llama3, yarn, longrope" in str(caught.value)


@pytest.mark.parametrize("number", [1e308, 10**400], ids=["float", "integer"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("rope_theta", {}),
        ("partial_rotary_factor", {"architectures": ["GlmForCausalLM"]}),
        ("factor", {"rope_scaling": {"rope_type": "linear"}}),
        ("factor", {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 9}}),
        ("block_ffn_dim_multiplier", {"architectures": ["Lfm2ForCausalLM"], **LFM2}),
    ],
)
def test_a_number_near_the_largest_float_or_beyond_is_read_or_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], number: float
) -> None:
    config = {**PLAIN, **fields}
    scaling = config.get("rope_scaling")
    config = {**config, "rope_scaling": {**scaling, name: number}} if scaling else config
    if scaling is None:
        config[name] = number
    with suppress(BadModelFile):
        assert read_spec(write(tmp_path, config)).rope.inverse_frequencies


STATES = [
    "JambaForCausalLM",
    "MambaForCausalLM",
]
LATENT = ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "MiniCPM3ForCausalLM"]


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        *((name, r"has state layers") for name in STATES),
        *((name, "multi-head latent attention") for name in LATENT),
        ("Glm4MoeForCausalLM", "routes to experts by biased scores"),
        ("PhimoeForCausalLM", "routes to experts with SparseMixer"),
    ],
)
def test_unsupported_architectures_are_refused_with_an_alternative(
    tmp_path: Path, architecture: str, why: str
) -> None:
    write(tmp_path, {**PLAIN, "architectures": [architecture]})
    with pytest.raises(UnsupportedModel, match=rf"{architecture} .*: it .*{why}.* supported;"):
        read_spec(tmp_path)


GRANITE4 = {
    **PLAIN,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["attention", "mamba", "mamba"],
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 4,
}


def test_granite_4_may_have_state_layers_experts_and_no_rope(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, GRANITE4))
    assert spec.states is not None
    assert (spec.states.layers, spec.unrotated_layers) == ((1, 2), (0,))
    assert spec.intermediate_size == 64
    stated = {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"}
    spec = read_spec(write(tmp_path, GRANITE4 | stated))
    assert (spec.states, spec.unrotated_layers, spec.experts) == (None, (), 0)
    unstated = {name: value for name, value in GRANITE4.items() if name != "num_local_experts"}
    spec = read_spec(write(tmp_path, unstated))
    assert (spec.experts, spec.ungated_shared_expert) == (8, True)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"layer_types": ["mamba"] * 3}, "none of 3 layers has attention"),
        ({"layer_types": None}, "none of 3 layers has attention"),
        ({"layer_types": ["attention"]}, "for each of 3 layers"),
        ({"layer_types": ["attention", "sliding_attention", 3]}, "layers of kind"),
        ({"mamba_n_heads": 5}, "mamba_n_heads"),
        ({"mamba_n_groups": 3}, "mamba_n_groups"),
        ({"mamba_d_conv": 1}, "mamba_d_conv"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ],
    ids=str,
)
def test_invalid_mamba_layers_are_refused(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    with pytest.raises((UnsupportedModel, BadModelFile), match=why):
        read_spec(write(tmp_path, GRANITE4 | fields))


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes"])
def test_quantised_checkpoints_are_refused_by_method(tmp_path: Path, method: str) -> None:
    config = {**PLAIN, "quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(UnsupportedModel, match=rf"'{method}'.*bf16 safetensors or a \.gguf file"):
        read_spec(write(tmp_path, config))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no config.json"),
        ("", "empty"),
        ("  \n", "empty"),
        ('{"architectures": [', "not valid JSON"),
        ("[1, 2]", "not an object"),
        ("{}", "architectures"),
        ('{"architectures": ["LlamaForCausalLM"]}', "lacks the field num_attention_heads"),
    ],
)
def test_broken_config_raises_bad_model_file(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadModelFile, match=complaint):
        read_spec(tmp_path)


@pytest.mark.parametrize("missing", sorted(SIZES.keys() - {"num_key_value_heads"}))
def test_missing_field_is_named_in_the_error(tmp_path: Path, missing: str) -> None:
    write(tmp_path, {key: value for key, value in PLAIN.items() if key != missing})
    with pytest.raises(BadModelFile, match=missing):
        read_spec(tmp_path)


@pytest.mark.parametrize("value", [0, -1, 2.5, "12", True, [3]])
def test_invalid_size_is_named_in_the_error(tmp_path: Path, value: Any) -> None:
    with pytest.raises(BadModelFile, match="num_hidden_layers"):
        read_spec(write(tmp_path, {**PLAIN, "num_hidden_layers": value}))


def test_heads_not_divisible_by_kv_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="multiple of num_key_value_heads"):
        read_spec(write(tmp_path, {**PLAIN, "num_key_value_heads": 4}))


GEMMA3 = {**PLAIN, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
WHOLE, LOCAL = "full_attention", "sliding_attention"


def test_missing_fields_take_the_defaults_of_the_config_class(tmp_path: Path) -> None:
    """As in the larger Gemma 3, whose class is multimodal."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    spec = read_spec(write(tmp_path, config))
    assert (spec.vocab_size, spec.heads, spec.kv_heads, spec.head_dim) == (262208, 8, 4, 256)
    assert spec.local_layers == tuple(layer for layer in range(34) if (layer + 1) % 6)
    assert (spec.window, spec.max_positions, spec.tied_head) == (1024, 131072, True)
    assert spec.local_rope is not None
    assert spec.local_rope.inverse_frequencies[64] == 10_000.0**-0.5
    assert spec.rope.inverse_frequencies[64] == 1e6**-0.5 / 8
    assert spec.embedding_multiplier == 2560**0.5
    assert spec.softmax_scale == 1 / 16


def test_local_layers_follow_the_config(tmp_path: Path) -> None:
    def local(**fields: Any) -> tuple[int, ...]:
        return read_spec(write(tmp_path, GEMMA3 | fields)).local_layers

    assert local() == (0, 1, 2, 3, 4, 6)
    assert local(sliding_window_pattern=3) == (0, 1, 3, 4, 6)
    assert local(sliding_window_pattern=1) == ()
    assert local(sliding_window=None, layer_types=[WHOLE] * 7) == ()
    assert local(layer_types=[WHOLE, LOCAL] * 3 + [WHOLE]) == (1, 3, 5)
    # Gemma 2 has no pattern but its own, whatever a config says.
    gemma2 = {"architectures": ["Gemma2ForCausalLM"]}
    assert local(**gemma2, sliding_window_pattern=3) == (0, 2, 4, 6)


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"layer_types": [LOCAL]}, BadModelFile, "each of 7 layers"),
        ({"layer_types": "LLLG"}, BadModelFile, "each of 7 layers"),
        ({"layer_types": ["chunked_attention"] * 7}, UnsupportedModel, "chunked_attention"),
        ({"layer_types": [LOCAL] * 7}, UnsupportedModel, "none of 7 layers has global attention"),
        ({"sliding_window_pattern": 0}, BadModelFile, "sliding_window_pattern"),
        ({"sliding_window": -1}, BadModelFile, "sliding_window"),
        ({"sliding_window": None}, BadModelFile, "since 6 layers have a sliding"),
        (
            {**SMOLLM3, "layer_types": [LOCAL] + [WHOLE] * 6},
            BadModelFile,
            "since 1 layers have a sliding",
        ),
        ({"num_hidden_layers": 1 << 39}, BadModelFile, "layers"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModel, "Gemma 2"),
        ({"use_bidirectional_attention": True}, UnsupportedModel, "use_bidirectional_attention"),
        ({"is_causal": False}, UnsupportedModel, "bidirectional attention.*is_causal"),
        ({"hidden_activation": "gelu"}, UnsupportedModel, "'gelu'"),
        (
            {"architectures": ["Cohere2ForCausalLM"], "use_qk_norm": True},
            UnsupportedModel,
            "Command R",
        ),
        ({**SMOLLM3, "no_rope_layers": [1, 0]}, BadModelFile, "each of 7 layers"),
        ({**SMOLLM3, "no_rope_layers": [1, 0, 2, 1, 1, 1, 1]}, BadModelFile, "0 or 1"),
    ],
)
def test_invalid_layers_are_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_spec(write(tmp_path, GEMMA3 | fields))


NO_WINDOWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sliding_window": None}, BadModelFile, "sliding_window"),
    ({"sliding_window": 0}, BadModelFile, "sliding_window"),
    (
        {"layer_types": [WHOLE] * 12, "num_kv_shared_layers": 2},
        UnsupportedModel,
        "2 layers share cells of others.*none has a window",
    ),
]
GEMMA4 = {
    **PLAIN,
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 12,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": PLAIN["vocab_size"],
}


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"enable_moe_block": True}, BadModelFile, "lacks the field num_experts"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            BadModelFile,
            r"top_k_experts must be at most num_experts \(4\), found 5",
        ),
        ({"vocab_size_per_layer_input": 7}, UnsupportedModel, "vocab_size_per_layer_input"),
        ({"num_kv_shared_layers": 7}, BadModelFile, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 99}, BadModelFile, "num_kv_shared_layers"),
        ({"global_head_dim": 25}, BadModelFile, "heads of 25"),
        (
            {"per_layer_config": {"5": {"head_dim": 24}, "11": {"head_dim": 26}}},
            UnsupportedModel,
            "per_layer_config",
        ),
        ({"per_layer_config": {"5": {"head_dim": 24}}}, UnsupportedModel, r"5, 11\), found 5"),
        *NO_WINDOWS,
        (
            {"rope_parameters": {WHOLE: {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            BadModelFile,
            "partial_rotary_factor",
        ),
    ],
)
def test_invalid_gemma_4_config_is_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    assert read_spec(write(tmp_path, GEMMA4)).head_dim == 512
    with pytest.raises(error, match=named):
        read_spec(write(tmp_path, GEMMA4 | fields))


def test_last_layer_of_gemma_4_is_global(tmp_path: Path) -> None:
    """As in transformers, whatever the config states."""

    def local(**fields: Any) -> tuple[int, ...]:
        return read_spec(write(tmp_path, GEMMA4 | fields)).local_layers

    assert local(num_hidden_layers=8) == (0, 1, 2, 3, 4, 6)
    assert local(num_hidden_layers=3, layer_types=[WHOLE, LOCAL, LOCAL]) == (1,)
    whole = {"layer_types": [WHOLE] * 12}
    assert local(**whole, sliding_window=None) == local(**whole, sliding_window=0) == ()


GEMMA3N = {
    **PLAIN,
    "architectures": ["Gemma3nForCausalLM"],
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": 7,
}


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        *NO_WINDOWS,
        ({"attn_logit_softcapping": 50.0}, UnsupportedModel, "attn_logit_softcapping"),
        ({"altup_correct_scale": False}, UnsupportedModel, "altup_correct_scale"),
        ({"altup_num_inputs": 1 << 30}, BadModelFile, "altup_num_inputs"),
        ({"altup_num_inputs": 0}, BadModelFile, "altup_num_inputs"),
        ({"altup_active_idx": 4}, BadModelFile, "altup_active_idx"),
        ({"laurel_rank": 0}, BadModelFile, "laurel_rank"),
        ({"hidden_size_per_layer_input": 0}, BadModelFile, "hidden_size_per_layer_input"),
        ({"num_kv_shared_layers": 8}, BadModelFile, "num_kv_shared_layers"),
        ({"intermediate_size": [64] * 11}, BadModelFile, "each of 12 layers"),
        ({"intermediate_size": [64] * 11 + [0]}, BadModelFile, "each of 12 layers"),
        ({"intermediate_size": []}, BadModelFile, "each of 12 layers"),
        ({"activation_sparsity_pattern": 0.95}, BadModelFile, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [0.9] * 3}, BadModelFile, "each of 12 layers"),
        ({"activation_sparsity_pattern": [1.0] * 12}, BadModelFile, "each of 12 layers"),
        ({"activation_sparsity_pattern": ["a"] * 12}, BadModelFile, "each of 12 layers"),
    ],
)
def test_invalid_gemma_3n_config_is_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    assert read_spec(write(tmp_path, GEMMA3N)).altup_inputs == 4
    with pytest.raises(error, match=named):
        read_spec(write(tmp_path, GEMMA3N | fields))


def test_gemma_4_scales_and_caps_attention_in_no_other_way(tmp_path: Path) -> None:
    """transformers' Gemma4TextConfig does not have these fields, and its forward ignores them."""
    fields = {"query_pre_attn_scalar": 7, "attn_logit_softcapping": 5.0}
    plain = read_spec(write(tmp_path, GEMMA4))
    assert read_spec(write(tmp_path, GEMMA4 | fields)) == plain
    assert plain.softmax_scale == 1


STATES = {
    "Lfm2": LFM2,
    "Qwen3_5": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_head": 16},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
        "num_local_experts": 0,
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
    },
    "FalconH1": {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16},
    "NemotronH": {"hybrid_override_pattern": "M*-"},
}


@pytest.mark.parametrize("family", STATES)
def test_state_layers_with_another_activation_are_refused(tmp_path: Path, family: str) -> None:
    config = PLAIN | {"architectures": [f"{family}ForCausalLM"]} | STATES[family]
    field = "mamba_hidden_act" if family == "NemotronH" else "hidden_act"
    plain = read_spec(write(tmp_path, config))
    assert plain.states is not None
    for activation in ("silu", "swish"):
        assert read_spec(write(tmp_path, config | {field: activation})) == plain
    for activation in ("gelu_pytorch_tanh", "relu2", None, 5):
        with pytest.raises(UnsupportedModel, match=str(activation)):
            read_spec(write(tmp_path, config | {field: activation}))


def test_layers_with_attention_alone_may_have_another_activation(tmp_path: Path) -> None:
    config = PLAIN | STATES["GraniteMoeHybrid"] | {"layer_types": ["attention"] * 3}
    config |= {"architectures": ["GraniteMoeHybridForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
    assert read_spec(write(tmp_path, config)).activation == "gelu_tanh"


def test_gemma_3n_width_may_be_stated_once_or_per_layer(
    tmp_path: Path,
) -> None:
    """Published files state each layer's, and an attention scale that the forward ignores."""
    uniform = read_spec(write(tmp_path, GEMMA3N | {"intermediate_size": 64}))
    per_layer = {"intermediate_size": [64] * 12, "query_pre_attn_scalar": 256}
    assert read_spec(write(tmp_path, GEMMA3N | per_layer)) == uniform
    assert uniform.softmax_scale == 1
    assert uniform.activation_sparsity == (0.95,) * 10 + (0.0,) * 2
    assert uniform.local_layers == (0, 1, 2, 3, 5, 6, 7, 8, 10, 11)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
OF_EXPERTS = {**PLAIN, "architectures": ["Qwen3MoeForCausalLM"], **EXPERTS}


def test_sparse_layers_follow_the_config(tmp_path: Path) -> None:
    def sparse(**fields: Any) -> list[bool]:
        spec = read_spec(write(tmp_path, OF_EXPERTS | {"num_hidden_layers": 6} | fields))
        return [spec.has_experts(layer) for layer in range(spec.layers)]

    assert sparse() == [True] * 6
    assert sparse(decoder_sparse_step=3) == [False, False, True, False, False, True]
    assert sparse(mlp_only_layers=[0, 4, 99]) == [False, True, True, True, False, True]
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [False] * 3 + [True, False, True]


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"num_experts_per_tok": 9}, BadModelFile, r"num_experts_per_tok .*\(8\), found 9"),
        ({"num_experts": None}, BadModelFile, "num_local_experts"),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0},
            UnsupportedModel,
            "swiglu_limit",
        ),
        ({"moe_intermediate_size": 0}, BadModelFile, "moe_intermediate_size"),
        ({"mlp_only_layers": [0.5]}, BadModelFile, "mlp_only_layers"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        (
            {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0},
            UnsupportedModel,
            "clip_qkv",
        ),
    ],
)
def test_invalid_experts_are_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_spec(write(tmp_path, OF_EXPERTS | fields))
