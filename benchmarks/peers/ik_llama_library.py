"""ik_llama.cpp's shared library under the names of llama.cpp's newer interface.

ik_llama.cpp keeps an older interface: functions of the KV cache take the context.
ik-llama-cpp-python binds the structures and some functions; the others are bound here.
"""

from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from types import SimpleNamespace
from typing import Any

_LOG = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
# Arguments and results of functions that ik-llama-cpp-python does not bind, from its llama.h.
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "llama_kv_cache_seq_rm": ([c_void_p, c_int32, c_int32, c_int32], c_bool),
    "llama_kv_cache_seq_add": ([c_void_p, c_int32, c_int32, c_int32, c_int32], None),
    "llama_kv_cache_seq_cp": ([c_void_p, c_int32, c_int32, c_int32, c_int32], None),
    "llama_state_save_file": ([c_void_p, c_char_p, POINTER(c_int32), c_size_t], c_bool),
    "llama_state_load_file": (
        [c_void_p, c_char_p, POINTER(c_int32), c_size_t, POINTER(c_size_t)],
        c_bool,
    ),
    "llama_print_system_info": ([], c_char_p),
    "llama_log_set": ([_LOG, c_void_p], None),
}


@cache
def load_ik_library() -> Any:
    """Load and initialise the library. Raises ImportError if it is not installed.

    IK_LLAMA_CPP_LIB_PATH is the path of another build's library, if not the package's own.
    """
    try:
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api as bindings
    except OSError as error:  # no library in the package, or none at IK_LLAMA_CPP_LIB_PATH
        raise ImportError(str(error)) from error
    names = {name: value for name, value in vars(bindings).items() if name.startswith("llama_")}
    library = SimpleNamespace(**names, __version__=ik_llama_cpp.__version__)
    for name, (arguments, result) in _FUNCTIONS.items():
        setattr(library, name, _bound(bindings, name, arguments, result))
    library.llama_batch_get_one = _bound(
        bindings,
        "llama_batch_get_one",
        [POINTER(c_int32), c_int32, c_int32, c_int32],
        bindings.llama_batch,
    )
    library.llama_get_memory = lambda context: context
    library.llama_memory_clear = lambda context, data: library.llama_kv_cache_clear(context)
    library.llama_memory_seq_rm = library.llama_kv_cache_seq_rm
    library.llama_memory_seq_add = library.llama_kv_cache_seq_add
    library.llama_memory_seq_cp = library.llama_kv_cache_seq_cp
    # Its log goes to standard error. The callback must live as long as the library.
    library.kvkeep_silence = _LOG(lambda level, text, data: None)
    library.llama_log_set(library.kvkeep_silence, None)
    library.llama_backend_init()
    return library


def _bound(bindings: Any, name: str, arguments: list[Any], result: Any) -> Any:
    function = getattr(bindings._lib, name)
    function.argtypes, function.restype = arguments, result
    return function
