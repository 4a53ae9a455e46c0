"""Everything that `kvkeep doctor` reports."""

import os
import platform
import time
from dataclasses import dataclass
from statistics import median

import psutil
import torch

from kvkeep.compiled.binding import library
from kvkeep.compiled.decoder import unavailable_reason
from kvkeep.compiled.instruction_sets import TORCH, selected_set
from kvkeep.doctor.machine import (
    Cuda,
    Processor,
    Torch,
    bytes_per_second,
    describe_cuda,
    describe_torch,
    processor,
    size_to_read,
)
from kvkeep.errors import KvkeepError
from kvkeep.loader import load_model
from kvkeep.model_facts import ModelFacts, model_facts
from kvkeep.runtime.cpu import CHOSEN_BY, cores, fit_threads, quota
from kvkeep.types import DtypeName, WeightsName
from kvkeep.version import __version__

_CELLS, _WARM, _TOKENS = 128, 8, 32  # cells of the session; tokens before and while measured


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


def outlook(facts: ModelFacts, bandwidth: float, measured: float | None) -> Outlook:
    """Estimate the decode speed of a model. bandwidth: of memory, in bytes/s."""
    most = bandwidth / facts.bytes_per_token
    return Outlook(facts.name, facts.decode, facts.bytes_per_token, most, measured)


def measured_tokens_per_s(name: str, dtype: DtypeName, weights: WeightsName | None) -> float:
    """Load the model and measure its decode speed over 32 tokens: the inverse median time.

    Few cells are held meanwhile. Raises the errors of `load_model`.
    """
    session = load_model(name, dtype=dtype, weights=weights).session(_CELLS)
    session.feed([1])
    seconds = list[float]()
    for _ in range(_WARM + _TOKENS):
        begun = time.perf_counter()
        session.next_token()
        seconds.append(time.perf_counter() - begun)
    return 1 / median(seconds[_WARM:])


_SWITCHES = ("KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS")
_USUAL_READ = (
    256 << 20
)  # bytes to read in the bandwidth test if there is no model to take them from


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
class MemoryFacts:
    """Memory, in bytes. read_per_s: bandwidth of all threads reading read_size repeatedly."""

    total: int
    available: int
    read_per_s: float
    read_size: int


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
    kernels = _kernels()
    fit_threads()
    facts, no_model = _facts(name, dtype, weights)
    memory = _memory(facts.bytes_per_token if facts else _USUAL_READ)
    speed = measured_tokens_per_s(name, dtype, weights) if facts and measure else None
    return Findings(
        kvkeep=__version__,
        python=platform.python_version(),
        system=f"{platform.system()}, {platform.machine()}",
        processor=processor(),
        kernels=kernels,
        threads=_threads(),
        memory=memory,
        torch=describe_torch(),
        cuda=describe_cuda(),
        model=outlook(facts, memory.read_per_s, speed) if facts else None,
        no_model=no_model,
    )


def _kernels() -> Kernels:
    chosen, against = selected_set(), dict(selected_set().rejected)
    if chosen.name != TORCH and library() is None:
        against[chosen.name] = unavailable_reason()
    name = chosen.name if library() else TORCH
    return Kernels(name, against, _environment(_SWITCHES))


def _threads() -> Threads:
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return Threads(torch.get_num_threads(), cores(), quota(), load, _environment(CHOSEN_BY))


def _environment(names: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _facts(
    name: str, dtype: DtypeName, weights: WeightsName | None
) -> tuple[ModelFacts | None, str]:
    """Return the facts of a model, or None and the reason."""
    try:
        return model_facts(name, dtype, weights), ""
    except KvkeepError as error:
        return None, str(error)


def _memory(wanted: int) -> MemoryFacts:
    machine, size = psutil.virtual_memory(), size_to_read(wanted)
    return MemoryFacts(machine.total, machine.available, bytes_per_second(size), size)
