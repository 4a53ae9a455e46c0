"""What is loaded of a model: all that sessions of it share."""

from functools import cached_property
from pathlib import Path

import torch

from kvkeep.models.checksum import checksum_of
from kvkeep.models.llama import Decoder
from kvkeep.models.packed import Weights
from kvkeep.models.spec import ModelSpec
from kvkeep.models.text import TextCodec
from kvkeep.store.fingerprint import Fingerprint, fingerprint
from kvkeep.version import __version__


class LoadedModel:
    """Weights and text of one model; any number of sessions share it.

    name: as it was asked for. folder: where its files are.
    """

    def __init__(self, name: str, folder: Path, decoder: Decoder, text: TextCodec):
        self.name = name
        self.folder = folder
        self.decoder = decoder
        self.text = text

    def __repr__(self) -> str:
        spec, tensors = self.spec, self.decoder.tensors
        layout = self.decoder.new_cache().layout
        numbers = sum(tensor.numel() for tensor in tensors.values())
        packed = f", decoding from {self.weights}" if self.decoder.packed else ""
        return (
            f"<{type(self).__name__} {self.name}: {spec.architecture}, {spec.layers} layers, "
            f"{numbers / 1e6:,.1f} million weights in {str(layout.dtype).removeprefix('torch.')} "
            f"on {layout.device}{packed}>"
        )

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def weights(self) -> Weights:
        """What a decode step reads: "int4" where layers are packed in 4 bits, and so on."""
        bits = {matrix.bits for matrix in self.decoder.packed.values()}
        return "int4" if 4 in bits else "int8" if bits else "bf16"

    @cached_property
    def packed_digest(self) -> str:
        """Of the matrices that a decode step reads instead of tensors; "" where there are none."""
        return checksum_of(self.decoder.packed) if self.decoder.packed else ""

    @property
    def arithmetic(self) -> dict[str, str]:
        """What the last bit of the next logits depends on, beside the model and the session.

        The compiled kernels give the same on any number of threads; torch does not.
        """
        device, kernels = self.decoder.new_cache().layout.device, self.decoder.executor.name
        on_cpu = device.type == "cpu"
        capability = torch.backends.cpu.get_cpu_capability
        return {
            "weights": self.weights,
            "packed weights": self.packed_digest,
            "kernels": kernels,
            "processor": capability() if on_cpu else torch.cuda.get_device_name(device),
            "threads": str(torch.get_num_threads()) if on_cpu and kernels == "torch" else "any",
            "torch": torch.__version__,
            "kvkeep": __version__,
        }

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What snapshots of this model's sessions are recognised by. Reads all weights, once."""
        return fingerprint(
            self.spec,
            self.decoder.tensors,
            self.text.tokenizer,
            self.decoder.new_cache().layout,
        )
