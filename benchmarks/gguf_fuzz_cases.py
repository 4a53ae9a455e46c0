"""Random GGUF files of tiny models, for `gguf_fuzz`: their metadata and their tensors.

Each architecture that kvkeep reads gets the tensors that llama.cpp requires. Its metadata fields
are randomly present, absent or unusual. Fields that llama.cpp ignores but kvkeep follows, as the
model's own config does, are never generated: `yarn_attn_factor` and the betas except for mistral3,
`expert_weights_norm`, EXAONE 4's window except with 64 layers, a window of Phi-3 or Llama shorter
than the prompt, Qwen2-VL's epsilon, and what llama.cpp hard-codes for Gemma 3n. YaRN is not
generated for gpt-oss: llama.cpp rounds the ends of the ramp, the model does not.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.gguf_fuzz_tensors import VOCABULARY, Fields, Model, Tensors
from kvkeep.models.spec.rope import rope_spec

_CONTEXT = 512
_TABLED = ("llama", "mistral3", "granite", "granitemoe", "exaone4")  # may have rope_freqs.weight
_LONGROPE = ("llama", "mistral3", "granite", "granitemoe")


@dataclass
class Case:
    """A file to write. fields: metadata without the tokenizer's."""

    architecture: str
    fields: Fields = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)

    def write(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.fields.items():
            _add(writer, key, value)
        _add_vocabulary(writer)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add a vocabulary of the 256 bytes, one merge, and two control tokens."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "he", "<|start|>", "<|stop|>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)


def draw(seed: int) -> Case:
    """Return the random case of a seed."""
    return _Drawing(np.random.default_rng(seed)).case()


class _Drawing(Model):
    def case(self) -> Case:
        self._sizes()
        self._rope()
        self._family()
        self.draw_tensors()
        prefixed = {f"{self.name}.{key}": value for key, value in self.fields.items()}
        return Case(self.name, prefixed, self.tensors)

    def maybe(self, key: str, *values: Any, one_in: int = 2) -> None:
        """Set a field to one of the values with probability 1 / `one_in`."""
        if self.one_in(one_in):
            self.fields[key] = values[self.random.integers(len(values))]

    def always(self, key: str, *values: Any) -> None:
        self.maybe(key, *values, one_in=1)

    def _each(self, value: int) -> Any:
        """Return the value, or a list with it for each layer."""
        return [value] * self.layers if self.one_in(6) else value

    def _sizes(self) -> None:
        self.fields |= {
            "context_length": _CONTEXT,
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "attention.head_count": self._each(self.heads),
            "feed_forward_length": self._each(self.inner),
        }
        if self.kv_heads != self.heads or self.one_in(2):
            self.fields["attention.head_count_kv"] = self._each(self.kv_heads)
        if self.heads * self.head_dim != self.hidden or self.one_in(2):
            self.fields |= dict.fromkeys(
                ("attention.key_length", "attention.value_length"), self.head_dim
            )
        centred = self.name in ("command-r", "cohere2")
        kind = "layer_norm_" if centred else "layer_norm_rms_"
        wide = [] if self.name == "qwen2vl" else [1e-5, 1e-2]  # where llama.cpp takes 0 for it
        self.always(f"attention.{kind}epsilon", 1e-6, *wide)
        self.maybe("attention.causal", True, one_in=6)
        self.maybe("vocab_size", VOCABULARY, one_in=3)

    def _rope(self) -> None:
        self.maybe("rope.freq_base", 1e4, 5e5, 500.0, 1e6)
        kinds = ["none", "linear", "linear", *(["yarn"] if self.name != "gpt-oss" else [])]
        if self.name in _LONGROPE:
            kinds.append("longrope")
        self.maybe("rope.scaling.type", *kinds)
        self.maybe("rope.scaling.factor", 0.0, 1.0, 2.0, 4.0, 2.5, one_in=3)
        self.maybe("rope.scale_linear", 0.0, 1.0, 2.0, 8.0, one_in=4)
        self.maybe("rope.scaling.attn_factor", 1.0, 1.25, 0.75, one_in=3)
        self.maybe("rope.scaling.original_context_length", 256, 300, _CONTEXT, one_in=3)
        self.maybe("rope.scaling.finetuned", True, one_in=6)
        self.maybe("attention.temperature_scale", 0.0, 0.1, 0.5, one_in=4)
        if self.name == "mistral3":
            self.maybe("rope.scaling.yarn_log_multiplier", 0.0, 1.0, 0.5)
            self.maybe("rope.scaling.yarn_beta_fast", 32.0, 16.0)
            self.maybe("rope.scaling.yarn_beta_slow", 1.0, 2.0)
        self.rotated = self.head_dim
        if self.name in ("phi3", "glm4") and self.one_in(2):
            self.rotated = self.head_dim // 2
        if self.rotated != self.head_dim or self.one_in(2):
            self.fields["rope.dimension_count"] = self.rotated
        pairs, longrope = self.rotated // 2, self.fields.get("rope.scaling.type") == "longrope"
        if (longrope or self.name == "phi3") and self.one_in(2):
            for kind in ("short", "long"):
                self.tensors[f"rope_factors_{kind}.weight"] = self._divisors(pairs)
        elif self.name in _TABLED and not longrope and self.one_in(3):
            self.tensors["rope_freqs.weight"] = self._divisors(pairs)

    def _divisors(self, pairs: int) -> NDArray[np.float32]:
        """Return frequency divisors: random, all 1, or those of Llama 3."""
        kind = self.random.integers(3)
        if kind == 0:
            return np.asarray(self.random.uniform(0.8, 6, pairs), np.float32)
        if kind == 1:
            return np.ones(pairs, np.float32)
        theta = self.fields.get("rope.freq_base", 1e4)
        settings: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        settings |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
        plain, scaled = (
            np.array(rope_spec(each, theta, 2 * pairs, 1).inverse_frequencies)
            for each in ({}, settings)
        )
        return np.asarray(plain / scaled, np.float32)

    def _family(self) -> None:
        """Draw fields that one family reads; some are also drawn for families that ignore them."""
        name = self.name
        if name in ("granite", "granitemoe"):
            self.always("logit_scale", 3.0, 1.0, 8.0)
            self.maybe("embedding_scale", 0.0, 1.0, 12.0)
            self.maybe("residual_scale", 0.0, 1.0, 0.22)
            self.maybe("attention.scale", 0.0, 0.0625, 0.3)
        else:
            self.maybe("attention.scale", 0.0625, one_in=8)
            self.maybe("residual_scale", 0.5, one_in=8)
        if name == "command-r":
            self.maybe("logit_scale", 0.0, 0.0625, 0.25)
        if name == "cohere2":
            self.always("logit_scale", 0.0625, 0.25)
        if name in ("qwen2vl", "qwen3vl", "qwen3vlmoe"):
            pairs = self.head_dim // 2  # more or less of one section leaves pairs unrotated there
            self.fields["rope.dimension_sections"] = [
                *((pairs + more) // 3 for more in (2, 1, 0)),
                0,
            ]
        if name in ("cohere2", "gpt-oss", "gemma3n", "gemma4"):
            self.always("attention.sliding_window", 8, 20, 100)
        if name in ("gemma2", "gemma3", "olmo2"):
            self.maybe("attention.sliding_window", 8, 20, 100)
        if name in ("cohere2", "gpt-oss", "gemma2", "gemma3", "olmo2"):
            some = [bool(self.random.integers(2)) for _ in range(self.layers - 1)]
            self.maybe("attention.sliding_window_pattern", 1, 2, 3, [*some, False], [False, *some])
        if name in ("gemma3", "gemma3n", "gemma4"):
            self.maybe("rope.freq_base_swa", 1e4, 500.0)
        if name == "gemma2":
            self.maybe("attn_logit_softcapping", 2.0, 50.0)
        if name in ("gemma2", "gemma3", "gemma4"):
            self.maybe("final_logit_softcapping", 3.0, 30.0, *([] if name == "gemma2" else [0.0]))
        if self.is_mixture:
            self.fields |= {"expert_count": self.experts, "expert_used_count": 2}
            self.maybe("expert_weights_scale", 0.0, 1.0, one_in=4)
            self.maybe("expert_gating_func", 1, one_in=4)
        if name in ("qwen2moe", "qwen3moe", "qwen3vlmoe", "gpt-oss"):
            self.fields["expert_feed_forward_length"] = self.inner
        if name == "qwen2moe":
            self.fields["expert_shared_feed_forward_length"] = self.inner
        if name == "gemma3n":
            self._gemma3n()
        if name == "gemma4":
            self._gemma4()

    def _gemma3n(self) -> None:
        self.fields |= {"embedding_length_per_layer_input": 256}
        self.maybe("altup.num_inputs", 4)
        self.maybe("altup.active_idx", 0)
        self.maybe("attention.shared_kv_layers", 0)
        self.maybe("activation_sparsity_scale", [1.6448533535003662] * self.layers)
        self.maybe("attention.sliding_window_pattern", [True, False, *[True] * (self.layers - 2)])

    def _gemma4(self) -> None:
        self.local = [True, True, False] * 2
        self.near_dim = int(self.random.choice([16, 32]))
        shared = 0 if self.one_in(2) else 3
        per_layer = 0 if self.one_in(2) else 24
        self.keys_as_values = not shared and self.one_in(2)
        self.fields |= {
            "attention.key_length": self.far_dim,
            "attention.value_length": self.far_dim,
            "attention.key_length_swa": self.near_dim,
            "attention.value_length_swa": self.near_dim,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self._each(self.kv_heads),
            "attention.sliding_window_pattern": self.local,
            "embedding_length_per_layer_input": per_layer,
            "rope.dimension_count": self.far_dim,
            "rope.dimension_count_swa": self.near_dim,
        }
        if shared or self.one_in(2):
            self.fields["attention.shared_kv_layers"] = shared
        count = self.far_dim // 2
        turned = int(self.random.choice([count, count // 4]))
        table = [1.0] * turned + [1e30] * (count - turned)
        self.tensors["rope_freqs.weight"] = np.array(table, np.float32)
