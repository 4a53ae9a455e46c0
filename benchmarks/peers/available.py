"""Which variants of which peers can be run here, found before anything is loaded."""

import importlib.util
from pathlib import Path

from benchmarks.peers.base import Setup, Variant
from benchmarks.peers.gguf_files import REQUANTISED, own_file, requantised, weights_of
from kvkeep.errors import KvkeepError

PACKAGES = {
    "kvkeep": ("kvkeep", "kvkeep"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "transformers": ("transformers", "transformers"),
    "mlx-lm": ("mlx_lm", "mlx-lm"),
}
EVERYWHERE = ("kvkeep", "transformers")  # also on other devices than the CPU


def find_variants(
    peers: list[str], setup: Setup, gguf: Path | None, progress: bool
) -> tuple[list[Variant], list[str]]:
    """Those that can be run, and a line for each that cannot.

    gguf: llama.cpp's file; None for the model's own.
    """
    found, skipped = list[Variant](), list[str]()
    for peer in peers:
        module, package = PACKAGES[peer]
        if setup.device != "cpu" and peer not in EVERYWHERE:
            skipped.append(f"{peer}: runs on the CPU only here")
        elif importlib.util.find_spec(module) is None:
            skipped.append(f"{peer}: not installed (pip install {package})")
        elif peer == "llama.cpp":
            found += _of_llama_cpp(setup, gguf, skipped, progress)
        else:
            found.append(Variant(peer))
    return found, skipped


def _of_llama_cpp(
    setup: Setup, gguf: Path | None, skipped: list[str], progress: bool
) -> list[Variant]:
    """Its file as it is, and requantised."""
    try:
        file = gguf.resolve() if gguf is not None else own_file(setup.model, progress)
        own = weights_of(file)
    except KvkeepError as error:
        skipped.append(f"llama.cpp: {error}")
        return []
    found = [Variant("llama.cpp", own, file)]
    for weights in REQUANTISED:
        if weights == own:
            continue
        try:
            made = requantised(file, weights, setup.threads)
        except (ImportError, KvkeepError, OSError) as error:
            skipped.append(f"llama.cpp {weights}: {error}")
        else:
            found.append(Variant("llama.cpp", weights, made))
    return found
