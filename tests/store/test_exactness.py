"""A restored session says whether it goes on to the bit here, and if not, what differs."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_model import packed_model, spec_of
from sets_here import sets_here
from small import small_model
from store.golden import PATH

from kvkeep import Snapshot
from kvkeep.compiled.binding import library
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.fingerprint import Exactness

TEXT = [(i * 7) % 250 + 1 for i in range(40)]
SMALL = small_model()
compiled = pytest.mark.skipif(library() is None, reason="no compiled kernels here")


def saved(model: Model, path: Path, **how: Any) -> Snapshot:
    session = model.session(max_kv_size=64)
    session.feed(TEXT)
    session.snapshot().save(path / "a.kvkeep", **how)
    return Snapshot.load(path / "a.kvkeep")


def packed_of(bits: Any, seed: int = 0) -> Model:
    return packed_model(spec_of(), bits, seed)


def restored_on(model: Model, snapshot: Snapshot) -> Session:
    """As if the weights that the model decodes from were all that is different."""
    fingerprint = model.fingerprint.saved()
    return model.restore(replace(snapshot, fingerprint=fingerprint))


def test_where_nothing_differs_it_is_exact(tmp_path: Path) -> None:
    for how in ({}, {"codec": "zstd"}):
        session = SMALL.restore(saved(SMALL, tmp_path, **how))
        assert session.exactness.bit_exact
        assert session.exactness.differs == ()
    assert SMALL.session().exactness.bit_exact
    assert SMALL.restore(SMALL.session().snapshot()).exactness.bit_exact


@compiled
def test_packed_weights_are_told_from_others_and_from_each_other(tmp_path: Path) -> None:
    plain, int4, other = packed_of(None), packed_of(4), packed_of(4, seed=1)
    snapshot = saved(int4, tmp_path)
    assert int4.restore(snapshot).exactness.bit_exact
    assert restored_on(plain, snapshot).exactness.differs == ("weights: Q4_1 there, bf16 here",)
    (found,) = restored_on(other, snapshot).exactness.differs
    assert found.startswith("packed weights: ")


@compiled
def test_kernels_are_told_from_torch(tmp_path: Path) -> None:
    model = packed_model(spec_of(), None)
    by_torch = Model("torch", model.folder, Decoder(model.spec, model.decoder.tensors), model.text)
    snapshot = saved(model, tmp_path)
    found = by_torch.restore(snapshot).exactness
    assert not found.bit_exact
    kernels = model.decoder.executor.name
    assert kernels.startswith(f"compiled {selected_set().name}")
    assert found.differs[0] == f"kernels: {kernels} there, torch here"


@compiled
def test_instruction_sets_are_told_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there, here in permutations(sets_here(), 2):
        monkeypatch.setenv("KVKEEP_ISA", there)
        snapshot = saved(packed_of(4), tmp_path)
        assert packed_of(4).restore(snapshot).exactness.bit_exact
        monkeypatch.setenv("KVKEEP_ISA", here)
        (found,) = packed_of(4).restore(snapshot).exactness.differs
        assert found.startswith(f"kernels: compiled {there}")
        assert f" there, compiled {here}" in found


def test_the_kernels_of_an_earlier_kvkeep_were_those_of_avx512bf16() -> None:
    now, other = "compiled avx512bf16", "compiled avx2"
    assert Exactness.of({"kernels": "compiled"}, {"kernels": now}, "none").bit_exact
    (found,) = Exactness.of({"kernels": "compiled"}, {"kernels": other}, "none").differs
    assert found == f"kernels: {now} there, {other} here"


def test_threads_count_where_torch_computes(tmp_path: Path) -> None:
    snapshot, threads = saved(SMALL, tmp_path), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        found = SMALL.restore(snapshot).exactness
    finally:
        torch.set_num_threads(threads)
    assert found.differs == (f"threads: {threads} there, {threads + 1} here",)


@pytest.mark.parametrize("name", ["processor", "torch", "kvkeep"])
def test_another_processor_or_release_is_named(name: str, tmp_path: Path) -> None:
    snapshot = saved(SMALL, tmp_path)
    elsewhere = replace(snapshot, arithmetic=snapshot.arithmetic | {name: "another"})
    (found,) = SMALL.restore(elsewhere).exactness.differs
    assert found.startswith(f"{name}: another there, ")


def test_rounded_cells_are_named_until_they_are_saved_as_they_are(tmp_path: Path) -> None:
    session = SMALL.restore(saved(SMALL, tmp_path, codec="int8"))
    assert session.exactness.differs == ("cells: rounded by codec int8",)
    assert session.fork().exactness == session.exactness
    session.snapshot().save(tmp_path / "b.kvkeep")
    assert SMALL.restore(Snapshot.load(tmp_path / "b.kvkeep")).exactness.bit_exact


def test_a_file_that_does_not_say_what_computed_it_is_not_called_exact() -> None:
    snapshot = Snapshot.load(PATH)
    (found,) = restored_on(SMALL, snapshot).exactness.differs
    assert "not noted there" in found
