"""The machine that a result was measured on."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

import kvkeep

# Instructions that decide how fast a bfloat16 or 8-bit product is.
NOTABLE_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)


@dataclass(frozen=True)
class Machine:
    """cpu_flags: of `NOTABLE_FLAGS`, those present. threads: that torch computes with. load: of
    the last minute, in busy cores; None where the system does not say. date: UTC.
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
    """As it is now."""
    facts = _cpu_facts()
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return Machine(
        cpu=facts.get("model name") or _brand() or platform.machine(),
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


def _cpu_facts() -> dict[str, str]:
    """What Linux says of its first core; empty elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = first.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}


def _brand() -> str:
    """The processor's name where there is no /proc."""
    if platform.system() != "Darwin":
        return platform.processor()
    asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"
