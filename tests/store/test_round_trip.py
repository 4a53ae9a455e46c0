"""A session saved and restored in another process continues like the original."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from small_models import small_model, write_small_folder
from store.continuation import NEXT, POLICIES, SAMPLINGS, TEXT, continue_session
from topics import topic_ids
from torch import Tensor

from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.models.hub.source import DEFAULT_MODEL
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import Snapshot

MODEL = small_model()
# The first tier has the policies that evict and compress.
FIRST_TIER = ("sliding", "ragged")
# Each moment is saved with one codec, by turns; other tests check that both restore equal cells.
CODECS = itertools.cycle(("none", "zstd"))
CASES = {
    policy: [
        (moment, sampling, next(CODECS))
        for number, moment in enumerate(moments(MODEL))
        for sampling in (SAMPLINGS if number == 2 else ["seeded"])
    ]
    for policy, moments in POLICIES.items()
}
# Policies that one other process continues: xdist may give each group to another worker.
GROUPS = [FIRST_TIER, ("archive", "full", "self_extend", "shift", "quantised")]
SCRIPT = Path(__file__).with_name("continuation.py")
Continuation = dict[str, Tensor]


def continue_in_another_process(folder: Path, model: str, dtype: str) -> dict[str, Continuation]:
    """Continue each snapshot of a folder in another process; results by the file's stem."""
    threads = torch.get_num_threads()
    command = [sys.executable, SCRIPT, folder, model, dtype, threads]
    subprocess.run([str(x) for x in command], check=True, env=os.environ)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_folder(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def continuations(
    small_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[dict[str, Continuation], dict[str, Continuation]]]:
    """The continuations of a policy's cases in this process, and in another after a restore.

    Those of its group are among them.
    """
    model = load_model(str(small_folder), dtype="float32")

    @cache
    def of_policies(*policies: str) -> tuple[dict[str, Continuation], dict[str, Continuation]]:
        folder, in_this_process = tmp_path_factory.mktemp("snapshots"), dict[str, Continuation]()
        for policy in policies:
            for moment, sampling, codec in CASES[policy]:
                chosen = SAMPLINGS[sampling]
                session = POLICIES[policy](model)[moment](chosen)
                name = f"{policy}.{moment}.{sampling}"
                session.snapshot().save(folder / f"{name}.kvkeep", codec)
                in_this_process[name] = continue_session(session, chosen)
        return in_this_process, continue_in_another_process(folder, str(small_folder), "float32")

    def of_policy(policy: str) -> tuple[dict[str, Continuation], dict[str, Continuation]]:
        return of_policies(*next(group for group in GROUPS if policy in group))

    return of_policy


def test_the_small_model_loaded_from_its_folder_has_the_same_fingerprint(
    small_folder: Path,
) -> None:
    assert load_model(str(small_folder), dtype="float32").fingerprint == MODEL.fingerprint


@pytest.mark.parametrize(
    ("policy", "moment", "sampling", "codec"),
    [
        pytest.param(policy, *case, marks=() if policy in FIRST_TIER else pytest.mark.extended)
        for policy, cases in CASES.items()
        for case in cases
    ],
)
def test_another_process_continues_bit_exactly(
    continuations: Callable[[str], tuple[dict[str, Continuation], dict[str, Continuation]]],
    policy: str,
    moment: str,
    sampling: str,
    codec: str,
) -> None:
    expected, result = (
        by_name[f"{policy}.{moment}.{sampling}"] for by_name in continuations(policy)
    )
    assert len(expected["tokens"]) == (0 if (policy, moment) == ("full", "exactly-full") else NEXT)
    assert torch.equal(expected["tokens"], result["tokens"])
    assert torch.equal(expected["logits"], result["logits"])


@pytest.mark.extended
def test_the_real_model_in_bfloat16_continues_bit_exactly(smollm2: Model, tmp_path: Path) -> None:
    sampling, expected = SAMPLINGS["seeded"], dict[str, Continuation]()
    for policy, budget, codec in (("full", 2048, "none"), ("sliding", 128, "zstd")):
        session = smollm2.session(budget, policy=policy)
        session.feed(topic_ids(smollm2)[:200])
        name = f"seeded.{policy}.{codec}"
        session.snapshot().save(tmp_path / f"{name}.kvkeep", codec)
        expected[name] = continue_session(session, sampling)
    for name, bits in (("seeded.ragged.none", None), ("seeded.ragged.zstd", "8/4")):
        session = smollm2.session(policy="full", kv_bits=bits)
        session.feed(topic_ids(smollm2)[:200])
        session.compress(4.0, "keydiff", recent=30, budget="heads")
        session.snapshot().save(tmp_path / f"{name}.kvkeep", name.split(".")[-1])  # type: ignore[arg-type]
        expected[name] = continue_session(session, sampling)
    results = continue_in_another_process(tmp_path, DEFAULT_MODEL, "bfloat16")
    assert expected.keys() == results.keys()
    for name in expected:
        assert torch.equal(expected[name]["tokens"], results[name]["tokens"])
        assert torch.equal(expected[name]["logits"], results[name]["logits"])


def test_a_restored_session_has_the_saved_properties(tmp_path: Path) -> None:
    session = MODEL.session(48, keep=6, prefill_step=32)
    session.feed(TEXT)
    session.next_token(SAMPLINGS["seeded"])
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    assert properties(restored) == properties(session)
    assert properties(restored)["policy"] == "sliding"
    restored.next_token(SAMPLINGS["seeded"])
    assert properties(restored) != properties(session)


def properties(session: Session) -> dict[str, object]:
    return {
        "tokens": session.tokens,
        "policy": session.policy,
        "max_kv_size": session.max_kv_size,
        "keep": session.keep,
        "prefill_step": session.prefill_step,
        "cells": session.cache.cells,
        "text": session.text(),
    }


def test_one_snapshot_restores_any_number_of_sessions() -> None:
    session = MODEL.session(48)
    session.feed(TEXT)
    snapshot, sampling = session.snapshot(), SAMPLINGS["seeded"]
    expected = continue_session(session, sampling)
    for _ in range(3):
        result = continue_session(MODEL.restore(snapshot), sampling)
        assert torch.equal(result["logits"], expected["logits"])


@pytest.mark.parametrize("policy", ["sliding", "shift"])
def test_a_restored_session_can_be_edited_immediately(tmp_path: Path, policy: str) -> None:
    session = MODEL.session(48, policy=policy)
    session.feed(TEXT[:70])
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    for edited in (session, restored):
        edited.insert(65, TEXT[:9])
        edited.pin(60, 64)
    assert torch.equal(session.logits, restored.logits)
    assert session.cache.cells == restored.cache.cells
