"""Prefix blocks and calibrations: damaged, and made by somebody who seals them well."""

import itertools
from pathlib import Path
from random import Random

from fuzz.fuzzing import fuzz
from fuzz.mutations import bytes_changed
from fuzz.sealed import changed
from small import small_model

from kvkeep import PrefixStore, calibrate, load_calibration

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(300)]


def test_a_prefix_block_is_there_or_not(tmp_path: Path) -> None:
    store, numbers = PrefixStore(tmp_path), itertools.count()
    MODEL.session(512, store=store).feed(TEXT)
    (path,) = tmp_path.glob("*.kvblock")
    plain = path.read_bytes()
    whole = MODEL.session(512)
    whole.feed(TEXT)

    def read(random: Random) -> None:
        if next(numbers) % 2:
            path.write_bytes(changed(plain, random))
        else:
            path.write_bytes(bytes_changed(plain, random))
        found = store.find(MODEL.fingerprint, TEXT)
        assert found.tokens in (0, 256)

    fuzz(read, 30)
    path.write_bytes(bytes_changed(plain, Random(0)))
    session = MODEL.session(512, store=store)
    assert session.feed(TEXT).reused == 0
    assert session.logits.equal(whole.logits)


def test_a_calibration_is_of_this_model_or_refused(tmp_path: Path) -> None:
    model = small_model(max_positions=128)
    path = tmp_path / "c.kvkeep"
    calibrate(model, TEXT).save(path)
    plain = path.read_bytes()

    def read(random: Random) -> None:
        path.write_bytes(changed(plain, random))
        load_calibration(path, model)

    assert fuzz(read, 31)["CorruptFile"]
