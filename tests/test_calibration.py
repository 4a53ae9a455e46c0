"""Calibrations: what is measured, and files that fit one model alone."""

import random
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from listening import attending
from packed_model import packed_model, spec_of
from small import small_model
from topics import topic_ids
from torch import Tensor

from kvkeep import Snapshot
from kvkeep.compression.calibration.calibration import Calibration, load_calibration
from kvkeep.compression.calibration.measure import ReconstructionPart, calibrate, calibration_tokens
from kvkeep.compression.calibration.sums import COSINES, CalibrationSums
from kvkeep.errors import (
    CorruptFile,
    FingerprintMismatch,
    ForeignFile,
    InvalidArgument,
    StoreError,
    TruncatedFile,
)
from kvkeep.model import Model
from kvkeep.models.layers.executor import AnyStep
from kvkeep.session.session import Session

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(1536)]
NEAR = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(MODEL, TEXT)


@pytest.fixture
def path(calibration: Calibration, tmp_path: Path) -> Path:
    assert calibration.save(tmp_path / "a.calibration") > 0
    return tmp_path / "a.calibration"


def told() -> Tensor:
    """The queries that the model hands to attention: `[layers, kv_heads, n, groups, head_dim]`."""
    session, found = MODEL.session(2048), list[list[Tensor]]([[], []])

    def listening(step: AnyStep, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found[layer].append(q.clone())
        return step.attend(layer, q, k, v)

    with attending(MODEL.decoder, listening):
        session.feed(TEXT)
    queries = torch.stack([torch.cat(each) for each in found])
    return queries.unflatten(2, (2, 2)).transpose(1, 2)


def test_mean_and_moment_are_those_of_the_newest_queries_of_each_step(
    calibration: Calibration,
) -> None:
    queries, statistics = told(), calibration.statistics
    newest = [step * 512 + place for step in range(3) for place in range(384, 512)]
    for layer in range(2):
        for head in range(2):
            samples = queries[layer, head, newest].flatten(0, 1).double()
            mean = sum(samples) / len(samples)
            moment = sum(torch.outer(q, q) for q in samples) / len(samples)
            torch.testing.assert_close(statistics.mean[layer, head].double(), mean, **NEAR)
            torch.testing.assert_close(statistics.moment[layer, head].double(), moment, **NEAR)


def test_each_kv_head_tolerates_a_likeness_that_was_tried(calibration: Calibration) -> None:
    tolerance = calibration.statistics.tolerance
    assert tolerance.shape == (2, 2)
    assert set(tolerance.flatten().tolist()) <= set(torch.tensor(COSINES).tolist())


def test_a_text_gives_the_same_calibration_again(calibration: Calibration) -> None:
    again = calibrate(MODEL, TEXT)
    assert again.digest == calibration.digest
    assert again.tokens == len(TEXT)
    assert calibrate(MODEL, TEXT[::-1]).digest != calibration.digest


def test_progress_counts_every_token() -> None:
    steps: list[int] = []
    calibrate(MODEL, TEXT + TEXT[:100], steps.append)
    assert steps[:6] == [0, 512, 512, 512, 100, 512]
    # Then both halves are read and repeated.
    assert sum(steps) == 3 * len(TEXT + TEXT[:100]) == calibration_tokens(MODEL, len(TEXT) + 100)


class Stopped(Exception):
    pass


def stopping(after: int) -> Callable[[int], None]:
    """A progress that ends the run once so many tokens are through."""
    done = 0

    def progress(tokens: int) -> None:
        nonlocal done
        done += tokens
        if done > after:
            raise Stopped

    return progress


def test_a_calibration_that_was_interrupted_goes_on_to_the_same(
    calibration: Calibration, tmp_path: Path
) -> None:
    unfinished = tmp_path / "a.unfinished"
    for after in (1000, 2000, 4000):
        with pytest.raises(Stopped):
            calibrate(MODEL, TEXT, stopping(after), unfinished)
    steps: list[int] = []
    again = calibrate(MODEL, TEXT, steps.append, unfinished)
    assert steps[0] == 3072  # the whole text was measured, and its first half repeated
    assert sum(steps) == 3 * len(TEXT)
    assert (again.digest, again.r_squared) == (calibration.digest, calibration.r_squared)
    assert list(tmp_path.iterdir()) == []


def test_what_another_text_has_left_is_begun_anew(calibration: Calibration, tmp_path: Path) -> None:
    unfinished = tmp_path / "a.unfinished"
    with pytest.raises(Stopped):
        calibrate(MODEL, TEXT[::-1], stopping(2000), unfinished)
    assert calibrate(MODEL, TEXT, None, unfinished).digest == calibration.digest


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:-9] + b"x" * 9])
def test_what_is_damaged_is_begun_anew(
    calibration: Calibration, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    unfinished = tmp_path / "a.unfinished"
    with pytest.raises(Stopped):
        calibrate(MODEL, TEXT, stopping(2000), unfinished)
    unfinished.write_bytes(damage(unfinished.read_bytes()))
    assert calibrate(MODEL, TEXT, None, unfinished).digest == calibration.digest


def test_a_file_that_is_no_beginning_of_a_calibration_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "a.unfinished"
    other.write_text("notes")
    with pytest.raises(ForeignFile, match="not a kvkeep unfinished calibration"):
        calibrate(MODEL, TEXT, None, other)
    assert other.read_text() == "notes"


def test_where_nothing_can_be_kept_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not be written"):
        calibrate(MODEL, TEXT, None, tmp_path / "no-such-folder" / "a")


@pytest.mark.extended
def test_a_surrogate_foretells_cells_of_text_that_it_was_not_fitted_on(smollm2: Model) -> None:
    ids, sums = topic_ids(smollm2), CalibrationSums(smollm2.decoder.new_cache().layout)
    with torch.inference_mode():
        for part in (
            ReconstructionPart(0, 480, False),
            ReconstructionPart(2000, 2480, False),
            ReconstructionPart(1000, 1300, True),
        ):
            part.measure(smollm2, ids, sums, lambda tokens: None)
    assert sums.held_back.r_squared(sums.fitted.weights()) > 0.6


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="needs 1536 tokens or more; found 1535"):
        calibrate(MODEL, TEXT[:-1])


def test_a_file_holds_all_of_it(calibration: Calibration, path: Path) -> None:
    loaded = load_calibration(path, MODEL)
    assert loaded.digest == calibration.digest
    assert loaded.fingerprint == calibration.fingerprint
    assert (loaded.model, loaded.tokens) == (MODEL.name, len(TEXT))
    assert loaded.r_squared == calibration.r_squared
    for known in ("mean", "moment", "tolerance", "surrogate.key", "surrogate.constant"):
        assert torch.equal(*(attrgetter(known)(c.statistics) for c in (loaded, calibration)))


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
    for where in [*range(64), *(draw.randrange(64, len(data)) for _ in range(200))]:
        flipped = bytearray(data)
        flipped[where] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises((CorruptFile, ForeignFile, TruncatedFile)):
            load_calibration(path, MODEL)


def test_a_file_cut_short_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for size in [0, 1, 7, 8, 100, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(StoreError):
            load_calibration(path, MODEL)


def compressing(method: str, calibration: Calibration | None) -> Session:
    session = MODEL.session(64, policy="archive", method=method, calibration=calibration)
    session.feed(TEXT[:200])
    return session


@pytest.mark.parametrize("method", ["fitted", "expected_attention"])
def test_a_session_is_restored_with_the_calibration_that_it_was_begun_with(
    calibration: Calibration, path: Path, tmp_path: Path, method: str
) -> None:
    session = compressing(method, calibration)
    session.snapshot().save(tmp_path / "a.kvkeep")
    snapshot = Snapshot.load(tmp_path / "a.kvkeep")
    other = calibrate(MODEL, TEXT[::-1])
    for wrong in (None, other):
        with pytest.raises(InvalidArgument, match="give the one that it was begun with"):
            MODEL.restore(snapshot, calibration=wrong)
    restored = MODEL.restore(snapshot, calibration=load_calibration(path, MODEL))
    for each in (session, restored):
        each.feed(TEXT[200:300])
    assert torch.equal(session.logits, restored.logits)


def test_what_is_known_of_the_model_decides(calibration: Calibration) -> None:
    found = [compressing("expected_attention", each) for each in (calibration, None)]
    assert not torch.equal(found[0].logits, found[1].logits)


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_a_policy_without_use_for_it_says_so(calibration: Calibration, policy: str) -> None:
    with pytest.raises(InvalidArgument, match="has no use for a calibration"):
        MODEL.session(64, policy=policy, calibration=calibration)


def test_a_session_compressed_at_once_takes_one(calibration: Calibration) -> None:
    with_it, without = (MODEL.session(policy="full") for _ in range(2))
    for session, known in ((with_it, calibration), (without, None)):
        session.feed(TEXT[:300])
        session.compress(3.0, "expected_attention", calibration=known)
    chosen = [s.cache.segments[1].block.slots.positions for s in (with_it, without)]
    assert not torch.equal(*chosen)
