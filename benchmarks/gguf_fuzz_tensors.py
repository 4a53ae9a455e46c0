"""Tensors of tiny random models under llama.cpp's names, for `gguf_fuzz`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Fields = dict[str, Any]
Tensors = dict[str, NDArray[np.float32]]
VOCABULARY = 259
MIXTURES = ("qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe", "granitemoe", "gpt-oss")
GEMMA = ("gemma2", "gemma3", "gemma3n", "gemma4")
ARCHITECTURES = (
    *("llama", "mistral3", "qwen2", "qwen2vl", "qwen3", "qwen3vl", "phi3", "granite", "olmo2"),
    *("command-r", "glm4", "cohere2", "exaone4", "smollm3", *MIXTURES, *GEMMA),
)
# Architectures whose attention width equals the hidden size.
_ATTENTION_AS_WIDE_AS_HIDDEN = (
    "qwen2",
    "qwen2vl",
    "phi3",
    "olmo2",
    "command-r",
    "cohere2",
    "olmoe",
    "qwen2moe",
    "exaone4",
)
_QK_NORM_PER_HEAD = ("qwen3", "qwen3vl", "qwen3moe", "qwen3vlmoe", "exaone4", "gemma3", "gemma3n")
_QK_NORM_WHOLE = ("olmo2", "olmoe")
_POST_NORM = ("olmo2", "exaone4", "glm4", *GEMMA)
_ALWAYS_TIED = ("command-r", "cohere2", "gemma2")
_NEVER_TIED = ("olmo2", "olmoe", "gpt-oss", "qwen2moe")
_BIASED = ("qwen2", "qwen2vl", "qwen2moe", "gpt-oss")
_MAY_BE_BIASED = ("llama", "granite", "glm4", "granitemoe")
_BIASED_OUTPUT = ("llama", "granite", "granitemoe", "gpt-oss")


class Model:
    """A tiny model of a random architecture and size. fields: metadata keys without the
    architecture's prefix.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.name = str(random.choice(ARCHITECTURES))
        self.is_mixture = self.name in MIXTURES or (self.name == "llama" and self.one_in(4))
        self.kv_heads = int(random.choice([1, 2, 4]))
        self.heads = self.kv_heads * int(random.choice([1, 2]))
        if self.name == "olmoe":
            self.kv_heads = self.heads
        self.head_dim = int(random.choice([16, 32]))
        wide = self.name not in _ATTENTION_AS_WIDE_AS_HIDDEN and self.one_in(2)
        self.hidden = self.heads * self.head_dim + (16 if wide else 0)
        if self.name == "gemma3n":
            self.head_dim, self.hidden = 16, 16 * self.heads
        self.layers = int(random.choice([2, 5, 7])) if self.name != "gemma4" else 6
        self.inner, self.experts = int(random.choice([48, 96])), int(random.choice([4, 8]))
        if self.name == "gemma3n":  # llama.cpp's estimate of the deviation needs many gates
            self.inner = 2048
        # Gemma 4: which layers are local; head widths of local (near) and global (far) layers.
        self.local: list[bool] = []
        self.near_dim = self.far_dim = self.head_dim
        self.keys_as_values = False
        self.fields: Fields = {}
        self.tensors: Tensors = {}

    def one_in(self, count: int) -> bool:
        return bool(self.random.integers(count) == 0)

    def _matrix(self, name: str, *shape: int) -> None:
        values = self.random.standard_normal(shape, dtype=np.float32) * np.float32(
            shape[-1] ** -0.5
        )
        if ".attn_q." in name or ".attn_k." in name or ".attn_qkv." in name:
            values *= 2  # so that attention is far from uniform
        self.tensors[f"{name}.weight"] = np.asarray(values, np.float32)

    def _vector(self, name: str, size: int, about: float = 1.0) -> None:
        values = about + 0.2 * self.random.standard_normal(size)
        self.tensors[name if "." in name[-7:] else f"{name}.weight"] = np.asarray(
            values, np.float32
        )

    def draw_tensors(self) -> None:
        self._matrix("token_embd", VOCABULARY, self.hidden)
        self.tensors["token_embd.weight"] *= np.float32(self.hidden**0.5 * 0.5)
        self._vector("output_norm", self.hidden)
        untied = self.name in _NEVER_TIED or (self.name not in _ALWAYS_TIED and self.one_in(2))
        if untied:
            self._matrix("output", VOCABULARY, self.hidden)
        if self.name in ("gemma3n", "gemma4"):
            self._per_layer_tables()
        self.biased = self.one_in(2)
        for layer in range(self.layers):
            self._attention(layer)
            self._norms(layer)
            self._mlp(layer)
            if self.name in ("gemma3n", "gemma4"):
                self._extras(layer)

    def _attention(self, layer: int) -> None:
        prefix, name, dim = f"blk.{layer}", self.name, self.head_dim
        if name == "gemma4":
            dim = self.near_dim if self.local[layer] else self.far_dim
        queries, keys = self.heads * dim, self.kv_heads * dim
        if name == "phi3":
            self._matrix(f"{prefix}.attn_qkv", queries + 2 * keys, self.hidden)
        else:
            self._matrix(f"{prefix}.attn_q", queries, self.hidden)
            self._matrix(f"{prefix}.attn_k", keys, self.hidden)
            if not (name == "gemma4" and self.keys_as_values and not self.local[layer]):
                self._matrix(f"{prefix}.attn_v", keys, self.hidden)
        self._matrix(f"{prefix}.attn_output", self.hidden, queries)
        mixtral = name == "llama" and self.is_mixture
        if name in _BIASED or (self.biased and name in _MAY_BE_BIASED and not mixtral):
            for part, size in (("q", queries), ("k", keys), ("v", keys)):
                self._vector(f"{prefix}.attn_{part}.bias", size, 0)
            if name in _BIASED_OUTPUT:
                self._vector(f"{prefix}.attn_output.bias", self.hidden, 0)
        if name in (*_QK_NORM_PER_HEAD, "gemma4"):
            self._vector(f"{prefix}.attn_q_norm", dim)
            self._vector(f"{prefix}.attn_k_norm", dim)
            if name in ("gemma3n", "gemma4"):
                self.tensors[f"{prefix}.attn_q_norm.weight"] *= np.float32(dim**-0.5)
        if name in _QK_NORM_WHOLE:
            self._vector(f"{prefix}.attn_q_norm", queries)
            self._vector(f"{prefix}.attn_k_norm", keys)
        if name == "gpt-oss":
            self._vector(f"{prefix}.attn_sinks", self.heads, 0)

    def _norms(self, layer: int) -> None:
        prefix, name = f"blk.{layer}", self.name
        before = name not in ("olmo2", "exaone4")
        kinds = ["attn_norm"] if before else []
        if before and name not in ("command-r", "cohere2", "gpt-oss"):
            kinds.append("ffn_norm")
        if name in _POST_NORM:
            kinds += ["post_attention_norm", "post_ffw_norm"]
        if name == "gpt-oss":
            kinds.append("post_attention_norm")
        for kind in kinds:
            self._vector(f"{prefix}.{kind}", self.hidden)

    def _mlp(self, layer: int) -> None:
        prefix, hidden, inner = f"blk.{layer}", self.hidden, self.inner
        if self.is_mixture:
            self._matrix(f"{prefix}.ffn_gate_inp", self.experts, hidden)
            self._matrix(f"{prefix}.ffn_gate_exps", self.experts, inner, hidden)
            self._matrix(f"{prefix}.ffn_up_exps", self.experts, inner, hidden)
            self._matrix(f"{prefix}.ffn_down_exps", self.experts, hidden, inner)
            if self.name == "qwen2moe":
                self._vector(f"{prefix}.ffn_gate_inp_shexp", hidden, 0)
                self._matrix(f"{prefix}.ffn_gate_shexp", inner, hidden)
                self._matrix(f"{prefix}.ffn_up_shexp", inner, hidden)
                self._matrix(f"{prefix}.ffn_down_shexp", hidden, inner)
            if self.name == "gpt-oss":
                self._vector(f"{prefix}.ffn_gate_inp.bias", self.experts, 0)
                for kind, size in (("gate", inner), ("up", inner), ("down", hidden)):
                    drawn = 0.2 * self.random.standard_normal((self.experts, size))
                    self.tensors[f"{prefix}.ffn_{kind}_exps.bias"] = np.asarray(drawn, np.float32)
            return
        if self.name in ("phi3", "glm4"):
            self._matrix(f"{prefix}.ffn_up", 2 * inner, hidden)
        else:
            self._matrix(f"{prefix}.ffn_gate", inner, hidden)
            self._matrix(f"{prefix}.ffn_up", inner, hidden)
        self._matrix(f"{prefix}.ffn_down", hidden, inner)

    def _per_layer_tables(self) -> None:
        size = self.fields["embedding_length_per_layer_input"]
        if size:
            self._matrix("per_layer_token_embd", VOCABULARY, size * self.layers)
            self._matrix("per_layer_model_proj", size * self.layers, self.hidden)
            self._vector("per_layer_proj_norm", size)
        if self.name == "gemma3n":
            self._matrix("altup_proj", 3, self.hidden, self.hidden)
            self._matrix("altup_unembd_proj", 3, self.hidden, self.hidden)

    def _extras(self, layer: int) -> None:
        prefix, hidden = f"blk.{layer}", self.hidden
        size = self.fields["embedding_length_per_layer_input"]
        if size:
            self._matrix(f"{prefix}.inp_gate", size, hidden)
            self._matrix(f"{prefix}.proj", hidden, size)
            self._vector(f"{prefix}.post_norm", hidden)
        if self.name == "gemma4":
            self._vector(f"{prefix}.layer_output_scale", 1)
            return
        self._matrix(f"{prefix}.altup_correct_coef", 4, 4)
        self._vector(f"{prefix}.altup_correct_scale", hidden)
        self._matrix(f"{prefix}.altup_predict_coef", 16, 4)
        self._matrix(f"{prefix}.altup_router", 4, hidden)
        self._vector(f"{prefix}.altup_router_norm", hidden)
        self._matrix(f"{prefix}.laurel_l", 64, hidden)
        self._matrix(f"{prefix}.laurel_r", hidden, 64)
        self._vector(f"{prefix}.laurel_post_norm", hidden)
