"""The binding of the compiled kernels: their libraries, functions and status codes.

A library whose structures differ in any field from those of `structures.py` is not used.
"""

import ctypes
import warnings
from ctypes import POINTER, c_int32, c_void_p
from functools import cache

from kvkeep.compiled.instruction_sets import TORCH, load_kernels, selected_set
from kvkeep.compiled.structures import (
    STRUCTURES,
    CChunk,
    CDecodeStep,
    CMatrix,
    CModel,
    CSimilarity,
    CStateChunk,
    field_extents,
)
from kvkeep.errors import KernelMismatch, OutOfMemory
from kvkeep.models.layers.primitives import non_finite_error

HEAD_DIMS = (32, 64, 96, 128, 256, 512)
_INTERFACE_REVISION = 17  # `kRevision` in src/decode.h
STATUS_NO_MEMORY, _STATUS_NOT_FINITE = 2, 4  # `Status` in src/status.h


def kernel_library() -> ctypes.CDLL | None:
    """Return the library of the kernels; None if none was built here or they are switched off.

    Raises InvalidArgument if KVKEEP_ISA names kernels that are not available.
    """
    name = selected_set().name
    kernels = None if name == TORCH else load_kernels(name)
    return None if kernels is None else _bind(kernels)


@cache
def _bind(kernels: ctypes.CDLL) -> ctypes.CDLL | None:
    """Set a library's argument types; return None, with a warning, if its interface differs."""
    try:
        require_same_interface(kernels)
    except KernelMismatch as error:
        warnings.warn(
            "the compiled kernels were built from the sources of another kvkeep version and are "
            f"not used; reinstall kvkeep to rebuild them ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    kernels.kvkeep_decode.argtypes = [POINTER(CModel), POINTER(CDecodeStep)]
    kernels.kvkeep_product.argtypes = [POINTER(CMatrix), c_void_p, c_int32, c_void_p, c_int32]
    kernels.kvkeep_prompt_product.argtypes = [*kernels.kvkeep_product.argtypes, c_int32]
    kernels.kvkeep_unpack.argtypes = [POINTER(CMatrix), c_int32, c_int32, c_void_p, c_int32]
    kernels.kvkeep_unpack_floats.argtypes = kernels.kvkeep_unpack.argtypes
    kernels.kvkeep_rows.argtypes = [POINTER(CMatrix), c_void_p, c_int32, c_void_p]
    kernels.kvkeep_attend_chunk.argtypes = [POINTER(CChunk)]
    kernels.kvkeep_angles.argtypes = [c_void_p, c_int32, c_void_p, c_int32, c_void_p]
    kernels.kvkeep_angles.restype = None
    kernels.kvkeep_state_chunk.argtypes = [POINTER(CStateChunk)]
    kernels.kvkeep_most_similar.argtypes = [POINTER(CSimilarity)]
    return kernels


def require_same_interface(kernels: ctypes.CDLL) -> None:
    """Raise KernelMismatch, naming the field, if a library's structures differ from these."""
    if not hasattr(kernels, "kvkeep_layout") or kernels.kvkeep_revision() != _INTERFACE_REVISION:
        raise KernelMismatch(f"the kernels' interface is not revision {_INTERFACE_REVISION}")
    kernel_layout = _kernel_layout(kernels)
    structures = {structure.__name__.removeprefix("C"): structure for structure in STRUCTURES}
    for name, structure in structures.items():
        for field_name, (offset, size) in field_extents(structure).items():
            actual = kernel_layout.pop(f"{name}.{field_name}", None)
            if actual != (offset, size):
                raise KernelMismatch(
                    f"{name}.{field_name} must have offset {offset} and size {size}; "
                    f"the kernels have {actual or 'no such field'}"
                )
    for full_name in kernel_layout:
        name, _, _ = full_name.partition(".")
        if name in structures:
            raise KernelMismatch(f"the field {full_name} exists only in the kernels")
        raise KernelMismatch(f"the structure {name} exists only in the kernels")


def _kernel_layout(kernels: ctypes.CDLL) -> dict[str, tuple[int, int]]:
    """Return the offset and size of each field, "Structure.field", in a library."""
    buffer = ctypes.create_string_buffer(1 << 16)
    text_length = kernels.kvkeep_layout(buffer, len(buffer))
    lines = buffer.raw[:text_length].decode().splitlines()  # "Structure.field offset size"
    return {name: (int(offset), int(size)) for name, offset, size in map(str.split, lines)}


def raise_for_status(status: int) -> None:
    """Raise the error that a kernel's status code stands for, if any.

    OutOfMemory if the call's buffers could not be allocated, NonFiniteLogits if a result is NaN or
    infinity, KernelMismatch if no kernel supports the call.
    """
    if status == _STATUS_NOT_FINITE:
        raise non_finite_error()
    if status == STATUS_NO_MEMORY:
        raise OutOfMemory(
            "not enough memory for this step; nothing was changed. Free some memory, or use a "
            "smaller prefill_step or max_kv_size"
        )
    if status:
        raise KernelMismatch(
            f"the compiled kernels do not support this model (status {status}); set "
            "KVKEEP_COMPILED=0 to use torch"
        )
