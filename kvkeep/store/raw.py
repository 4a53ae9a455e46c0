"""A tensor's memory as bytes, without a copy."""

from typing import cast

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a dense CPU tensor: a view on its memory, for whatever takes a buffer."""
    view = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return cast(bytes, view)
