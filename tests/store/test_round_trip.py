"""A session saved, and restored in another process, is the session that went on."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small import small_model, write_small_folder
from store.going_on import NEXT, POLICIES, SAMPLINGS, TEXT, go_on
from topics import topic_ids
from torch import Tensor

from kvkeep.model import Model, load_model
from kvkeep.models.hub.source import DEFAULT_MODEL
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

MODEL = small_model()
# Each moment is saved in one codec: that both bring back the same cells is for the tests of codecs.
CODECS = itertools.cycle(("none", "zstd"))
CASES = [
    (policy, moment, sampling, next(CODECS))
    for policy, moments in POLICIES.items()
    for number, moment in enumerate(moments(MODEL))
    for sampling in (SAMPLINGS if number == 2 else ["seeded"])
]
SCRIPT = Path(__file__).with_name("going_on.py")
Continuation = dict[str, Tensor]


def in_another_process(folder: Path, model: str, dtype: str) -> dict[str, Continuation]:
    """How each snapshot of a folder goes on there, by the file's stem."""
    threads = torch.get_num_threads()
    command = [sys.executable, SCRIPT, folder, model, dtype, threads]
    subprocess.run([str(x) for x in command], check=True, env=os.environ)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_folder(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def both(
    small_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Continuation], dict[str, Continuation]]:
    """How every session went on here, and there."""
    model = load_model(str(small_folder), dtype="float32")
    folder, here = tmp_path_factory.mktemp("snapshots"), dict[str, Continuation]()
    for policy, moment, sampling, codec in CASES:
        how = SAMPLINGS[sampling]
        session, name = POLICIES[policy](model)[moment](how), f"{policy}.{moment}.{sampling}"
        session.snapshot().save(folder / f"{name}.kvkeep", codec)
        here[name] = go_on(session, how)
    return here, in_another_process(folder, str(small_folder), "float32")


def test_the_small_model_in_a_folder_is_the_small_model(small_folder: Path) -> None:
    assert load_model(str(small_folder), dtype="float32").fingerprint == MODEL.fingerprint


@pytest.mark.parametrize(("policy", "moment", "sampling", "codec"), CASES)
def test_another_process_goes_on_bit_equal(
    both: tuple[dict[str, Continuation], dict[str, Continuation]],
    policy: str,
    moment: str,
    sampling: str,
    codec: str,
) -> None:
    here, there = (each[f"{policy}.{moment}.{sampling}"] for each in both)
    assert len(here["tokens"]) == (0 if (policy, moment) == ("full", "exactly-full") else NEXT)
    assert torch.equal(here["tokens"], there["tokens"])
    assert torch.equal(here["logits"], there["logits"])


@pytest.mark.extended
def test_the_real_model_in_bfloat16_goes_on_bit_equal(smollm2: Model, tmp_path: Path) -> None:
    how, here = SAMPLINGS["seeded"], dict[str, Continuation]()
    for policy, budget, codec in (("full", 2048, "none"), ("sliding", 256, "zstd")):
        session = smollm2.session(budget, policy=policy)
        session.feed(topic_ids(smollm2)[:300])
        name = f"seeded.{policy}.{codec}"
        session.snapshot().save(tmp_path / f"{name}.kvkeep", codec)
        here[name] = go_on(session, how)
    for name, bits in (("seeded.ragged.none", None), ("seeded.ragged.zstd", "8/4")):
        session = smollm2.session(policy="full", kv_bits=bits)
        session.feed(topic_ids(smollm2)[:300])
        session.compress(4.0, "keydiff", recent=30, budget="heads")
        session.snapshot().save(tmp_path / f"{name}.kvkeep", name.split(".")[-1])  # type: ignore[arg-type]
        here[name] = go_on(session, how)
    there = in_another_process(tmp_path, DEFAULT_MODEL, "bfloat16")
    assert here.keys() == there.keys()
    for name in here:
        assert torch.equal(here[name]["tokens"], there[name]["tokens"])
        assert torch.equal(here[name]["logits"], there[name]["logits"])


def test_what_a_session_is_comes_back(tmp_path: Path) -> None:
    session = MODEL.session(48, keep=6, prefill_step=32)
    session.feed(TEXT)
    session.next_token(SAMPLINGS["seeded"])
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    assert facts(restored) == facts(session)
    assert facts(restored)["policy"] == "sliding"
    restored.next_token(SAMPLINGS["seeded"])
    assert facts(restored) != facts(session)


def facts(session: Session) -> dict[str, object]:
    return {
        "tokens": session.tokens,
        "policy": session.policy,
        "max_kv_size": session.max_kv_size,
        "keep": session.keep,
        "prefill_step": session.prefill_step,
        "cells": session.cache.cells,
        "text": session.text(),
    }


def test_one_snapshot_makes_any_number_of_sessions() -> None:
    session = MODEL.session(48)
    session.feed(TEXT)
    snapshot, how = session.snapshot(), SAMPLINGS["seeded"]
    expected = go_on(session, how)
    for _ in range(3):
        found = go_on(MODEL.restore(snapshot), how)
        assert torch.equal(found["logits"], expected["logits"])


@pytest.mark.parametrize("policy", ["sliding", "shift"])
def test_a_restored_session_can_be_edited_at_once(tmp_path: Path, policy: str) -> None:
    session = MODEL.session(48, policy=policy)
    session.feed(TEXT[:70])
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    for each in (session, restored):
        each.insert(65, TEXT[:9])
        each.pin(60, 64)
    assert torch.equal(session.logits, restored.logits)
    assert session.cache.cells == restored.cache.cells
