"""Keys that are rotated at each shift accumulate rounding errors."""

import torch

from benchmarks.rerotation import rotation_error
from kvkeep.cache.rope import Rope


def test_keys_rotated_at_each_shift_accumulate_errors() -> None:
    rope = Rope(tuple(10000.0 ** (-i / 32) for i in range(32)), torch.device("cpu"))
    keys = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    once, often = rotation_error(keys, rope, 1), rotation_error(keys, rope, 1000)
    assert once < 0.003
    assert often > 0.3
