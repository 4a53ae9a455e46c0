"""The machine that a result was measured on."""

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil
import torch

import kvkeep
from kvkeep.doctor import cpuinfo_fields, processor_name

# Instructions that determine the speed of bfloat16 and 8-bit products.
NOTABLE_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)


@dataclass(frozen=True)
class Machine:
    """cpu_flags: those of `NOTABLE_FLAGS` present. threads: of torch. load: 1-minute load average;
    None if the system has none. date: UTC.
    """

    cpu: str
    cores: int
    cpu_flags: tuple[str, ...]
    memory_bytes: int
    system: str
    python: str
    torch: str
    kvkeep: str
    threads: int
    load: float | None
    date: str


def describe_machine() -> Machine:
    """Return the current state of this machine."""
    cpuinfo = cpuinfo_fields()
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    return Machine(
        cpu=processor_name(cpuinfo),
        cores=psutil.cpu_count() or 1,
        cpu_flags=tuple(flag for flag in NOTABLE_FLAGS if flag in flags),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{_system()}, {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        kvkeep=kvkeep.__version__,
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    )


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"
