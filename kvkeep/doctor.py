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

from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import TORCH, selected_set
from kvkeep.compiled.products import prompt_products, prompt_row_bits, unavailable_reason
from kvkeep.errors import KvkeepError
from kvkeep.loader import load_model
from kvkeep.model_facts import ModelFacts, model_facts
from kvkeep.runtime.cpu import THREAD_VARIABLES, cpu_quota, limit_torch_threads, num_cores
from kvkeep.types import DtypeName, WeightFormat
from kvkeep.version import __version__

# CPU features that select kernels and PyTorch's matrix products, by their Linux names.
_CPU_FEATURES = (
    *("avx2", "fma", "f16c"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"),
    "avx_vnni",
    *("amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)
_KERNEL_VARIABLES = ("KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS", "KVKEEP_PROMPT_BITS")
_MAX_KV_SIZE = 128  # of the session whose decode speed is measured
_WARMUP_TOKENS, _MEASURED_TOKENS = 8, 32
_BANDWIDTH_SECONDS = 0.5  # how long the bandwidth of memory is measured
_DEFAULT_READ_BYTES = 256 << 20  # read in one pass over memory if no model says how many
_MIN_READ_BYTES, _MAX_READ_BYTES = 32 << 20, 1 << 30  # limits of that number

# The fields of these classes are the JSON keys of `kvkeep doctor --json`.


@dataclass(frozen=True)
class ProcessorFacts:
    name: str
    architecture: str
    features: tuple[str, ...] | None  # those of `_CPU_FEATURES` that it has; None if unknown


@dataclass(frozen=True)
class MemoryFacts:
    total: int  # bytes
    available: int
    read_per_s: float  # bandwidth: bytes per second, when all threads read `read_size` repeatedly
    read_size: int


@dataclass(frozen=True)
class TorchFacts:
    """The PyTorch installation."""

    version: str
    capability: str  # its instruction set
    libraries: tuple[str, ...]  # for matrix products
    multiplies_bf16: bool | None  # oneDNN has bfloat16 products for this CPU; None without oneDNN
    prompts: str  # in which numbers prompts of a bfloat16 model are multiplied


@dataclass(frozen=True)
class CudaFacts:
    built_for: str | None  # torch's CUDA version
    devices: tuple[str, ...]  # names of the GPUs


@dataclass(frozen=True)
class KernelFacts:
    """The kernels in use."""

    name: str  # their instruction set, or "torch"
    against: dict[str, str]  # why each faster instruction set is not used, by its name
    environment: dict[str, str]  # variables that select kernels and how they multiply


@dataclass(frozen=True)
class ThreadFacts:
    used: int  # by torch
    cores: int  # those that this process may run on
    quota: float | None  # the cgroup CPU quota in cores
    load: float | None  # the load average of the last minute
    environment: dict[str, str]  # variables that select the number of threads


@dataclass(frozen=True)
class ModelSpeed:
    """The decode speed of a model on this machine."""

    name: str
    decode: str  # the executor, and why a faster one is not used
    bytes_per_token: int  # of the weights that are read for each token
    most_tokens_per_s: float  # the limit that memory bandwidth sets while few cells are held
    measured_tokens_per_s: float | None
    state_bytes: int  # of a session's states
    checkpoint_bytes: int  # of one checkpoint of a session; 0 for a model that needs none


@dataclass(frozen=True)
class Findings:
    """The report of `kvkeep doctor`."""

    kvkeep: str  # version
    python: str  # version
    system: str
    processor: ProcessorFacts
    kernels: KernelFacts
    threads: ThreadFacts
    memory: MemoryFacts
    torch: TorchFacts
    cuda: CudaFacts
    model: ModelSpeed | None  # None if it is not on this machine
    no_model: str  # why not, or ""


def examine(name: str, dtype: DtypeName, weights: WeightFormat | None, measure: bool) -> Findings:
    """Examine this machine, and a model if it is there. No model is fetched.

    name, dtype, weights: as for `load_model`. measure: whether to load the model and measure its
    decode speed. Raises InvalidArgument for unavailable kernels and a wrong KVKEEP_PROMPT_BITS.
    """
    prompt_row_bits()  # refused here, and not as a reason against the model
    kernels = _describe_kernels()
    limit_torch_threads()
    facts, no_model = None, ""
    try:
        facts = model_facts(name, dtype, weights)
    except KvkeepError as error:
        no_model = str(error)
    memory = _measure_memory(facts.bytes_per_token if facts else _DEFAULT_READ_BYTES)
    measured_speed = _measure_decode(name, dtype, weights) if facts and measure else None
    load_average = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    gpu_indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Findings(
        kvkeep=__version__,
        python=platform.python_version(),
        system=f"{platform.system()}, {platform.machine()}",
        processor=_describe_processor(),
        kernels=kernels,
        threads=ThreadFacts(
            used=torch.get_num_threads(),
            cores=num_cores(),
            quota=cpu_quota(),
            load=load_average,
            environment=_environment(THREAD_VARIABLES),
        ),
        memory=memory,
        torch=_describe_torch(),
        cuda=CudaFacts(torch.version.cuda, tuple(map(torch.cuda.get_device_name, gpu_indices))),
        model=_model_speed(facts, memory.read_per_s, measured_speed) if facts else None,
        no_model=no_model,
    )


def _model_speed(facts: ModelFacts, read_per_s: float, measured: float | None) -> ModelSpeed:
    max_speed = read_per_s / facts.bytes_per_token
    speed = (facts.bytes_per_token, max_speed, measured)
    return ModelSpeed(facts.name, facts.decode, *speed, facts.state_bytes, facts.checkpoint_bytes)


def _measure_decode(name: str, dtype: DtypeName, weights: WeightFormat | None) -> float:
    """Load the model and return tokens/s: the inverse of the median time of 32 tokens."""
    session = load_model(name, dtype=dtype, weights=weights).session(_MAX_KV_SIZE)
    session.feed([1])  # any token: the speed does not depend on it
    token_seconds = list[float]()
    for _ in range(_WARMUP_TOKENS + _MEASURED_TOKENS):
        start = time.perf_counter()
        session.next_token()
        token_seconds.append(time.perf_counter() - start)
    return 1 / median(token_seconds[_WARMUP_TOKENS:])


def _describe_kernels() -> KernelFacts:
    selected = selected_set()
    rejection_reasons = dict(selected.rejected)
    if selected.name != TORCH and kernel_library() is None:  # it cannot be loaded
        rejection_reasons[selected.name] = unavailable_reason()
    name = selected.name if kernel_library() else TORCH
    return KernelFacts(name, rejection_reasons, _environment(_KERNEL_VARIABLES))


def _environment(names: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables with these names that are set and not empty."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _describe_processor() -> ProcessorFacts:
    cpuinfo = cpuinfo_fields()
    flags = cpuinfo.get("flags") or cpuinfo.get("Features")  # on x86-64, and on ARM
    features = None if flags is None else tuple(x for x in _CPU_FEATURES if x in flags.split())
    return ProcessorFacts(processor_name(cpuinfo), platform.machine(), features)


def cpuinfo_fields() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first core; empty where there is no such file."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def processor_name(cpuinfo: dict[str, str]) -> str:
    """Return the name of the processor's model. cpuinfo: from `cpuinfo_fields`."""
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
    read_size = max(_MIN_READ_BYTES, min(read_size, _MAX_READ_BYTES, memory.available // 4))
    buffer = torch.ones(read_size // 4, dtype=torch.float32, device="cpu")
    bandwidth, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < _BANDWIDTH_SECONDS:
        pass_start = time.perf_counter()
        buffer.sum()
        bandwidth = max(bandwidth, buffer.nbytes / (time.perf_counter() - pass_start))
    return MemoryFacts(memory.total, memory.available, bandwidth, buffer.nbytes)


def _describe_torch() -> TorchFacts:
    libraries = {"MKL": torch._C.has_mkl, "oneDNN": torch._C._has_mkldnn}
    multiplies_bf16 = None
    if torch._C._has_mkldnn:
        multiplies_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # Without kernels a prompt is multiplied in the dtype of the weights.
    products = None if kernel_library() is None else prompt_products()
    prompts = "bfloat16" if products is None else str(products)
    if prompt_row_bits() == 8 and (products is None or products.row_bits != 8):
        prompts += " (KVKEEP_PROMPT_BITS has no effect here)"
    return TorchFacts(
        version=torch.__version__,
        capability=torch.backends.cpu.get_cpu_capability(),
        libraries=tuple(name for name, present in libraries.items() if present),
        multiplies_bf16=multiplies_bf16,
        prompts=prompts,
    )
