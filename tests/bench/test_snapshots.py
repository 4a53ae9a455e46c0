"""The benchmark of snapshots: every way is measured and shown."""

from pathlib import Path

from small_models import small_model

from benchmarks.snapshots import measure_snapshots, table


def test_every_way_is_measured_in_every_repetition(tmp_path: Path) -> None:
    ids, counted = [1 + i % 255 for i in range(300)], list[int]()
    result = measure_snapshots(
        small_model(), ids[:256], ids[256:], 2, tmp_path, None, counted.append
    )
    ways = {way.name.split()[0] + way.name[6:13]: way for way in result.ways}
    assert {len(times) for way in ways.values() for times in way.seconds.values()} == {2}
    plain, small = (result.ways[i].bytes for i in (0, 2))
    assert plain > small > 0
    assert result.int8.tokens == 44
    assert 0 < result.int8.largest < 1
    assert sum(counted) == 256 * 3 + 44
    text = table(result)
    assert "kvkeep, zstd" in text
    assert "evaluate again" in text
    assert "skipped: llama.cpp: no --gguf given" in text
