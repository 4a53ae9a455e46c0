"""Rotations are exact at any position, and computed in float64 on the CPU only."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvkeep.cache import Rope

FREQUENCIES = tuple(10000.0 ** (-2 * i / 64) for i in range(32))


@pytest.mark.parametrize("position", [0, 1, -7, 12_345, 2**31 + 3, 10**12])
def test_angles_are_exact_to_float64_at_any_position(position: int) -> None:
    rotation = Rope(FREQUENCIES, torch.device("cpu")).rotation_at([position])
    cosines = [math.cos(position * frequency) for frequency in FREQUENCIES]
    sines = [math.sin(position * frequency) for frequency in FREQUENCIES]
    assert rotation.cosine.dtype is rotation.sine.dtype is torch.float32
    assert rotation.cosine[0, 0].tolist() == pytest.approx(2 * cosines, abs=1e-7)
    assert rotation.sine[0, 0].tolist() == pytest.approx([-s for s in sines] + sines, abs=1e-7)


class Float64Recorder(TorchDispatchMode):
    """Records the operations that give float64 results on a device."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.operations = device, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is torch.float64:
            self.operations += [str(func)] * (out.device.type == self.device)
        return out


def test_no_float64_is_computed_on_the_device() -> None:
    rope, by = Rope(FREQUENCIES, torch.device("meta")), torch.arange(5)
    keys = torch.zeros(2, 3, 5, 64, dtype=torch.bfloat16, device="meta")
    with Float64Recorder("meta") as mode:
        rotation = rope.rotation_at(range(3))
        moved = rope.shift(keys, by)
    assert mode.operations == []
    assert rotation.cosine.device.type == rotation.sine.device.type == "meta"
    assert (moved.device.type, moved.dtype) == ("meta", torch.bfloat16)
