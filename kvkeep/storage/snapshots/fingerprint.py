"""Model fingerprints, and whether a snapshot continues bit for bit on another machine.

Cells are only valid for the model that computed them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import itemgetter

import torch
from blake3 import blake3
from tokenizers import Tokenizer
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.errors import FingerprintMismatch
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.storage.files.tensors import tensor_bytes

_ROPE_FIELDS = ("kind", "inverse_frequencies", "attention_scaling")


@dataclass(frozen=True)
class Fingerprint:
    """Digests of everything that determines the content of cells.

    Neither a new field of ModelSpec nor another release of a library changes a fingerprint.
    """

    weights: str  # the digest of every tensor's name, shape and bytes, as loaded
    config: str  # of the architecture's numbers without RoPE
    rope: str  # of the frequency table and scaling
    tokenizer: str  # of its vocabulary
    dtype: str  # not a digest: the name of the cells' dtype
    layout: str  # not a digest: the numbers of layers and KV heads, and the width of a head
    # Not a digest: the prefill steps in which an engine evaluates prompts, in its prefix caches.
    steps: str = ""
    # Not a digest, and not saved: `Executor.rounding`, by which prefix caches keep cells apart.
    rounding: str = ""
    legacy_tokenizer: str = field(default="", repr=False, compare=False)  # as version 0.1 made it

    def to_dict(self) -> dict[str, str]:
        """Return the fields that are saved in files."""
        left_out = {"rounding", "legacy_tokenizer", *(() if self.steps else ("steps",))}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def digest(self) -> str:
        """Return one hex digest of all saved fields, and of the rounding if there is one."""
        rounding = {"rounding": self.rounding} if self.rounding else {}
        return _digest(self.to_dict() | rounding)

    def matches_cells(self, cells: Tensor) -> bool:
        """Whether keys or values are `[layers, kv_heads, n, head_dim]` of this dtype and layout.

        cells: keys or values from a file of a prefix cache, which may be damaged.
        """
        if cells.dim() != 4:
            return False
        layers, kv_heads, _, head_dim = cells.shape
        actual = _dtype_name(cells.dtype), _layout_name(layers, kv_heads, head_dim)
        return actual == (self.dtype, self.layout)

    def require_match(self, saved: Mapping[str, str], source: str) -> None:
        """Raise FingerprintMismatch, naming the differing fields, unless the saved one is equal.

        source: what was saved, such as "the snapshot", for the message.
        """
        mismatches = [name for name, value in self.to_dict().items() if saved.get(name) != value]
        if "tokenizer" in mismatches and saved.get("tokenizer") == self.legacy_tokenizer:
            mismatches.remove("tokenizer")
        if "dtype" in mismatches and "weights" in mismatches:
            mismatches.remove("weights")  # converted weights always have other bytes
        if mismatches:
            details = "; ".join(self._describe_mismatch(name, saved) for name in mismatches)
            raise FingerprintMismatch(
                f"{source} belongs to another model: {details}. Load the model it was saved with, "
                "or evaluate the text again"
            )

    def _describe_mismatch(self, name: str, saved: Mapping[str, str]) -> str:
        length = None if name in ("dtype", "layout") else 12  # digests are shortened
        saved_value, own_value = saved.get(name, "missing")[:length], getattr(self, name)[:length]
        verb = "differ" if name == "weights" else "differs"
        return f"the {name} {verb} ({saved_value} saved, {own_value} loaded)"


def compute_fingerprint(
    spec: ModelSpec, tensors: Mapping[str, Tensor], tokenizer: Tokenizer, layout: Layout
) -> Fingerprint:
    """Compute the fingerprint of a model; this reads all weights. layout: of its cells."""
    return Fingerprint(
        weights=weights_digest(tensors),
        config=_digest(_config_without_rope(spec)),
        rope=_digest(_rope_tables(spec)),
        tokenizer=_vocabulary_digest(tokenizer),
        **layout_fields(layout),
        legacy_tokenizer=_legacy_digest(tokenizer),
    )


def _config_without_rope(spec: ModelSpec) -> dict[str, object]:
    """Return the fields but RoPE's that differ from their defaults.

    So a model keeps its digest when a field with a default is added for other models.
    """
    field_values = {f.name: getattr(spec, f.name) for f in fields(ModelSpec)}
    non_default = [f.name for f in fields(ModelSpec) if field_values[f.name] != f.default]
    config = {x: field_values[x] for x in non_default if x not in ("rope", "local_rope")}
    if spec.states is not None:
        config["states"] = spec.states.non_default_fields()
    return config


def _rope_tables(spec: ModelSpec) -> dict[str, object]:
    """Return what determines the rotation of keys, in global and in local layers."""
    tables: dict[str, object] = {name: getattr(spec.rope, name) for name in _ROPE_FIELDS}
    if spec.local_rope:
        tables["local"] = {name: getattr(spec.local_rope, name) for name in _ROPE_FIELDS}
    return tables


def matches_tokenizer(saved: Mapping[str, str], tokenizer: Tokenizer) -> bool:
    """Whether a saved fingerprint is of a model with this tokenizer."""
    return saved.get("tokenizer") in (_vocabulary_digest(tokenizer), _legacy_digest(tokenizer))


def layout_fields(layout: Layout) -> dict[str, str]:
    """Return the fields of a fingerprint that describe the layout of cells."""
    name = _layout_name(layout.layers, layout.kv_heads, layout.head_dim)
    return {"dtype": _dtype_name(layout.dtype), "layout": name}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout_name(layers: int, kv_heads: int, head_dim: int) -> str:
    return f"{layers} layers x {kv_heads} KV heads x {head_dim}"


def _vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Digest the text of each id, and the set of control tokens."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    control = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return _digest([sorted(vocabulary.items(), key=itemgetter(1, 0)), sorted(control)])


def _legacy_digest(tokenizer: Tokenizer) -> str:
    """Digest the tokenizer as version 0.1 did: as its library serialises it."""
    return blake3(tokenizer.to_str().encode()).hexdigest()


def _digest(value: object) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest every tensor's name, shape and bytes."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        hasher.update(tensor_bytes(tensor.cpu().contiguous()))
    return hasher.hexdigest()


_MAX_NAME = 80  # characters of a name in a difference; a file may say anything
_NO_ARITHMETIC = "the arithmetic is not recorded (saved by an earlier kvkeep version)"
_RENAMED_KERNELS = {"compiled": "compiled avx512bf16"}  # names in files of earlier versions


@dataclass(frozen=True)
class Exactness:
    """Whether a restored session continues bit for bit as it would have where it was saved.

    differs: descriptions of the arithmetic that differs here, and of the codec if it rounds. A
    session with differences is not wrong: its logits agree up to rounding.
    """

    differs: tuple[str, ...] = ()

    @property
    def bit_exact(self) -> bool:
        """Whether the same tokens and logits follow, to the last bit."""
        return not self.differs

    @classmethod
    def of(cls, saved: Mapping[str, str], current: Mapping[str, str]) -> "Exactness":
        """Compare the arithmetic of a snapshot with that of this machine.

        saved, current: the kernels, threads and weights of each, by name, as in
        `LoadedModel.arithmetic`; {} if not saved.
        """
        if not saved:
            return cls((_NO_ARITHMETIC,))
        if saved.get("kernels") in _RENAMED_KERNELS:
            saved = {**saved, "kernels": _RENAMED_KERNELS[saved["kernels"]]}
        mismatches = [name for name in current if saved.get(name) != current[name]]
        if "weights" in mismatches and "packed weights" in mismatches:
            mismatches.remove("packed weights")  # follows from other weights
        differs = list[str]()
        for name in mismatches:
            there, here = (
                values.get(name, "")[:_MAX_NAME] or "none" for values in (saved, current)
            )
            differs.append(f"{name}: {there} saved, {here} here")
        return cls(tuple(differs))

    def rounded_by(self, codec: str) -> "Exactness":
        """Return the exactness of cells that a codec rounded. codec: "" for none."""
        return Exactness((f"cells: rounded by codec {codec}", *self.differs)) if codec else self
