"""Restored sessions keep their own cells and states in memory, and nothing else of a file."""

import gc
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from small_models import small_model, small_spec

from kvkeep import Snapshot
from kvkeep.storage.snapshots.container import read_container, write_container

MODEL = small_model(spec=replace(small_spec(), layers=8, heads=32, kv_heads=32))
TEXT = [(i * 7) % 250 + 1 for i in range(1000)]


def memory_in_use() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_a_restored_session_takes_its_cells_once(tmp_path: Path) -> None:
    """The first token copies the window, and the anchor's cells stay where they were read."""
    session = MODEL.session(max_kv_size=900, policy="sliding", prefill_step=100)
    session.feed(TEXT)
    session.snapshot().save(tmp_path / "a.kvkeep")
    session.next_token()  # allocates what any first token does
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    before = memory_in_use()
    restored.next_token()
    assert memory_in_use() - before < restored.cache.nbytes / 2


def test_a_tensor_that_is_kept_keeps_no_other_of_its_file_in_memory(tmp_path: Path) -> None:
    """Coded keys are freed when they are decoded, and checkpoints one by one."""
    kept = "segment.0.keys"
    large = ["segment.1.keys.zstd", "checkpoint.1.layers.0.recurrent"]
    sizes = {kept: 1000} | dict.fromkeys(large, 20_000_000)
    tensors = {n: torch.ones(size, dtype=torch.int8, device="cpu") for n, size in sizes.items()}
    write_container(tmp_path / "a.kvkeep", "snapshot", 1, {}, tensors)
    del tensors
    loaded = read_container(tmp_path / "a.kvkeep", "snapshot", 1).tensors
    before = memory_in_use()
    for name in large:
        del loaded[name]
        assert before - memory_in_use() > 18_000_000, name
        before = memory_in_use()
    assert loaded[kept].sum() == 1000
