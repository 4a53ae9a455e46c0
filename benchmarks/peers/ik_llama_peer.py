"""ik_llama.cpp, a fork of llama.cpp with other CPU kernels, through ik-llama-cpp-python."""

from pathlib import Path
from typing import Any

from benchmarks.peers.ik_llama_library import load_ik_library
from benchmarks.peers.llama_cpp_peer import LlamaCppPeer


class IkLlamaPeer(LlamaCppPeer):
    """Uses flash attention, and weights in the order of the file, as it does by default."""

    program, package = "ik_llama.cpp", "ik-llama-cpp-python"

    def _load(self, libraries: Path | None) -> Any:
        return load_ik_library()

    def _batch(self, array: Any) -> Any:
        return self._library.llama_batch_get_one(array, len(array), len(self._tokens), 0)
