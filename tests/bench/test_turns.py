"""Resident memory over a chat of many turns."""

import subprocess
import sys

import pytest
from small_models import small_model

from benchmarks.turns import SHORTEST, chat
from kvkeep.compiled.binding import kernel_library


def test_each_length_is_fed_once_and_memory_is_reported() -> None:
    lengths = list[int]()
    points = chat(small_model(), 20, 64, lengths.append, points=2)
    assert sorted(lengths) == list(range(SHORTEST, SHORTEST + 20))
    assert [point.turns for point in points] == [10, 20]
    assert points[-1].tokens == sum(lengths)
    assert all(point.rss_bytes > 0 for point in points)


@pytest.mark.slow
@pytest.mark.skipif(kernel_library() is None, reason="the figure is that of bfloat16 with kernels")
def test_resident_memory_is_bounded_for_prompts_of_all_lengths(smollm2_folder) -> None:  # type: ignore[no-untyped-def]
    """In a process of its own, since others have compiled products before."""
    script = (
        "from benchmarks.turns import chat; from kvkeep import load_model;"
        "print(*(each.rss_bytes for each in chat(load_model(), 250, 512, lambda n: None)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    first, *_, last = map(int, result.stdout.split())
    assert last - first < 200e6  # measured: 84 MB; with a product for each length some 690
