"""The benchmark of `kvkeep batch`: both ways get the same requests, and texts are compared."""

from pathlib import Path

import pytest

from benchmarks.batch import compare, documents
from kvkeep import load_model


@pytest.mark.slow
def test_a_batch_gives_the_texts_of_single_commands(tiny_folder: Path, tmp_path: Path) -> None:
    model, progress = load_model(str(tiny_folder)), list[int]()
    texts = documents(model, 3, 40, 80)
    lengths = [len(model.text.encode(text)) for text in texts]
    assert lengths == pytest.approx([40, 60, 80], abs=4)
    found = dict(compare(texts, str(tiny_folder), 5, tmp_path, progress.append))
    assert list(found) == ["one_by_one", "batch", "batch_cold", "equal"]
    assert found.pop("equal") == 3
    assert all(duration > 0 for duration in found.values())
    assert sum(progress) == 8
