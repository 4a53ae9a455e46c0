"""PyTorch, and what it computes with here."""

from dataclasses import dataclass

import torch

from kvkeep.compiled.binding import library
from kvkeep.compiled.decoder import prompt_dtype


@dataclass(frozen=True)
class Torch:
    """capability: of the processor, as torch uses it. libraries: of products, that it has.

    multiplies_bf16: whether oneDNN has bfloat16 products for this processor; None where there is
    no oneDNN. prompts: what the products of a bfloat16 model's prompts are computed in.
    """

    version: str
    capability: str
    libraries: tuple[str, ...]
    multiplies_bf16: bool | None
    prompts: str


@dataclass(frozen=True)
class Cuda:
    """built_for: the CUDA release that torch was built with. devices: the GPUs that it finds."""

    built_for: str | None
    devices: tuple[str, ...]


def describe_torch() -> Torch:
    there = {"MKL": torch._C.has_mkl, "oneDNN": torch._C._has_mkldnn}
    prompts = torch.bfloat16 if library() is None else prompt_dtype()
    return Torch(
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        tuple(name for name, has in there.items() if has),
        _multiplies_bf16(),
        str(prompts).removeprefix("torch."),
    )


def describe_cuda() -> Cuda:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Cuda(torch.version.cuda, tuple(map(torch.cuda.get_device_name, range(count))))


def _multiplies_bf16() -> bool | None:
    if not torch._C._has_mkldnn:
        return None
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
