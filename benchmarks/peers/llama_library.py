"""llama.cpp's shared library, without its log output."""

import os
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_library(folder: Path | None = None) -> Any:
    """Load and initialise the library. Raises ImportError if it is not installed.

    folder: of another build than llama-cpp-python's own. One process can load one build.
    """
    if folder is not None:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder.resolve())
    import llama_cpp

    # Its log goes to standard error. The callback must live as long as the library.
    llama_cpp.kvkeep_silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(llama_cpp.kvkeep_silence, None)
    llama_cpp.llama_backend_init()
    return llama_cpp
