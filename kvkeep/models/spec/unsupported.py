"""Architectures that people ask for and that cannot run here: why not, and what can in their place.

By their names in config.json and in GGUF files.
"""

_MAMBA = "keeps a running state (Mamba) in the place of cells in some layers"
_DELTA = "keeps a running state (Gated DeltaNet) in the place of cells in three of four layers"
_CONVOLUTIONS = "keeps a running state (short convolutions) in the place of cells in most layers"
_LATENT = "keeps keys and values as one compressed vector (multi-head latent attention)"
_GROUPS = "chooses experts by scores with a bias, and in some by groups of them"
_SPARSEMIXER = "chooses experts in a way of its own (SparseMixer)"
_SHARED = "has a shared expert without a gate beside its experts"

_QWEN3 = "Qwen3 runs"
_QWEN3_MOE = "Qwen3 runs, dense or of experts"
_GRANITE = "granite-4.0-micro, -1b and -350m run, and Granite 3"
_LLAMA = "Llama 3 runs"
_GLM = "GLM-4 runs"
_PHI = "Phi-3 and Phi-4 run"
_ANY = "Llama 3, Qwen3 and Granite run"

_WHY: dict[str, tuple[str, str]] = {
    "Qwen3NextForCausalLM": (_DELTA, _QWEN3),
    "qwen3next": (_DELTA, _QWEN3),
    "Qwen3_5ForCausalLM": (_DELTA, _QWEN3),
    "Qwen3_5ForConditionalGeneration": (_DELTA, _QWEN3),
    "qwen35": (_DELTA, _QWEN3),
    "Qwen3_5MoeForCausalLM": (_DELTA, _QWEN3),
    "Qwen3_5MoeForConditionalGeneration": (_DELTA, _QWEN3),
    "qwen35moe": (_DELTA, _QWEN3),
    "Lfm2ForCausalLM": (_CONVOLUTIONS, _ANY),
    "lfm2": (_CONVOLUTIONS, _ANY),
    "Lfm2MoeForCausalLM": (_CONVOLUTIONS, _ANY),
    "lfm2moe": (_CONVOLUTIONS, _ANY),
    "GraniteMoeHybridForCausalLM": (_MAMBA, _GRANITE),
    "granitehybrid": (_MAMBA, _GRANITE),
    "BambaForCausalLM": (_MAMBA, _GRANITE),
    "FalconH1ForCausalLM": (_MAMBA, "Falcon 3 runs, which is a Llama"),
    "falcon-h1": (_MAMBA, "Falcon 3 runs, which is a Llama"),
    "NemotronHForCausalLM": (_MAMBA, _LLAMA),
    "nemotron_h": (_MAMBA, _LLAMA),
    "nemotron_h_moe": (_MAMBA, _LLAMA),
    "JambaForCausalLM": (_MAMBA, _ANY),
    "jamba": (_MAMBA, _ANY),
    "MambaForCausalLM": (_MAMBA, _ANY),
    "Mamba2ForCausalLM": (_MAMBA, _ANY),
    "mamba": (_MAMBA, _ANY),
    "mamba2": (_MAMBA, _ANY),
    "DeepseekV2ForCausalLM": (_LATENT, "its distillations into Qwen2 and Llama run"),
    "DeepseekV3ForCausalLM": (_LATENT, "its distillations into Qwen2 and Llama run"),
    "deepseek2": (_LATENT, "its distillations into Qwen2 and Llama run"),
    "MiniCPM3ForCausalLM": (_LATENT, _ANY),
    "minicpm3": (_LATENT, _ANY),
    "Mistral4ForCausalLM": (_LATENT, "Mistral Small 3 and Ministral 3 run"),
    "mistral4": (_LATENT, "Mistral Small 3 and Ministral 3 run"),
    "Qwen3VLMoeForConditionalGeneration": (
        "stores experts in another order",
        "a GGUF file of it runs, and Qwen3-VL",
    ),
    "Glm4MoeForCausalLM": (_GROUPS, _GLM),
    "glm4moe": (_GROUPS, _GLM),
    "Ernie4_5_MoeForCausalLM": (_GROUPS, _QWEN3_MOE),
    "ernie4_5-moe": (_GROUPS, _QWEN3_MOE),
    "Dots1ForCausalLM": (_GROUPS, _QWEN3_MOE),
    "dots1": (_GROUPS, _QWEN3_MOE),
    "PhimoeForCausalLM": (_SPARSEMIXER, _PHI),
    "phimoe": (_SPARSEMIXER, _PHI),
    "GraniteMoeSharedForCausalLM": (_SHARED, _GRANITE),
}


def why_not(architecture: object) -> str:
    """What is to be said of it behind its name: nothing where it is not one of these."""
    if not isinstance(architecture, str) or architecture not in _WHY:
        return ""
    why, instead = _WHY[architecture]
    return f": it {why}. In its place {instead}"
