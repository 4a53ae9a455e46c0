"""Everything that `kvkeep doctor` reports, collected in one value."""

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

_CELLS, _WARM, _TOKENS = 128, 8, 32


@dataclass(frozen=True)
class Outlook:
    """A model that is here. decode: who computes a written token, and why nobody faster.

    bytes_per_token: of weights. most_tokens_per_s: as many as memory can be read for, where few
    tokens are held: a token reads all of these bytes, and its cells. measured_tokens_per_s: None if
    that was not asked for.
    """

    name: str
    decode: str
    bytes_per_token: int
    most_tokens_per_s: float
    measured_tokens_per_s: float | None


def outlook(facts: ModelFacts, bandwidth: float, measured: float | None) -> Outlook:
    """bandwidth: bytes/s."""
    most = bandwidth / facts.bytes_per_token
    return Outlook(facts.name, facts.decode, facts.bytes_per_token, most, measured)


def measured_tokens_per_s(name: str, dtype: DtypeName, weights: WeightsName | None) -> float:
    """Of the model itself: the median of some tokens, few being held. Raises as `load_model`."""
    session = load_model(name, dtype=dtype, weights=weights).session(_CELLS)
    session.feed([1])
    seconds = list[float]()
    for _ in range(_WARM + _TOKENS):
        begun = time.perf_counter()
        session.next_token()
        seconds.append(time.perf_counter() - begun)
    return 1 / median(seconds[_WARM:])


_SWITCHES = ("KVKEEP_ISA", "KVKEEP_COMPILED", "KVKEEP_KERNELS")
_USUAL_READ = 256 << 20  # bytes, where there is no model to say how many a token reads


@dataclass(frozen=True)
class Kernels:
    """name: of the instruction set in use, or "torch". against: why each faster one is not, by
    name. environment: what was set of the variables that choose.
    """

    name: str
    against: dict[str, str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Threads:
    """used: that torch and the kernels compute on. cores: that this process may run on. quota: of
    how many cores the time is its own; None for all. environment: what was set of the variables
    that choose. load: of the machine in the last minute, in busy cores; None where the system does
    not say.
    """

    used: int
    cores: int
    quota: float | None
    load: float | None
    environment: dict[str, str]


@dataclass(frozen=True)
class MemoryFacts:
    """In bytes. read_per_s: by all threads, over and over the same read_size."""

    total: int
    available: int
    read_per_s: float
    read_size: int


@dataclass(frozen=True)
class Findings:
    """model: None where no_model says why."""

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
    """name, dtype, weights: of the model to look at, which is not fetched; as of `load_model`.

    measure: lets it write some tokens, too. Raises InvalidArgument for an environment that asks for
    kernels that are not to be had.
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
    """Of a model that is here and sound; or None, and why not."""
    try:
        return model_facts(name, dtype, weights), ""
    except KvkeepError as error:
        return None, str(error)


def _memory(wanted: int) -> MemoryFacts:
    machine, size = psutil.virtual_memory(), size_to_read(wanted)
    return MemoryFacts(machine.total, machine.available, bytes_per_second(size), size)
