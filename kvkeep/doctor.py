"""`kvkeep doctor`: processor, kernels, threads, memory, libraries, and the speed of a model."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch

from kvkeep.compiled.binding import library
from kvkeep.compiled.decoder import prompt_dtype, unavailable_reason
from kvkeep.compiled.instruction_sets import TORCH, selected_set
from kvkeep.errors import KvkeepError
from kvkeep.loader import load_model
from kvkeep.model_facts import model_facts
from kvkeep.runtime.cpu import THREAD_VARIABLES, cpu_quota, limit_torch_threads, num_cores
from kvkeep.types import DtypeName, WeightFormat
from kvkeep.version import __version__

# CPU features that select kernels and PyTorch's matrix products, by their Linux names.
_FEATURES = (
    *("avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"),
    *("amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)
_KERNEL_VARIABLES = ("KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS")
_DEFAULT_READ_SIZE = 256 << 20  # bytes read for the bandwidth if no model says how many
_MAX_CELLS = 128  # of the session whose decode speed is measured
_WARMUP_TOKENS, _MEASURED_TOKENS = 8, 32
_BANDWIDTH_SECONDS = 0.5  # that its measurement takes
_MIN_READ, _MAX_READ = 32 << 20, 1 << 30  # bytes read in one pass of the measurement


@dataclass(frozen=True)
class Processor:
    """The processor. features: of `_FEATURES`, those that it has; None if the system lists none."""

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

    capability: its instruction set. libraries: for matrix products. multiplies_bf16: whether oneDNN
    has bfloat16 products for this processor. prompts: the dtype of prefill of a bfloat16 model.
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


@dataclass(frozen=True)
class Kernels:
    """The kernels in use. against: why each faster instruction set is not used, by its name."""

    name: str
    against: dict[str, str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Threads:
    """Threads and cores.

    cores: those that this process may run on. quota: the cgroup CPU quota in cores. load: the load
    average of the last minute. environment: variables that select the number of threads.
    """

    used: int
    cores: int
    quota: float | None
    load: float | None
    environment: dict[str, str]


@dataclass(frozen=True)
class ModelSpeed:
    """The decode speed of a model on this machine.

    decode: the executor, and why a faster one is not used. bytes_per_token: weights read for each
    token. most_tokens_per_s: the limit that memory bandwidth sets while few cells are held.
    """

    name: str
    decode: str
    bytes_per_token: int
    most_tokens_per_s: float
    measured_tokens_per_s: float | None


@dataclass(frozen=True)
class Findings:
    """The report of `kvkeep doctor`. model: None if none is loaded; no_model: the reason."""

    kvkeep: str
    python: str
    system: str
    processor: Processor
    kernels: Kernels
    threads: Threads
    memory: MemoryFacts
    torch: Torch
    cuda: Cuda
    model: ModelSpeed | None
    no_model: str


def examine(name: str, dtype: DtypeName, weights: WeightFormat | None, measure: bool) -> Findings:
    """Examine this machine, and a model if it is there. No model is fetched.

    weights: the format. measure: also decode speed. Raises InvalidArgument for unavailable kernels.
    """
    kernels = _describe_kernels()
    limit_torch_threads()
    facts, model, no_model = None, None, ""
    try:
        facts = model_facts(name, dtype, weights)
    except KvkeepError as error:
        no_model = str(error)
    memory = _measure_memory(facts.bytes_per_token if facts else _DEFAULT_READ_SIZE)
    if facts:
        max_rate = memory.read_per_s / facts.bytes_per_token
        measured = _decode_speed(name, dtype, weights) if measure else None
        model = ModelSpeed(facts.name, facts.decode, facts.bytes_per_token, max_rate, measured)
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Findings(
        kvkeep=__version__,
        python=platform.python_version(),
        system=f"{platform.system()}, {platform.machine()}",
        processor=_describe_processor(),
        kernels=kernels,
        threads=Threads(
            torch.get_num_threads(), num_cores(), cpu_quota(), load, _environment(THREAD_VARIABLES)
        ),
        memory=memory,
        torch=_describe_torch(),
        cuda=Cuda(torch.version.cuda, tuple(map(torch.cuda.get_device_name, devices))),
        model=model,
        no_model=no_model,
    )


def _decode_speed(name: str, dtype: DtypeName, weights: WeightFormat | None) -> float:
    """Load the model and return tokens/s: the inverse of the median time of 32 tokens."""
    session = load_model(name, dtype=dtype, weights=weights).session(_MAX_CELLS)
    session.feed([1])
    seconds = list[float]()
    for _ in range(_WARMUP_TOKENS + _MEASURED_TOKENS):
        start = time.perf_counter()
        session.next_token()
        seconds.append(time.perf_counter() - start)
    return 1 / median(seconds[_WARMUP_TOKENS:])


def _describe_kernels() -> Kernels:
    selected, against = selected_set(), dict(selected_set().rejected)
    if selected.name != TORCH and library() is None:
        against[selected.name] = unavailable_reason()
    name = selected.name if library() else TORCH
    return Kernels(name, against, _environment(_KERNEL_VARIABLES))


def _environment(names: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables of these names that are not empty."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _describe_processor() -> Processor:
    cpuinfo = cpuinfo_fields()
    flags = cpuinfo.get("flags") or cpuinfo.get("Features")
    features = None if flags is None else tuple(f for f in _FEATURES if f in flags.split())
    return Processor(processor_name(cpuinfo), platform.machine(), features)


def cpuinfo_fields() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first core; empty where there is no such file."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def processor_name(cpuinfo: dict[str, str]) -> str:
    name = cpuinfo.get("model name")
    if not name and platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    elif not name:
        name = platform.processor()
    return name or platform.machine()


def _measure_memory(read_size: int) -> MemoryFacts:
    """Measure the bandwidth of memory, which limits decoding: the fastest pass in half a second.

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


def _describe_torch() -> Torch:
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
