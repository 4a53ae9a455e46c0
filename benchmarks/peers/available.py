"""Detection of the variants of peers that can run here, before anything is loaded."""

import importlib.util
from pathlib import Path

from benchmarks.peers.base import Setup, Variant
from benchmarks.peers.gguf_files import REQUANTISED, gguf_file, requantised, weights_of
from kvkeep.errors import KvkeepError

PACKAGES = {
    "kvkeep": ("kvkeep", "kvkeep"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "transformers": ("transformers", "transformers"),
    "mlx-lm": ("mlx_lm", "mlx-lm"),
}
ANY_DEVICE = ("kvkeep", "transformers")  # peers that run on other devices than the CPU too


def find_variants(
    peers: list[str], setup: Setup, gguf: Path | None, progress: bool
) -> tuple[list[Variant], list[str]]:
    """Return the variants that can run, and a line for each that cannot.

    gguf: file for llama.cpp; None: the model's own.
    """
    variants, skipped = list[Variant](), list[str]()
    for peer in peers:
        module, package = PACKAGES[peer]
        if setup.device != "cpu" and peer not in ANY_DEVICE:
            skipped.append(f"{peer}: runs on the CPU only here")
        elif importlib.util.find_spec(module) is None:
            skipped.append(f"{peer}: not installed (pip install {package})")
        elif peer == "llama.cpp":
            variants += _llama_cpp_variants(setup, gguf, skipped, progress)
        else:
            variants.append(Variant(peer))
    return variants, skipped


def _llama_cpp_variants(
    setup: Setup, gguf: Path | None, skipped: list[str], progress: bool
) -> list[Variant]:
    """Return variants with the file as it is, and requantised."""
    try:
        file = gguf.resolve() if gguf is not None else gguf_file(setup.model, progress)
        own_weights = weights_of(file)
    except KvkeepError as error:
        skipped.append(f"llama.cpp: {error}")
        return []
    variants = [Variant("llama.cpp", own_weights, file)]
    for weights in REQUANTISED:
        if weights == own_weights:
            continue
        try:
            path = requantised(file, weights, setup.threads)
        except (ImportError, KvkeepError, OSError) as error:
            skipped.append(f"llama.cpp {weights}: {error}")
        else:
            variants.append(Variant("llama.cpp", weights, path))
    return variants
