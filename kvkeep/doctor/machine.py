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

# CPU features that select kernels and PyTorch's matrix products, by their Linux names.
NOTABLE = (
    *("avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"),
    *("amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)
_BANDWIDTH_SECONDS = 0.5  # of measuring
_MIN_READ, _MAX_READ = 32 << 20, 1 << 30  # bytes read in one pass


@dataclass(frozen=True)
class Processor:
    """The processor. features: those of `NOTABLE` that it has; None if the system lists none."""

    name: str
    architecture: str
    features: tuple[str, ...] | None


@dataclass(frozen=True)
class MemoryFacts:
    """Memory, in bytes. read_per_s: bandwidth of all threads reading read_size repeatedly."""

    total: int
    available: int
    read_per_s: float
    read_size: int


@dataclass(frozen=True)
class Torch:
    """The PyTorch installation.

    capability: the instruction set that torch uses. libraries: its matrix product libraries.
    multiplies_bf16: whether oneDNN has bfloat16 products for this processor; None without oneDNN.
    prompts: the dtype of matrix products during prefill of a bfloat16 model.
    """

    version: str
    capability: str
    libraries: tuple[str, ...]
    multiplies_bf16: bool | None
    prompts: str


@dataclass(frozen=True)
class Cuda:
    """The GPUs. built_for: torch's CUDA version, None without. devices: the names of the GPUs."""

    built_for: str | None
    devices: tuple[str, ...]


def describe_processor() -> Processor:
    facts = cpu_facts()
    flags = facts.get("flags") or facts.get("Features")
    features = None if flags is None else tuple(f for f in NOTABLE if f in flags.split())
    return Processor(processor_name(facts), platform.machine(), features)


def cpu_facts() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first core; empty where there is no such file."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def processor_name(facts: dict[str, str]) -> str:
    """Return the processor's name. facts: the result of `cpu_facts`."""
    name = facts.get("model name")
    if not name and platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    elif not name:
        name = platform.processor()
    return name or platform.machine()


def describe_memory(read_size: int) -> MemoryFacts:
    """Describe the memory and measure its bandwidth: the fastest pass within half a second.

    Decoding with a large model is mostly limited by this bandwidth.

    read_size: bytes that all torch threads read in one pass; at least 32 MiB, since less would fit
    in the processor's caches, and at most 1 GiB or a quarter of free memory.
    """
    memory = psutil.virtual_memory()
    size = max(_MIN_READ, min(read_size, _MAX_READ, memory.available // 4)) // 4 * 4
    buffer = torch.ones(size // 4, dtype=torch.float32, device="cpu")
    bandwidth, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < _BANDWIDTH_SECONDS:
        pass_start = time.perf_counter()
        buffer.sum()
        bandwidth = max(bandwidth, buffer.nbytes / (time.perf_counter() - pass_start))
    return MemoryFacts(memory.total, memory.available, bandwidth, size)


def describe_torch() -> Torch:
    libraries = {"MKL": torch._C.has_mkl, "oneDNN": torch._C._has_mkldnn}
    multiplies_bf16 = None
    if torch._C._has_mkldnn:
        multiplies_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    dtype = torch.bfloat16 if library() is None else prompt_dtype()
    return Torch(
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        tuple(name for name, present in libraries.items() if present),
        multiplies_bf16,
        str(dtype).removeprefix("torch."),
    )


def describe_cuda() -> Cuda:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Cuda(torch.version.cuda, tuple(map(torch.cuda.get_device_name, range(count))))
