"""Whether what comes from outside is what it is taken for: each check raises ValueError."""

from typing import Any

import torch
from torch import Tensor

# Numbers that torch looks at without a team of threads, which takes longer to start than they do.
_BY_ONE_THREAD = 1 << 14


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def require_whole(name: str, value: Any, minimum: int, maximum: int) -> None:
    """A whole number of Python's, `minimum` and `maximum` included."""
    require(
        type(value) is int and minimum <= value <= maximum,
        f"{name} must be a whole number from {minimum} to {maximum}; found {value!r}",
    )


def require_flag(name: str, value: Any) -> None:
    require(type(value) is bool, f"{name} must be true or false; found {value!r}")


def require_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):  # what a tensor looks like takes long to say
        raise ValueError(f"{name} must be a {kind.__name__}; found {value!r}")


def require_tensor(name: str, tensor: Any, dtype: torch.dtype, *shape: int | None) -> None:
    """None in a shape stands for any length."""
    require_kind(name, tensor, Tensor)
    fits = len(shape) == tensor.ndim and all(
        wanted in (None, found) for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    require(
        fits and tensor.dtype == dtype,
        f"{name} must be {dtype} {['any' if n is None else n for n in shape]}; "
        f"found {tensor.dtype} {list(tensor.shape)}",
    )


def require_finite(name: str, tensor: Tensor) -> None:
    parts = torch.split(tensor.flatten(), _BY_ONE_THREAD)
    finite = all(bool(part.isfinite().all()) for part in parts)
    require(finite, f"{name} must be finite; found NaN or infinity")


def require_within(name: str, tensor: Tensor, minimum: int, maximum: int) -> None:
    """Whole numbers, `minimum` and `maximum` included; any number of them."""
    if tensor.numel():
        low, high = (int(x) for x in tensor.aminmax())
        require(
            minimum <= low and high <= maximum,
            f"{name} must be {minimum} to {maximum}; found {low} to {high}",
        )
