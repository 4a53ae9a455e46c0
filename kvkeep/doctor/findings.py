"""Everything that `kvkeep doctor` reports."""

import os
import platform
import time
from dataclasses import dataclass
from statistics import median

import torch

from kvkeep.compiled.binding import library
from kvkeep.compiled.decoder import unavailable_reason
from kvkeep.compiled.instruction_sets import TORCH, selected_set
from kvkeep.doctor.machine import (
    Cuda,
    MemoryFacts,
    Processor,
    Torch,
    describe_cuda,
    describe_memory,
    describe_processor,
    describe_torch,
)
from kvkeep.errors import KvkeepError
from kvkeep.loader import load_model
from kvkeep.model_facts import model_facts
from kvkeep.runtime.cpu import CHOSEN_BY, cores, fit_threads, quota
from kvkeep.types import DtypeName, WeightsName
from kvkeep.version import __version__

_KERNEL_VARIABLES = ("KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS")
_DEFAULT_READ_SIZE = 256 << 20  # bytes read for the bandwidth if no model says how many
_MAX_CELLS = 128  # of the session whose decode speed is measured
_WARMUP_TOKENS, _MEASURED_TOKENS = 8, 32


@dataclass(frozen=True)
class Outlook:
    """The decode speed of a model on this machine.

    decode: the executor of decode steps, and why a faster one is not used. bytes_per_token: weights
    read for each token. most_tokens_per_s: the limit set by memory bandwidth while few cells are
    held, since each token reads all these weights and the cells. measured_tokens_per_s: None if not
    measured.
    """

    name: str
    decode: str
    bytes_per_token: int
    most_tokens_per_s: float
    measured_tokens_per_s: float | None


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels in use.

    name: of the instruction set, or "torch". against: why each faster instruction set is not used,
    by name. environment: the variables that select kernels, if set.
    """

    name: str
    against: dict[str, str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Threads:
    """The threads and cores in use.

    used: threads of torch and the kernels. cores: those that this process may run on. quota: the
    cgroup CPU quota in cores; None for no limit. load: the machine's load average of the last
    minute; None if the system has none. environment: the variables that select the number of
    threads, if set.
    """

    used: int
    cores: int
    quota: float | None
    load: float | None
    environment: dict[str, str]


@dataclass(frozen=True)
class Findings:
    """All findings. model: None for the reason in no_model."""

    kvkeep: str
    python: str
    system: str
    processor: Processor
    kernels: Kernels
    threads: Threads
    memory: MemoryFacts
    torch: Torch
    cuda: Cuda
    model: Outlook | None
    no_model: str


def examine(name: str, dtype: DtypeName, weights: WeightsName | None, measure: bool) -> Findings:
    """Examine this machine, and a model if it is there. No model is fetched.

    name, dtype, weights: of the model, as in `load_model`. measure: whether to measure its decode
    speed. Raises InvalidArgument if the environment requests kernels that are not available.
    """
    kernels = _describe_kernels()
    fit_threads()
    facts, model, no_model = None, None, ""
    try:
        facts = model_facts(name, dtype, weights)
    except KvkeepError as error:
        no_model = str(error)
    memory = describe_memory(facts.bytes_per_token if facts else _DEFAULT_READ_SIZE)
    if facts:
        limit = memory.read_per_s / facts.bytes_per_token
        measured = _decode_speed(name, dtype, weights) if measure else None
        model = Outlook(facts.name, facts.decode, facts.bytes_per_token, limit, measured)
    return Findings(
        kvkeep=__version__,
        python=platform.python_version(),
        system=f"{platform.system()}, {platform.machine()}",
        processor=describe_processor(),
        kernels=kernels,
        threads=_describe_threads(),
        memory=memory,
        torch=describe_torch(),
        cuda=describe_cuda(),
        model=model,
        no_model=no_model,
    )


def _decode_speed(name: str, dtype: DtypeName, weights: WeightsName | None) -> float:
    """Load the model and measure tokens/s over 32 tokens: the inverse of the median time."""
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
    return Kernels(name, against, _set_variables(_KERNEL_VARIABLES))


def _describe_threads() -> Threads:
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return Threads(torch.get_num_threads(), cores(), quota(), load, _set_variables(CHOSEN_BY))


def _set_variables(names: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables of these names that are set, and not empty."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}
