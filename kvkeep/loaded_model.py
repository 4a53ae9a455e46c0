"""A loaded model as its sessions use it: weights, tokenizer, and identity."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkeep.executors import ComputePath, compute_path_of
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import FINAL_NORM
from kvkeep.models.spec.config_fields import read_json
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.pooling import Pooling, read_pooling
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.end_of_turn import end_token_ids, message_end_ids
from kvkeep.models.weights.packed_file import checksum_of
from kvkeep.models.weights.packing import format_name
from kvkeep.session.default_sampling import model_sampling, suppressed_tokens
from kvkeep.session.drafts import RowCost
from kvkeep.session.sampling import Sampling
from kvkeep.storage.snapshots.fingerprint import Fingerprint, compute_fingerprint
from kvkeep.version import __version__

if TYPE_CHECKING:
    from kvkeep.chat.renderer import ChatRenderer


class LoadedModel:
    """Weights and tokenizer of one model, shared by any number of sessions."""

    def __init__(self, name: str, folder: Path, decoder: Decoder, text: TextCodec):
        self.name, self.folder = name, folder
        self.decoder, self.text = decoder, text

    def __repr__(self) -> str:
        spec = self.spec
        layout = self.decoder.new_cache().layout
        millions = sum(map(prod, tensor_shapes(spec).values())) / 1e6
        packed_note = f", decoding from {self.weights}" if self.decoder.packed else ""
        return (
            f"<{type(self).__name__} {self.name}: {spec.architecture}, {spec.layers} layers, "
            f"{millions:,.1f} million weights in {str(layout.dtype).removeprefix('torch.')} "
            f"on {layout.device}{packed_note}>"
        )

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a generation, from all of the model's files.

        The fingerprint covers only `spec.eos_token_ids`, so that older snapshots stay valid.
        """
        return end_token_ids(self.spec, self.text)

    @cached_property
    def message_end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a message in the chat template, of any role."""
        return message_end_ids(self.spec, self.text)

    @cached_property
    def row_cost(self) -> RowCost:
        """Cost of a row in forwards of one session, as measured by all of the model's sessions."""
        return RowCost()

    @cached_property
    def renderer(self) -> "ChatRenderer":
        """Renders whole conversations as prompts, with tools, for this model's template."""
        from kvkeep.chat.renderer import ChatRenderer

        return ChatRenderer(self.text)

    @cached_property
    def default_sampling(self) -> Sampling:
        """Sampling parameters where a request gives none: `DEFAULT_SAMPLING`, with what the model's
        generation_config.json or its GGUF file (`general.sampling.*`) recommends.

        Raises BadModelFile if a recommendation is out of range.
        """
        return model_sampling(*self._generation_config)

    @cached_property
    def suppressed_tokens(self) -> NDArray[np.int64]:
        """Ids `[n]` of tokens that are never sampled, whatever a request says: `suppress_tokens` of
        the model's generation_config.json, or of its GGUF file.

        Raises BadModelFile if they are invalid.
        """
        values, source = self._generation_config
        return suppressed_tokens(values, self.spec.vocab_size, source)

    @cached_property
    def _generation_config(self) -> tuple[Mapping[str, Any], object]:
        """The contents of generation_config.json, {} if there is none, and its name in messages."""
        path = self.folder / "generation_config.json"
        return (read_json(path) if path.exists() else {}), path

    @cached_property
    def pooling(self) -> Pooling:
        """The pooling of an embedding model's hidden states. Raises UnsupportedModel for others."""
        return read_pooling(self.folder)

    @cached_property
    def weights(self) -> str:
        """The format of most bytes that a decode step reads: "Q4_1", "Q4_K", "bf16" and so on."""
        if not self.decoder.packed:
            return format_name(self.decoder.tensors[FINAL_NORM])  # all tensors have the same dtype
        bytes_by_format = Counter[str]()
        for matrix in self.decoder.packed.values():
            bytes_by_format[format_name(matrix)] += matrix.nbytes
        return bytes_by_format.most_common(1)[0][0]

    @cached_property
    def path(self) -> ComputePath:
        """Compute path: the instruction set used here, or torch, and why nothing faster."""
        return compute_path_of(self.spec, self.decoder.new_cache().layout)

    @cached_property
    def packed_digest(self) -> str:
        """Digest of the matrices that a decode step reads instead of tensors; "" for none."""
        return checksum_of(self.decoder.packed) if self.decoder.packed else ""

    @property
    def arithmetic(self) -> dict[str, str]:
        """Everything that the last bits of logits depend on besides model and session.

        Threads: the kernels give the same bits on any number, but torch, which multiplies the
        weights with long prompts, does not.
        """
        device = self.decoder.new_cache().layout.device
        on_cpu, processor = device.type == "cpu", device.type
        if on_cpu:
            processor = torch.backends.cpu.get_cpu_capability()
        elif processor == "cuda":
            processor = torch.cuda.get_device_name(device)
        return {
            "weights": self.weights,
            "packed weights": self.packed_digest,
            "kernels": self.decoder.executor.name,
            "processor": processor,
            "threads": str(torch.get_num_threads()) if on_cpu else "any",
            "torch": torch.__version__,
            "kvkeep": __version__,
        }

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The identity that snapshots are checked against. Reads all weights, once."""
        decoder, layout = self.decoder, self.decoder.new_cache().layout
        fingerprint = compute_fingerprint(self.spec, decoder.weights, self.text.tokenizer, layout)
        return replace(fingerprint, rounding=decoder.executor.rounding)
