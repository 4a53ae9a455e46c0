"""Fuzz tests of prefix blocks and calibrations: damaged bytes, and wrong content with checksums."""

import itertools
from pathlib import Path
from random import Random

from fuzz.fuzzing import fuzz
from fuzz.mutations import mutate_bytes
from fuzz.sealed import mutate
from small_models import small_model

from kvkeep import PrefixStore, calibrate, load_calibration

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)]


def test_a_damaged_prefix_block_is_a_hit_or_a_miss(tmp_path: Path) -> None:
    store, counter = PrefixStore(tmp_path), itertools.count()
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

    fuzz(read, 30)
    path.write_bytes(mutate_bytes(original, Random(0)))
    session = MODEL.session(512, store=store)
    assert session.feed(TEXT).reused == 0
    assert session.logits.equal(without_store.logits)


def test_a_damaged_calibration_loads_or_is_refused(tmp_path: Path) -> None:
    model = small_model(max_positions=128)
    path = tmp_path / "c.kvkeep"
    calibrate(model, TEXT).save(path)
    original = path.read_bytes()

    def read(random: Random) -> None:
        path.write_bytes(mutate(original, random))
        load_calibration(path, model)

    assert fuzz(read, 31)["CorruptFile"]
