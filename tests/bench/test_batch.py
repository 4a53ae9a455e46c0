"""What is asked of both ways is the same, and what they answer is compared."""

from pathlib import Path

import pytest

from benchmarks.batch import compare, documents
from kvkeep import load_model


@pytest.mark.slow
def test_a_batch_answers_as_the_command_does(tiny_folder: Path, tmp_path: Path) -> None:
    model, done = load_model(str(tiny_folder)), list[int]()
    texts = documents(model, 3, 40, 80)
    lengths = [len(model.text.encode(text)) for text in texts]
    assert lengths == pytest.approx([40, 60, 80], abs=4)
    *seconds, equal = compare(texts, str(tiny_folder), 5, tmp_path, done.append)
    assert equal == 3
    assert all(each > 0 for each in seconds)
    assert sum(done) == 8
