"""Calibrations: what they measure, resuming, and files that belong to one model."""

import random
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from attention_hooks import attending
from packed_model import packed_model, spec_of
from small_models import small_model
from topics import topic_ids
from torch import Tensor

from kvkeep import Snapshot
from kvkeep.compression.calibration.calibration import Calibration, load_calibration
from kvkeep.compression.calibration.sums import COSINES, CalibrationSums
from kvkeep.errors import (
    CorruptFile,
    FingerprintMismatch,
    ForeignFile,
    InvalidArgument,
    StoreError,
    TruncatedFile,
)
from kvkeep.evaluate.calibrate import ReconstructionPart, calibrate, count_calibration_tokens
from kvkeep.model import Model
from kvkeep.models.layers.executor import AnyStep
from kvkeep.session.session import Session

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(1536)]
TOLERANCES = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(MODEL, TEXT)


@pytest.fixture
def path(calibration: Calibration, tmp_path: Path) -> Path:
    assert calibration.save(tmp_path / "a.calibration") > 0
    return tmp_path / "a.calibration"


def attention_queries() -> Tensor:
    """Return the queries of the text, `[layers, kv_heads, n, groups, head_dim]`."""
    session, queries_by_layer = MODEL.session(2048), list[list[Tensor]]([[], []])

    def recorded(step: AnyStep, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries_by_layer[layer].append(q.clone())
        return step.attend(layer, q, k, v)

    with attending(MODEL.decoder, recorded):
        session.feed(TEXT)
    queries = torch.stack([torch.cat(layer_queries) for layer_queries in queries_by_layer])
    return queries.unflatten(2, (2, 2)).transpose(1, 2)


def test_mean_and_moment_are_measured_over_the_newest_queries_of_each_step(
    calibration: Calibration,
) -> None:
    queries, statistics = attention_queries(), calibration.statistics
    newest = [step * 512 + offset for step in range(3) for offset in range(384, 512)]
    for layer in range(2):
        for head in range(2):
            samples = queries[layer, head, newest].flatten(0, 1).double()
            mean = sum(samples) / len(samples)
            moment = sum(torch.outer(q, q) for q in samples) / len(samples)
            torch.testing.assert_close(statistics.mean[layer, head].double(), mean, **TOLERANCES)
            torch.testing.assert_close(
                statistics.moment[layer, head].double(), moment, **TOLERANCES
            )


def test_the_min_cosine_of_each_kv_head_is_one_of_the_tried_cosines(
    calibration: Calibration,
) -> None:
    min_cosines = calibration.statistics.min_cosine
    assert min_cosines.shape == (2, 2)
    assert set(min_cosines.flatten().tolist()) <= set(torch.tensor(COSINES).tolist())


def test_calibrating_on_the_same_text_is_deterministic(calibration: Calibration) -> None:
    repeated = calibrate(MODEL, TEXT)
    assert repeated.digest == calibration.digest
    assert repeated.tokens == len(TEXT)
    assert calibrate(MODEL, TEXT[::-1]).digest != calibration.digest


def test_progress_counts_every_token() -> None:
    steps: list[int] = []
    calibrate(MODEL, TEXT + TEXT[:100], steps.append)
    assert steps[:6] == [0, 512, 512, 512, 100, 512]
    # Then both halves of the text are prefilled and repeated.
    assert (
        sum(steps) == 3 * len(TEXT + TEXT[:100]) == count_calibration_tokens(MODEL, len(TEXT) + 100)
    )


class Stopped(Exception):
    pass


def stop_after(after: int) -> Callable[[int], None]:
    """Return a progress callback that raises Stopped once `after` tokens are done."""
    done = 0

    def progress(tokens: int) -> None:
        nonlocal done
        done += tokens
        if done > after:
            raise Stopped

    return progress


def test_an_interrupted_calibration_resumes_to_the_same_result(
    calibration: Calibration, tmp_path: Path
) -> None:
    unfinished = tmp_path / "a.unfinished"
    for after in (1000, 2000, 4000):
        with pytest.raises(Stopped):
            calibrate(MODEL, TEXT, stop_after(after), unfinished)
    steps: list[int] = []
    repeated = calibrate(MODEL, TEXT, steps.append, unfinished)
    assert steps[0] == 3072  # the whole text was measured and its first half repeated before
    assert sum(steps) == 3 * len(TEXT)
    assert (repeated.digest, repeated.r_squared) == (calibration.digest, calibration.r_squared)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_calibration_of_another_text_is_restarted(
    calibration: Calibration, tmp_path: Path
) -> None:
    unfinished = tmp_path / "a.unfinished"
    with pytest.raises(Stopped):
        calibrate(MODEL, TEXT[::-1], stop_after(2000), unfinished)
    assert calibrate(MODEL, TEXT, None, unfinished).digest == calibration.digest


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:-9] + b"x" * 9])
def test_a_damaged_unfinished_calibration_is_restarted(
    calibration: Calibration, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    unfinished = tmp_path / "a.unfinished"
    with pytest.raises(Stopped):
        calibrate(MODEL, TEXT, stop_after(2000), unfinished)
    unfinished.write_bytes(damage(unfinished.read_bytes()))
    assert calibrate(MODEL, TEXT, None, unfinished).digest == calibration.digest


def test_a_foreign_file_is_not_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "a.unfinished"
    other.write_text("notes")
    with pytest.raises(ForeignFile, match="not a kvkeep unfinished calibration"):
        calibrate(MODEL, TEXT, None, other)
    assert other.read_text() == "notes"


def test_an_unwritable_unfinished_file_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not be written"):
        calibrate(MODEL, TEXT, None, tmp_path / "no-such-folder" / "a")


@pytest.mark.extended
def test_a_surrogate_predicts_scores_on_held_back_text(smollm2: Model) -> None:
    ids, sums = topic_ids(smollm2), CalibrationSums(smollm2.decoder.new_cache().layout)
    with torch.inference_mode():
        for part in (
            ReconstructionPart(0, 480, False),
            ReconstructionPart(2000, 2480, False),
            ReconstructionPart(1000, 1300, True),
        ):
            part.measure(smollm2, ids, sums, lambda tokens: None)
    assert sums.held_out.r_squared(sums.training.weights()) > 0.6


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="needs 1536 tokens or more; found 1535"):
        calibrate(MODEL, TEXT[:-1])


def test_a_saved_calibration_loads_unchanged(calibration: Calibration, path: Path) -> None:
    loaded = load_calibration(path, MODEL)
    assert loaded.digest == calibration.digest
    assert loaded.fingerprint == calibration.fingerprint
    assert (loaded.model, loaded.tokens) == (MODEL.name, len(TEXT))
    assert loaded.r_squared == calibration.r_squared
    for name in ("mean", "moment", "min_cosine", "surrogate.key_weights", "surrogate.constant"):
        assert torch.equal(*(attrgetter(name)(c.statistics) for c in (loaded, calibration)))


@pytest.mark.parametrize("other", [small_model(seed=1), packed_model(spec_of(), None)])
def test_another_model_is_refused(path: Path, calibration: Calibration, other) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FingerprintMismatch, match="the calibration belongs to another model"):
        load_calibration(path, other)
    with pytest.raises(FingerprintMismatch, match="the calibration belongs to another model"):
        other.session(400, policy="archive", calibration=calibration)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    session = MODEL.session(48)
    session.feed(TEXT[:9])
    session.snapshot().save(tmp_path / "a.kvkeep")
    with pytest.raises(ForeignFile):
        load_calibration(tmp_path / "a.kvkeep", MODEL)


def test_a_flipped_bit_is_refused(path: Path) -> None:
    data, draw = path.read_bytes(), random.Random(0)
    for offset in [*range(64), *(draw.randrange(64, len(data)) for _ in range(200))]:
        flipped = bytearray(data)
        flipped[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises((CorruptFile, ForeignFile, TruncatedFile)):
            load_calibration(path, MODEL)


def test_a_truncated_file_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for size in [0, 1, 7, 8, 100, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(StoreError):
            load_calibration(path, MODEL)


def archive_session(method: str, calibration: Calibration | None) -> Session:
    session = MODEL.session(64, policy="archive", method=method, calibration=calibration)
    session.feed(TEXT[:200])
    return session


@pytest.mark.parametrize("method", ["fitted", "expected_attention"])
def test_a_restore_requires_the_calibration_that_the_session_began_with(
    calibration: Calibration, path: Path, tmp_path: Path, method: str
) -> None:
    session = archive_session(method, calibration)
    session.snapshot().save(tmp_path / "a.kvkeep")
    snapshot = Snapshot.load(tmp_path / "a.kvkeep")
    of_reversed_text = calibrate(MODEL, TEXT[::-1])
    for wrong_calibration in (None, of_reversed_text):
        with pytest.raises(InvalidArgument, match="pass the one that the session was created with"):
            MODEL.restore(snapshot, calibration=wrong_calibration)
    restored = MODEL.restore(snapshot, calibration=load_calibration(path, MODEL))
    for continued in (session, restored):
        continued.feed(TEXT[200:300])
    assert torch.equal(session.logits, restored.logits)


def test_a_calibration_changes_which_cells_are_kept(calibration: Calibration) -> None:
    sessions = [archive_session("expected_attention", used) for used in (calibration, None)]
    assert not torch.equal(sessions[0].logits, sessions[1].logits)


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_policies_that_use_no_calibration_refuse_one(calibration: Calibration, policy: str) -> None:
    with pytest.raises(InvalidArgument, match="does not use a calibration"):
        MODEL.session(64, policy=policy, calibration=calibration)


def test_compress_uses_a_calibration(calibration: Calibration) -> None:
    calibrated, uncalibrated = (MODEL.session(policy="full") for _ in range(2))
    for session, given_calibration in ((calibrated, calibration), (uncalibrated, None)):
        session.feed(TEXT[:300])
        session.compress(3.0, "expected_attention", calibration=given_calibration)
    chosen = [s.cache.segments[1].block.slots.positions for s in (calibrated, uncalibrated)]
    assert not torch.equal(*chosen)


def test_the_shortest_models_and_texts_are_measured_and_shorter_ones_refused() -> None:
    model = small_model(max_positions=32)
    assert calibrate(model, TEXT[:32]).tokens == 32
    with pytest.raises(InvalidArgument, match="32 tokens or more; found 31"):
        calibrate(model, TEXT[:31])
    for positions in (2, 4, 16, 31):
        short_model = small_model(max_positions=positions)
        with pytest.raises(InvalidArgument, match=f"was trained for {positions}"):
            calibrate(short_model, TEXT[:400])
