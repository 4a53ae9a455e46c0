"""Files of earlier releases still load, and sessions continue with the same tokens."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store.golden import (
    CHECKPOINT_SPECS,
    PATH,
    PREFIX_PROMPT,
    TEXT,
    golden_model,
    next_after_rewinds,
)

from kvkeep import PrefixStore, Sampling, load_calibration
from kvkeep.cache import RaggedCells
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.block import block_key, blocks_of
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.container import read_container
from kvkeep.storage.snapshots.snapshot import Snapshot, read_snapshot_document

NEXT = [35, 8, 146, 15, 23, 77, 160, 166, 58, 194, 133, 60, 133, 77, 54, 74]


def test_a_file_of_format_1_continues_with_the_same_tokens() -> None:
    session = restore(PATH)
    assert session.tokens[: len(TEXT)] == TEXT
    assert (session.policy, session.max_kv_size, session.keep) == ("sliding", 40, 4)
    assert session.cache.cells == 40
    assert [session.next_token() for _ in range(16)] == NEXT


def test_the_file_of_format_1_is_a_wrapped_window_of_less_than_60_kb() -> None:
    assert PATH.stat().st_size < 60_000
    ring = read_snapshot_document(PATH)["segments"][-1]
    assert ring["slot_order"]
    assert ring["start"] > 0


# The next tokens of each file's session at temperature 0.8 and seed 5, as release 0.1 generated
# them; for ragged cells, as the first release with that format did.
NEXT_TOKENS = {
    "archive": [243, 216, 142, 35, 24, 72, 161, 7, 65, 251, 191, 115],
    "observed": [142, 159, 83, 103, 31, 130, 87, 8, 35, 254, 218, 47],
    "quantised": [197, 196, 110, 167, 30, 70, 87, 25, 60, 247, 112, 46],
    "compressed": [142, 183, 184, 87, 18, 145, 84, 0, 26, 255, 184, 55],
    "pinned": [173, 251, 147, 110, 2, 66, 143, 12, 7, 255, 179, 72],
    "ragged": [207, 223, 113, 5, 24, 107, 157, 8, 27, 254, 196, 38],
    "residual": [207, 152, 143, 86, 45, 136, 120, 18, 13, 255, 113, 70],
    "self-extend": [207, 188, 120, 34, 15, 106, 180, 31, 11, 252, 221, 82],
}


def model_with_tokenizer_of(saved: dict[str, str]) -> Model:
    """Return the golden model with the tokenizer fingerprint that the file has.

    Release 0.1 fingerprinted the JSON that the `tokenizers` library writes, which changes with that
    library.
    """
    model = golden_model()
    fingerprint = replace(model.fingerprint, legacy_tokenizer=saved["tokenizer"])
    model.__dict__["fingerprint"] = fingerprint
    return model


def restore(path: Path) -> Session:
    snapshot = Snapshot.load(path)
    return model_with_tokenizer_of(snapshot.fingerprint).restore(snapshot)


@pytest.mark.parametrize("name", NEXT_TOKENS)
def test_a_file_of_each_kind_of_session_continues_with_the_same_tokens(name: str) -> None:
    session = restore(PATH.with_name(f"golden-{name}.kvkeep"))
    sampling = Sampling(0.8, seed=5)
    assert [session.next_token(sampling) for _ in NEXT_TOKENS[name]] == NEXT_TOKENS[name]


# The next tokens after rewinds, as the first release with checkpoints generated them.
TOKENS_AFTER_REWINDS = {
    "states": [156, 49, 28, 123, 13, 88, 206, 10, 1, 254, 175, 43],
    "windows": [241, 241, 88, 108, 47, 113, 149, 7, 54, 252, 161, 16],
}


@pytest.mark.parametrize("name", TOKENS_AFTER_REWINDS)
def test_a_file_with_checkpoints_goes_back_to_the_same_tokens(name: str) -> None:
    snapshot = Snapshot.load(PATH.with_name(f"golden-{name}.kvkeep"))
    session = golden_model(CHECKPOINT_SPECS[name]).restore(snapshot)
    assert session.checkpoints == [40, 118, 156, 196]
    assert session.checkpoint_bytes == 10**6
    assert [each.branches for each in snapshot.checkpoints.entries] == [True, False, False, False]
    assert next_after_rewinds(session) == TOKENS_AFTER_REWINDS[name]


def test_pins_and_named_spans_are_restored() -> None:
    session = restore(PATH.with_name("golden-pinned.kvkeep"))
    assert session.token_status[60:64] == ["pinned"] * 4
    assert (session.spans["said"].start, session.spans["said"].end) == (65, 70)
    assert session.discard == (60 - 4 - 4) // 2


def test_the_count_of_each_kv_head_is_restored() -> None:
    session = restore(PATH.with_name("golden-ragged.kvkeep"))
    slots = [segment.block.slots for segment in session.cache.segments]
    ragged = [cells for cells in slots if isinstance(cells, RaggedCells)]
    assert [x.counts.tolist() for x in ragged] == [[[0, 6], [12, 6]], [[6, 9], [8, 9]]]
    assert session.token_status[30:34] == ["pinned"] * 4


def test_a_file_of_rounded_cells_is_decoded_with_its_basis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (basis,) = PATH.parent.glob("golden-*.kvbasis")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    (tmp_path / "bases").mkdir()
    shutil.copy(basis, tmp_path / "bases" / basis.name.removeprefix("golden-"))
    session = restore(PATH.with_name("golden-rounded.kvkeep"))
    exact = golden_model().session(policy="full")
    exact.feed(TEXT)
    (segment,), (other,) = session.cache.segments, exact.cache.segments
    for cells, expected in ((segment.block.slots.keys, other.block.slots.keys),):
        difference = (cells[:, :, : len(TEXT)] - expected[:, :, : len(TEXT)]).abs()
        assert difference[:, :, :4].max() < 1e-4  # attention sinks
        assert 0.01 < difference.max() < 0.5


def test_a_calibration_of_an_earlier_release_loads() -> None:
    path = PATH.with_name("golden-calibration.kvkeep")
    model = model_with_tokenizer_of(read_container(path, "calibration", 1).document["fingerprint"])
    calibration = load_calibration(path, model)
    assert calibration.tokens == 3100
    assert calibration.statistics.surrogate is None
    # Sessions that were begun with this calibration refer to it by its digest.
    assert calibration.digest == "34cfd1432d56751f19800701dd810cfbb5509924ef8fdc8f47bc1816a116799f"


def test_a_prefix_block_of_an_earlier_release_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    store, model = PrefixStore(tmp_path), golden_model()
    root = model.fingerprint.digest()[:32]
    (block, *_) = blocks_of(PREFIX_PROMPT, root, block_key)
    shutil.copy(
        PATH.with_name("golden-prefix-block.kvblock"), tmp_path / f"{root}-{block.key}.kvblock"
    )
    session = model.session(512, store=store)
    assert session.feed(PREFIX_PROMPT).reused == 0
    assert model.session(512, store=store).feed(PREFIX_PROMPT).reused == BLOCK_TOKENS


def test_a_prefix_checkpoint_of_an_earlier_release_is_used(tmp_path: Path) -> None:
    model, golden = (
        golden_model(CHECKPOINT_SPECS["states"]),
        "golden-prefix-checkpoint.kvcheckpoint",
    )
    settings: dict[str, Any] = {"max_kv_size": 512, "policy": "full", "prefill_step": 128}
    sessions = [model.session(**settings, store=PrefixStore(tmp_path)) for _ in range(2)]
    sessions[0].feed(PREFIX_PROMPT)
    (path,) = tmp_path.glob("*.kvcheckpoint")
    shutil.copy(PATH.with_name(golden), path)
    assert sessions[1].feed(PREFIX_PROMPT).reused == BLOCK_TOKENS
    torch.testing.assert_close(sessions[1].logits, sessions[0].logits, rtol=1e-4, atol=1e-3)
