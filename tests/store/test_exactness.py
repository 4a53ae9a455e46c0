"""A restored session reports whether it continues bit-exactly, and if not, what differs."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from available_sets import sets_here
from packed_model import packed_model, spec_of
from small_models import small_model
from store.golden import PATH

from kvkeep import Snapshot
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.fingerprint import Exactness
from kvkeep.storage.snapshots.header import read_summary

TEXT = [(i * 7) % 250 + 1 for i in range(40)]
SMALL = small_model()
compiled = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")


def saved_snapshot(model: Model, path: Path, **save_options: Any) -> Snapshot:
    session = model.session(max_kv_size=64)
    session.feed(TEXT)
    session.snapshot().save(path / "a.kvkeep", **save_options)
    return Snapshot.load(path / "a.kvkeep")


def packed_with(bits: Any, seed: int = 0) -> Model:
    return packed_model(spec_of(), bits, seed)


def restored_despite_weights(model: Model, snapshot: Snapshot) -> Session:
    """Restore under a fingerprint that matches, so that only the decoder's weights can differ."""
    fingerprint = model.fingerprint.to_dict()
    return model.restore(replace(snapshot, fingerprint=fingerprint))


def test_a_restore_on_the_same_setup_is_bit_exact(tmp_path: Path) -> None:
    for save_options in ({}, {"codec": "zstd"}):
        session = SMALL.restore(saved_snapshot(SMALL, tmp_path, **save_options))
        assert session.exactness.bit_exact
        assert session.exactness.differs == ()
    assert SMALL.session().exactness.bit_exact
    assert SMALL.restore(SMALL.session().snapshot()).exactness.bit_exact


@compiled
def test_packed_weights_differ_from_plain_and_from_other_packed_ones(tmp_path: Path) -> None:
    plain, int4, other = packed_with(None), packed_with(4), packed_with(4, seed=1)
    snapshot = saved_snapshot(int4, tmp_path)
    assert int4.restore(snapshot).exactness.bit_exact
    assert restored_despite_weights(plain, snapshot).exactness.differs == (
        "weights: Q4_1 saved, bf16 here",
    )
    (difference,) = restored_despite_weights(other, snapshot).exactness.differs
    assert difference.startswith("packed weights: ")


@compiled
def test_kernels_and_torch_are_reported_as_different(tmp_path: Path) -> None:
    model = packed_model(spec_of(), None)
    by_torch = Model("torch", model.folder, Decoder(model.spec, model.decoder.tensors), model.text)
    snapshot = saved_snapshot(model, tmp_path)
    exactness = by_torch.restore(snapshot).exactness
    assert not exactness.bit_exact
    kernels = model.decoder.executor.name
    assert kernels.startswith(f"compiled {selected_set().name}")
    assert exactness.differs[0] == f"kernels: {kernels} saved, torch here"


@compiled
def test_different_instruction_sets_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for saved_set, restoring_set in permutations(sets_here(), 2):
        monkeypatch.setenv("KVKEEP_ISA", saved_set)
        snapshot = saved_snapshot(packed_with(4), tmp_path)
        assert packed_with(4).restore(snapshot).exactness.bit_exact
        monkeypatch.setenv("KVKEEP_ISA", restoring_set)
        (difference,) = packed_with(4).restore(snapshot).exactness.differs
        assert difference.startswith(f"kernels: compiled {saved_set}")
        assert f" saved, compiled {restoring_set}" in difference


def test_kernels_without_an_instruction_set_count_as_avx512bf16() -> None:
    same, other = "compiled avx512bf16", "compiled avx2"
    assert Exactness.of({"kernels": "compiled"}, {"kernels": same}).bit_exact
    (difference,) = Exactness.of({"kernels": "compiled"}, {"kernels": other}).differs
    assert difference == f"kernels: {same} saved, {other} here"


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=compiled)])
def test_the_thread_count_is_reported(tmp_path: Path, packed: bool) -> None:
    """Also for compiled models: torch multiplies long prompts, in an order that depends on it."""
    model = packed_with(4) if packed else SMALL
    snapshot, threads = saved_snapshot(model, tmp_path), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        exactness = model.restore(snapshot).exactness
    finally:
        torch.set_num_threads(threads)
    assert exactness.differs == (f"threads: {threads} saved, {threads + 1} here",)


@pytest.mark.parametrize("name", ["processor", "torch", "kvkeep"])
def test_another_processor_or_release_is_reported(name: str, tmp_path: Path) -> None:
    snapshot = saved_snapshot(SMALL, tmp_path)
    foreign = replace(snapshot, arithmetic=snapshot.arithmetic | {name: "another"})
    (difference,) = SMALL.restore(foreign).exactness.differs
    assert difference.startswith(f"{name}: another saved, ")


def test_arithmetic_names_a_device_that_is_neither_a_cpu_nor_cuda() -> None:
    tensors = {name: tensor.to("meta") for name, tensor in SMALL.decoder.tensors.items()}
    model = Model("small", SMALL.folder, Decoder(SMALL.spec, tensors), SMALL.text)
    assert model.arithmetic["processor"] == "meta"


def test_rounded_cells_are_reported_also_when_they_are_saved_again_exactly(tmp_path: Path) -> None:
    session = SMALL.restore(saved_snapshot(SMALL, tmp_path, codec="int8"))
    assert session.exactness.differs == ("cells: rounded by codec int8",)
    assert session.fork().exactness == session.exactness
    session.snapshot().save(tmp_path / "b.kvkeep")
    again = SMALL.restore(Snapshot.load(tmp_path / "b.kvkeep"))
    assert again.exactness == session.exactness


@pytest.mark.parametrize(("count", "kv_bits"), [(0, None), (50, "8"), (50, "4")])
def test_int8_rounds_neither_quantised_cells_nor_none(
    count: int, kv_bits: Any, tmp_path: Path
) -> None:
    session = SMALL.session(64, kv_bits=kv_bits)
    if count:
        session.feed(list(range(1, count + 1)))
    session.snapshot().save(tmp_path / "a.kvkeep", codec="int8")
    snapshot = Snapshot.load(tmp_path / "a.kvkeep")
    assert snapshot.codec == "int8"
    assert read_summary(tmp_path / "a.kvkeep").rounded == snapshot.rounded == ""
    assert SMALL.restore(snapshot).exactness.bit_exact


def test_a_server_stores_quantised_sessions_exactly(tmp_path: Path) -> None:
    session = SMALL.session(64, far_bits="8")  # whose window has 16 bits
    session.feed(list(range(1, 50)))
    session.snapshot().save_by(tmp_path / "a.kvkeep", "int8")
    assert SMALL.restore(Snapshot.load(tmp_path / "a.kvkeep")).exactness.bit_exact


def test_a_file_without_arithmetic_fields_is_not_bit_exact() -> None:
    snapshot = Snapshot.load(PATH)
    (difference,) = restored_despite_weights(SMALL, snapshot).exactness.differs
    assert "the arithmetic is not recorded" in difference
