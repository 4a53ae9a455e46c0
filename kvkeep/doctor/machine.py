"""The machine's processor, memory bandwidth, PyTorch and GPUs."""

import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvkeep.compiled.binding import library
from kvkeep.compiled.decoder import prompt_dtype

# What kernels and PyTorch's products are chosen by, as Linux calls it.
NOTABLE = (
    *("avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"),
    *("amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)


@dataclass(frozen=True)
class Processor:
    """features: of `NOTABLE`, those present; None where the system does not list them."""

    name: str
    architecture: str
    features: tuple[str, ...] | None


def processor() -> Processor:
    facts = cpu_facts()
    listed = facts.get("flags") or facts.get("Features")
    features = None if listed is None else tuple(f for f in NOTABLE if f in listed.split())
    return Processor(processor_name(facts), platform.machine(), features)


def cpu_facts() -> dict[str, str]:
    """What Linux says of its first core; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = first.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}


def processor_name(facts: dict[str, str]) -> str:
    """facts: as `cpu_facts` gives them."""
    return facts.get("model name") or _brand() or platform.machine()


def _brand() -> str:
    """The processor's name where there is no /proc."""
    if platform.system() != "Darwin":
        return platform.processor()
    asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


_SECONDS = 0.5  # that are measured
_LEAST, _MOST = 32 << 20, 1 << 30  # bytes


def size_to_read(wanted: int) -> int:
    """Bytes: as many as wanted, within what tells something and what memory has room for."""
    room = psutil.virtual_memory().available // 4
    return max(_LEAST, min(wanted, _MOST, room)) // 4 * 4


def bytes_per_second(size: int) -> float:
    """The fastest pass of half a second of passes over so many bytes, by all threads of torch."""
    numbers = torch.ones(size // 4, dtype=torch.float32, device="cpu")
    fastest, begun = 0.0, time.perf_counter()
    while time.perf_counter() - begun < _SECONDS:
        before = time.perf_counter()
        numbers.sum()
        fastest = max(fastest, numbers.nbytes / (time.perf_counter() - before))
    return fastest


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
