"""Checks of values that come from outside; each raises ValueError."""

from typing import Any

import torch
from torch import Tensor

# Elements that torch checks in one thread: starting more takes longer than the check.
_SINGLE_THREAD_NUMEL = 1 << 14


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_int(name: str, value: Any, minimum: int, maximum: int) -> None:
    """Require a Python int in the closed range."""
    require(
        type(value) is int and minimum <= value <= maximum,
        f"{name} must be a whole number from {minimum} to {maximum}; found {value!r}",
    )


def require_bool(name: str, value: Any) -> None:
    require(type(value) is bool, f"{name} must be true or false; found {value!r}")


def require_instance(name: str, value: Any, required: type) -> None:
    if not isinstance(value, required):  # not by `require`: the repr of a large tensor is slow
        raise ValueError(f"{name} must be a {required.__name__}; found {value!r}")


def require_tensor(name: str, tensor: Any, dtype: torch.dtype, *shape: int | None) -> None:
    """Require a tensor of a dtype and shape; None in the shape stands for any length."""
    require_instance(name, tensor, Tensor)
    fits = len(shape) == tensor.ndim and all(
        expected in (None, size) for expected, size in zip(shape, tensor.shape, strict=True)
    )
    require(
        fits and tensor.dtype == dtype,
        f"{name} must be {dtype} {['any' if n is None else n for n in shape]}; "
        f"found {tensor.dtype} {list(tensor.shape)}",
    )


def require_finite(name: str, tensor: Tensor) -> None:
    parts = torch.split(tensor.flatten(), _SINGLE_THREAD_NUMEL)
    is_finite = all(bool(part.isfinite().all()) for part in parts)
    require(is_finite, f"{name} must be finite; found NaN or infinity")


def require_within(name: str, tensor: Tensor, minimum: int, maximum: int) -> None:
    """Require all numbers of an integer tensor to be in the closed range."""
    if tensor.numel():
        low, high = (int(x) for x in tensor.aminmax())
        require(
            minimum <= low and high <= maximum,
            f"{name} must be {minimum} to {maximum}; found {low} to {high}",
        )
