"""The processor, as the system names it."""

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
