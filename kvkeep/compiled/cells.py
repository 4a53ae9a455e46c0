"""Keys and values as the compiled kernels take them: plain or quantised."""

from torch import Tensor

from kvkeep.cache.quantised import Stored
from kvkeep.compiled import library as c


def kept(stored: Stored, *along: str) -> c.Kept:
    """along: which of "layer", "head" and "cell" the dimensions before the last are."""
    if isinstance(stored, Tensor):
        return c.Kept(stored.data_ptr(), None, _strides(stored, along), c.Strides(), 16, 0)
    return c.Kept(
        stored.data.data_ptr(),
        stored.scale.data_ptr(),
        _strides(stored.data, along),
        _strides(stored.scale, along),
        stored.bits,
        0,
    )


def _strides(x: Tensor, along: tuple[str, ...]) -> c.Strides:
    return c.Strides(**dict(zip(along, x.stride()[:-1], strict=True)))
