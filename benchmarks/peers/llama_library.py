"""llama.cpp's shared library, silent."""

from functools import cache
from typing import Any


@cache
def load_library() -> Any:
    """Raises ImportError where it is not installed."""
    import llama_cpp

    # It writes pages to standard error while it loads. The callback must live as long as it does.
    llama_cpp.kvkeep_silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(llama_cpp.kvkeep_silence, None)
    llama_cpp.llama_backend_init()
    return llama_cpp
