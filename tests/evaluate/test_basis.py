"""A measured basis: what its codecs lose, and how much smaller they make cells."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from small_models import local_spec, small_model, state_specs

from kvkeep import Snapshot
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate import basis as measured
from kvkeep.storage.lossy.basis import add_basis
from kvkeep.storage.snapshots.snapshot import read_snapshot_document

WORDS = [[Random(word).randrange(1, 256) for _ in range(4)] for word in range(12)]
TEXT = [token for index in range(600) for token in WORDS[Random(index).randrange(12)]]


@pytest.fixture(autouse=True)
def short_passages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured, "PASSAGE_TOKENS", 128)
    monkeypatch.setattr(measured, "FOLLOWING_TOKENS", 32)
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))


@pytest.mark.parametrize("spec", [None, local_spec()])
def test_a_measured_basis_codes_other_text_in_fewer_bytes(spec: object, tmp_path: Path) -> None:
    model, steps = small_model(spec=spec), list[int]()  # type: ignore[arg-type]
    basis = measured.measure_basis(model, TEXT, steps.append)
    assert sum(steps) == measured.count_basis_tokens(model, len(TEXT))
    assert basis.steps["smaller"] > basis.steps["small"] == 1
    add_basis(basis)
    session, sizes = model.session(policy="full"), dict[str, int]()
    session.feed(TEXT[::-1][:600])
    for codec in ("zstd", "small", "smaller"):
        session.snapshot().save(tmp_path / "a.kvkeep", codec)  # type: ignore[arg-type]
        document = read_snapshot_document(tmp_path / "a.kvkeep")
        sizes[codec] = sum(sum(entry.get("frames", ())) for entry in document["coding"].values())
        restored = model.restore(Snapshot.load(tmp_path / "a.kvkeep"))
        assert restored.feed(TEXT[:5]).tokens == 5
    assert sizes["small"] > sizes["smaller"] > 0


@pytest.mark.parametrize(
    ("spec", "sharpness", "text"),
    [
        (None, 0.02, TEXT),  # its predictions hardly depend on its cells
        (state_specs()["convolution"], 0.02, TEXT),
        (None, 0.3, [97] * len(TEXT)),  # all cells are alike
    ],
    ids=["flat", "flat_with_states", "one_token"],
)
def test_cells_without_a_basis_are_refused(spec: Any, sharpness: float, text: list[int]) -> None:
    model = small_model(spec=spec, sharpness=sharpness)
    with pytest.raises(InvalidArgument, match="Take a varied text and a trained model"):
        measured.measure_basis(model, text)


def test_a_short_text_makes_no_basis() -> None:
    with pytest.raises(InvalidArgument, match="a basis needs 1120 tokens"):
        measured.measure_basis(small_model(), TEXT[:1119])
