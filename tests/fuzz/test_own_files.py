"""Fuzz tests of prefix blocks, calibrations and bases: damaged bytes, and wrong content."""

import itertools
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz.fuzzing import fuzz
from fuzz.mutations import mutate_bytes
from fuzz.sealed import mutate
from lossy_basis import random_basis
from small_models import local_spec, small_model, state_specs

from kvkeep import PrefixStore, Snapshot, calibrate, load_calibration
from kvkeep.errors import StoreError
from kvkeep.session.stored_prefix import checkpoint_need
from kvkeep.storage.lossy.basis import add_basis, forget_cached

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)]


@pytest.mark.parametrize("codec", ["exact", "small"])
def test_a_damaged_prefix_block_is_a_hit_or_a_miss(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    add_basis(random_basis(MODEL))
    store, counter = PrefixStore(tmp_path, codec=codec), itertools.count()
    MODEL.session(512, store=store).feed(TEXT)
    (path,) = tmp_path.glob("*.kvblock")
    original = path.read_bytes()
    without_store = MODEL.session(512)
    without_store.feed(TEXT)

    def read(random: Random) -> None:
        if next(counter) % 2:
            path.write_bytes(mutate(original, random))
        else:
            path.write_bytes(mutate_bytes(original, random))
        match = store.find(MODEL.fingerprint, TEXT)
        assert match.token_count in (0, 256)

    fuzz(read, 30 if codec == "exact" else 33, share=2)
    path.write_bytes(mutate_bytes(original, Random(0)))
    session = MODEL.session(512, store=store)
    assert session.feed(TEXT).reused == 0
    assert session.logits.equal(without_store.logits)


@pytest.mark.parametrize("kind", ["local", "delta_net"])
def test_a_damaged_prefix_checkpoint_is_a_hit_or_a_miss(kind: str, tmp_path: Path) -> None:
    """Whatever it contains, a prompt that begins with it is evaluated without an error.

    Where it is not usable, what follows is that of an empty store: few inputs are evaluated, and
    the others looked up only.
    """
    spec = local_spec() if kind == "local" else state_specs()[kind]
    model, store, counter = small_model(spec=spec), PrefixStore(tmp_path), itertools.count()
    settings: dict[str, Any] = {"policy": "full", "max_kv_size": 512, "prefill_step": 128}
    model.session(**settings, store=store).feed(TEXT)
    (path,) = tmp_path.glob("*.kvcheckpoint")
    original = path.read_bytes()
    need = replace(checkpoint_need(model.session(**settings).core.memory), step=128)

    def read(random: Random) -> None:
        changed = (mutate if next(counter) % 2 else mutate_bytes)(original, random)
        path.write_bytes(changed)
        found = store.find(model.fingerprint, TEXT, need).checkpoint
        if found is None and random.randrange(20):
            return
        feeding = model.session(**settings, store=store).feeding(TEXT)
        step = next(feeding)
        assert step.done == (128 if found is None else 256)
        assert step.reused == (found is not None)
        if step.reused and next(counter) % 3 == 0:
            next(feeding)
        feeding.close()

    assert fuzz(read, 32 if kind == "local" else 35, share=2)["read"]


def test_a_damaged_calibration_loads_or_is_refused(tmp_path: Path) -> None:
    model = small_model(max_positions=128)
    path = tmp_path / "c.kvkeep"
    calibrate(model, TEXT).save(path)
    original = path.read_bytes()

    def read(random: Random) -> None:
        path.write_bytes(mutate(original, random))
        load_calibration(path, model)

    assert fuzz(read, 31)["CorruptFile"]


def test_a_damaged_basis_codes_what_it_decodes_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    path, counter = add_basis(random_basis(MODEL)), itertools.count()
    original, session = path.read_bytes(), MODEL.session(policy="full")
    session.feed(TEXT[:40])
    refusals = list[str]()

    def read(random: Random) -> None:
        path.write_bytes((mutate if next(counter) % 2 else mutate_bytes)(original, random))
        forget_cached()
        try:
            session.snapshot().save(tmp_path / "a.kvkeep", "small")
        except StoreError as error:
            refusals.append(str(error))
            raise
        forget_cached()
        restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
        assert restored.tokens == session.tokens

    outcomes = fuzz(read, 34)
    assert outcomes["StoreError"] == len(refusals) > outcomes["read"]
    assert all(str(path) in refusal and "kvkeep calibrate" in refusal for refusal in refusals)
