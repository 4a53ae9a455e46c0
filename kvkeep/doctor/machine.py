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


@dataclass(frozen=True)
class Processor:
    """The processor. features: those of `NOTABLE` that it has; None if the system lists none."""

    name: str
    architecture: str
    features: tuple[str, ...] | None


def processor() -> Processor:
    """Describe the processor."""
    facts = cpu_facts()
    listed = facts.get("flags") or facts.get("Features")
    features = None if listed is None else tuple(f for f in NOTABLE if f in listed.split())
    return Processor(processor_name(facts), platform.machine(), features)


def cpu_facts() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first core; empty where there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = first.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}


def processor_name(facts: dict[str, str]) -> str:
    """Return the processor's name. facts: the result of `cpu_facts`."""
    return facts.get("model name") or _brand() or platform.machine()


def _brand() -> str:
    """Return the processor's name if /proc/cpuinfo does not give one."""
    if platform.system() != "Darwin":
        return platform.processor()
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


_SECONDS = 0.5  # of measuring
_LEAST, _MOST = 32 << 20, 1 << 30  # bytes to read in one pass


def size_to_read(wanted: int) -> int:
    """Return the bytes to read in one pass: as wanted, but at most a quarter of free memory.

    At least 32 MiB, since less would fit in the processor's caches, and at most 1 GiB.
    """
    room = psutil.virtual_memory().available // 4
    return max(_LEAST, min(wanted, _MOST, room)) // 4 * 4


def bytes_per_second(size: int) -> float:
    """Measure memory bandwidth, read by all torch threads: the fastest pass within half a second.

    Decoding with a large model is mostly limited by this. size: bytes read in one pass.
    """
    numbers = torch.ones(size // 4, dtype=torch.float32, device="cpu")
    fastest, begun = 0.0, time.perf_counter()
    while time.perf_counter() - begun < _SECONDS:
        before = time.perf_counter()
        numbers.sum()
        fastest = max(fastest, numbers.nbytes / (time.perf_counter() - before))
    return fastest


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


def describe_torch() -> Torch:
    """Describe the PyTorch installation."""
    available = {"MKL": torch._C.has_mkl, "oneDNN": torch._C._has_mkldnn}
    prompts = torch.bfloat16 if library() is None else prompt_dtype()
    return Torch(
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        tuple(name for name, present in available.items() if present),
        _multiplies_bf16(),
        str(prompts).removeprefix("torch."),
    )


def describe_cuda() -> Cuda:
    """Describe the GPUs that torch finds."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Cuda(torch.version.cuda, tuple(map(torch.cuda.get_device_name, range(count))))


def _multiplies_bf16() -> bool | None:
    if not torch._C._has_mkldnn:
        return None
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
