"""Model fingerprints, and whether a snapshot continues bit for bit on another machine.

Cells are only valid for the model that computed them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from blake3 import blake3
from tokenizers import Tokenizer
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.errors import FingerprintMismatch
from kvkeep.models.spec.model_spec import ModelSpec, RopeSpec
from kvkeep.storage.files.tensors import tensor_bytes

_FIELDS = ("weights", "config", "rope", "tokenizer", "dtype", "layout")
# The fields of ModelSpec and RopeSpec that determine the content of cells. An addition here changes
# the digest of every model: a new field goes to `_CONFIG_BEYOND`.
_CONFIG = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "norm_eps",
    "max_positions",
    "tied_head",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "bos_token_id",
    "eos_token_ids",
)
# Included unless they are the default, so that models without the feature keep their digest.
_CONFIG_BEYOND = (
    "norms_before",
    "norms_after",
    "centred_norms",
    "parallel",
    "qk_norm_whole",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_multiplier",
    "attention_multiplier",
    "experts",
    "experts_per_token",
    "expert_size",
    "shared_expert_size",
    "norm_topk",
    "sparse_step",
    "dense_layers",
    "local_layers",
    "window",
    "local_kv_heads",
    "local_head_dim",
    "unrotated_layers",
    "shared_kv_layers",
    "sinks",
    "attention_softcap",
    "logits_softcap",
    "activation",
    "unit_norms",
    "embedding_multiplier_rounded",
    "clamped_experts",
    "wide_shared_mlp",
    "keys_as_values",
    "values_normed",
    "per_layer_size",
    "layer_scales",
    "per_layer_vocab",
    "altup_inputs",
    "altup_active",
    "laurel_rank",
    "activation_sparsity",
    "mlp_widths",
    "experts_beside",
    "recurrent",
)
_ROPE = ("kind", "inverse_frequencies", "attention_scaling")


@dataclass(frozen=True)
class Fingerprint:
    """Digests of everything that determines the content of cells.

    weights: of every tensor's name, shape and bytes, as loaded. config: of the architecture's
    numbers without RoPE. rope: of the frequency table and scaling. tokenizer: of its vocabulary.
    dtype, layout: of the cells.

    The digests cover the fields listed in this module and nothing else, so that neither a new field
    nor another release of a library changes a model's fingerprint. earlier_tokenizer: the digest in
    files of version 0.1, of the tokenizer as its library serialises it.
    """

    weights: str
    config: str
    rope: str
    tokenizer: str
    dtype: str
    layout: str
    earlier_tokenizer: str = field(default="", repr=False, compare=False)

    def saved(self) -> dict[str, str]:
        """Return the fields that are saved in files."""
        return {name: getattr(self, name) for name in _FIELDS}

    def digest(self) -> str:
        """Return one hex digest of all saved fields."""
        return _digest(self.saved())

    def describes(self, cells: Tensor) -> bool:
        """Whether keys or values are `[layers, kv_heads, n, head_dim]` of this dtype and layout."""
        if cells.dim() != 4:
            return False
        layers, kv_heads, _, head_dim = cells.shape
        actual = _dtype_name(cells.dtype), _layout_name(layers, kv_heads, head_dim)
        return actual == (self.dtype, self.layout)

    def require(self, saved: Mapping[str, str], source: str) -> None:
        """Raise FingerprintMismatch, naming the differing fields, unless a saved one is equal."""
        differing = [name for name, value in self.saved().items() if saved.get(name) != value]
        if "tokenizer" in differing and saved.get("tokenizer") == self.earlier_tokenizer:
            differing.remove("tokenizer")
        if "dtype" in differing and "weights" in differing:
            differing.remove("weights")  # converted weights always have other bytes
        if differing:
            details = "; ".join(_explain(name, saved, self) for name in differing)
            raise FingerprintMismatch(
                f"{source} belongs to another model: {details}. Load the model that it was saved "
                "with, or evaluate the text again"
            )


def _explain(name: str, saved: Mapping[str, str], here: Fingerprint) -> str:
    then, now = saved.get(name, "missing"), getattr(here, name)
    if name in ("dtype", "layout"):
        return f"the {name} differs ({then} there, {now} here)"
    plural = "differ" if name == "weights" else "differs"
    return f"the {name} {plural} ({then[:12]} there, {now[:12]} here)"


def fingerprint(
    spec: ModelSpec, tensors: Mapping[str, Tensor], tokenizer: Tokenizer, layout: Layout
) -> Fingerprint:
    """Compute the fingerprint of a model. Reads all weights."""
    return Fingerprint(
        weights=weights_digest(tensors),
        config=_digest({name: getattr(spec, name) for name in _CONFIG} | _beyond(spec)),
        rope=_digest(_table(spec.rope) | _local_table(spec)),
        tokenizer=_vocabulary_digest(tokenizer),
        dtype=_dtype_name(layout.dtype),
        layout=_layout_name(layout.layers, layout.kv_heads, layout.head_dim),
        earlier_tokenizer=_earlier_digest(tokenizer),
    )


def _beyond(spec: ModelSpec) -> dict[str, object]:
    """Return the fields of `_CONFIG_BEYOND` that are not the default."""
    defaults = {entry.name: entry.default for entry in fields(ModelSpec)}
    values = {name: getattr(spec, name) for name in _CONFIG_BEYOND}
    return {name: value for name, value in values.items() if value != defaults[name]}


def _table(rope: RopeSpec) -> dict[str, object]:
    return {name: getattr(rope, name) for name in _ROPE}


def _local_table(spec: ModelSpec) -> dict[str, object]:
    """Return the RoPE table of local layers, if they have one of their own."""
    return {"local": _table(spec.local_rope)} if spec.local_rope else {}


def is_tokenizer_of(saved: Mapping[str, str], tokenizer: Tokenizer) -> bool:
    """Whether a saved fingerprint has this tokenizer. Needs no weights."""
    return saved.get("tokenizer") in (_vocabulary_digest(tokenizer), _earlier_digest(tokenizer))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout_name(layers: int, kv_heads: int, head_dim: int) -> str:
    return f"{layers} layers x {kv_heads} KV heads x {head_dim}"


def _vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Digest the text of each id, and which ids are control tokens."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    control = [n for n, added in tokenizer.get_added_tokens_decoder().items() if added.special]
    return _digest([sorted(vocabulary.items(), key=lambda pair: pair[::-1]), sorted(control)])


def _earlier_digest(tokenizer: Tokenizer) -> str:
    return blake3(tokenizer.to_str().encode()).hexdigest()


def _digest(value: object) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest every tensor's name, shape and bytes."""
    digest = blake3(max_threads=blake3.AUTO)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor_bytes(tensor.cpu().contiguous()))
    return digest.hexdigest()


_OLDER = "what computed it is not noted there, as an earlier kvkeep saved it"
# Names of kernels in files of earlier versions, and their present names.
_RENAMED = {"compiled": "compiled avx512bf16"}


@dataclass(frozen=True)
class Exactness:
    """Whether a restored session continues bit for bit as it would have where it was saved.

    differs: the parts of the arithmetic that differ here, and whether the file's codec rounded;
    empty if none does. A difference does not make a session wrong: its cells are the same, apart
    from a codec's rounding, and the logits that follow agree up to rounding.
    """

    differs: tuple[str, ...] = ()

    @property
    def bit_exact(self) -> bool:
        """Whether the same tokens and logits follow, to the last bit."""
        return not self.differs

    @classmethod
    def of(cls, there: Mapping[str, str], here: Mapping[str, str], codec: str) -> "Exactness":
        """Compare the arithmetic of a snapshot with that of this machine.

        there, here: see `LoadedModel.arithmetic`. codec: of the file that was loaded.
        """
        differs = [f"cells: rounded by codec {codec}"] if codec == "int8" else []
        if not there:
            return cls((*differs, _OLDER))
        if there.get("kernels") in _RENAMED:
            there = {**there, "kernels": _RENAMED[there["kernels"]]}
        names = [name for name in here if there.get(name) != here[name]]
        if "weights" in names and "packed weights" in names:
            names.remove("packed weights")  # follows from other weights
        differs += [
            f"{name}: {_short(there, name)} there, {_short(here, name)} here" for name in names
        ]
        return cls(tuple(differs))


def _short(arithmetic: Mapping[str, str], name: str) -> str:
    return arithmetic.get(name, "")[:40] or "none"
