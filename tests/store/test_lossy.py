"""The codecs small and smaller: cells in a basis of the model, rounded to a step."""

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lossy_basis import STEP, random_basis
from small_models import local_spec, small_model, state_specs, unrotated_spec
from torch import Tensor

from kvkeep import PrefixStore, Session, Snapshot
from kvkeep.cache import Layout
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.errors import CorruptFile, InvalidArgument, StoreError
from kvkeep.model import Model
from kvkeep.storage.lossy import basis as lossy_basis
from kvkeep.storage.lossy.basis import CellBasis, GroupBasis, add_basis, load_basis
from kvkeep.storage.lossy.cells import BLOCK_CELLS, decode_cells, encode_cells
from kvkeep.storage.lossy.packing import pack, unpack
from kvkeep.storage.prefixes import coding
from kvkeep.storage.snapshots.header import read_summary
from kvkeep.storage.snapshots.snapshot import read_snapshot_document

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(600)]
INTEGERS = st.integers(0, 2**32).map(lambda seed: drawn_integers(random.Random(seed)))


def drawn_integers(rng: random.Random) -> np.ndarray:
    components, count = rng.randrange(1, 40), rng.randrange(1, 80)
    bounds = [rng.choice((0, 1, 2, 7, 8, 127, 128, 32767)) for _ in range(components)]
    rows = [[rng.randint(-bound, bound) for _ in range(count)] for bound in bounds]
    return np.array(rows, np.int16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of bases of an empty home."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    lossy_basis.forget_cached()
    yield tmp_path / "home" / "bases"
    lossy_basis.forget_cached()


def full_session(model: Model = MODEL, tokens: int = 300) -> Session:
    session = model.session(policy="full")
    session.feed(TEXT[:tokens])
    return session


@given(INTEGERS)
def test_packed_integers_are_unpacked(integers: np.ndarray) -> None:
    assert np.array_equal(unpack(pack(integers), *integers.shape), integers)


@given(INTEGERS, st.integers(0, 2**32))
def test_a_damaged_frame_is_refused_or_has_as_many_numbers(integers: np.ndarray, seed: int) -> None:
    rng, frame = random.Random(seed), bytearray(pack(integers))
    for _ in range(rng.randrange(1, 4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    del frame[rng.randrange(len(frame) // 2, len(frame) + 1) :]
    with suppress(ValueError):
        assert unpack(bytes(frame), *integers.shape).shape == integers.shape


@pytest.mark.parametrize("group_layers", [1, 2, 3])
def test_cells_err_by_less_than_a_step_and_blocks_decode_by_themselves(group_layers: int) -> None:
    model = small_model(spec=unrotated_spec())
    basis = random_basis(model, group_layers)
    cells = full_session(model, 600).cache.segments[0].view(0, 600)
    for vectors, is_key in ((cells.keys, True), (cells.values, False)):
        coded = encode_cells(vectors, cells.positions, basis, STEP, is_key)
        decoded = decode_cells(coded, cells.positions, basis, STEP, is_key)
        exact = coded.exact_cells.long()
        assert set(range(4)) <= set(exact.tolist())
        assert torch.equal(decoded[:, :, exact], vectors[:, :, exact])
        error = (decoded - vectors).square().mean().sqrt()
        assert error < 0.4 * STEP + 2e-3 * vectors.square().mean().sqrt()
        assert sum(map(len, coded.frames)) < vectors.numel()
        last = slice(2 * BLOCK_CELLS, 600)
        is_last = exact >= last.start
        alone = replace(
            coded,
            frames=coded.frames[2:],
            exact_cells=coded.exact_cells[is_last] - last.start,
            exact=coded.exact[:, :, is_last],
        )
        part = decode_cells(alone, cells.positions[last], basis, STEP, is_key)
        assert torch.equal(part, decoded[:, :, last])


def uneven_cells(layers: int = 4, count: int = 600) -> tuple[Tensor, Tensor, CellBasis]:
    """Return keys in bfloat16, their positions and their basis.

    Their largest component varies by 400 steps: a bfloat16 has no digits for that.
    """
    kv_heads, head_dim = 2, 64
    width = layers * kv_heads * head_dim
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    group = GroupBasis(torch.zeros(width), vectors.T.half().contiguous(), vectors.half())
    layout = Layout(layers, kv_heads, head_dim, torch.bfloat16, torch.device("cpu"))
    frequencies = torch.zeros(layers, head_dim // 2, dtype=torch.float64)
    basis = CellBasis({}, "", layout, layers, {}, frequencies, (group,), (group,))
    deviations = 400 * STEP / torch.arange(1, width + 1)
    rows = torch.randn(count, width, generator=generator) * deviations @ vectors.T
    cells = rows.view(count, layers, kv_heads, head_dim).permute(1, 2, 0, 3)
    return cells.bfloat16(), torch.arange(count) + 4, basis


def test_threads_change_no_bit_of_coded_cells_and_are_as_many_as_before() -> None:
    cells, positions, basis = uneven_cells(layers=8, count=2048)
    before, coded, decoded = torch.get_num_threads(), [], []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            coded.append(encode_cells(cells, positions, basis, STEP, True))
            decoded.append(decode_cells(coded[-1], positions, basis, STEP, True))
            with ThreadPoolExecutor(1) as other:
                assert other.submit(torch.get_num_threads).result() == threads
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert coded[0].frames == coded[1].frames
    assert torch.equal(decoded[0], decoded[1])


def test_uneven_blocks_decode_by_themselves() -> None:
    cells, positions, basis = uneven_cells()
    coded = encode_cells(cells, positions, basis, STEP, rotated=True)
    decoded = decode_cells(coded, positions, basis, STEP, rotated=True)
    is_first = coded.exact_cells < BLOCK_CELLS
    exact = coded.exact[:, :, is_first]
    alone = replace(
        coded, frames=coded.frames[:1], exact_cells=coded.exact_cells[is_first], exact=exact
    )
    part = decode_cells(alone, positions[:BLOCK_CELLS], basis, STEP, rotated=True)
    assert torch.equal(part, decoded[:, :, :BLOCK_CELLS])


def test_errors_do_not_add_up_when_restored_cells_are_saved_again() -> None:
    cells, positions, basis = uneven_cells()
    errors, current = list[float](), cells
    for _ in range(10):
        coded = encode_cells(current, positions, basis, STEP, rotated=True)
        current = decode_cells(coded, positions, basis, STEP, rotated=True)
        errors.append(float((current.float() - cells.float()).square().mean().sqrt()))
    assert errors[0] < 0.4 * STEP
    assert errors[-1] < 1.002 * errors[0]


def test_a_basis_is_saved_and_found_by_its_digest(folder: Path) -> None:
    basis = random_basis(MODEL)
    path = add_basis(basis)
    assert path.parent == folder
    assert load_basis(path).digest == basis.digest == path.stem
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match="checksum"):
        load_basis(path)


def test_a_lossy_file_is_smaller_restores_and_says_that_it_is_rounded(tmp_path: Path) -> None:
    add_basis(random_basis(MODEL))
    session, path = full_session(), tmp_path / "a.kvkeep"
    sizes = {codec: session.snapshot().save(path, codec) for codec in ("exact", "small", "smaller")}
    assert sizes["exact"] > 1.5 * sizes["small"] > 1.5 * 1.2 * sizes["smaller"]
    restored = MODEL.restore(Snapshot.load(path))
    assert restored.tokens == session.tokens
    assert torch.equal(restored.logits, session.logits)
    assert restored.exactness.differs == ("cells: rounded by codec smaller",)
    assert read_summary(path).rounded == "smaller"
    restored.fork().snapshot().save(path)  # exactly, but what was rounded stays rounded
    again = MODEL.restore(Snapshot.load(path))
    assert again.exactness.differs == ("cells: rounded by codec smaller",)
    restored.fork().snapshot().save(path, "small")  # a file of a finer codec, of coarser cells
    assert MODEL.restore(Snapshot.load(path)).exactness == again.exactness
    assert read_summary(path).rounded == "smaller"
    assert again.next_token() == restored.next_token()


def test_cells_of_windows_are_coded_and_others_are_stored_exactly(tmp_path: Path) -> None:
    for model in (MODEL, small_model(spec=local_spec()), small_model(spec=state_specs()["mamba2"])):
        add_basis(random_basis(model))
        session = model.session(policy="full")
        session.feed(TEXT[:100])
        if model is MODEL:
            session.compress(2, "kvzip", recent=20)
            session.pin(90, 94)
        session.snapshot().save(tmp_path / "a.kvkeep", "small")
        coding = read_snapshot_document(tmp_path / "a.kvkeep")["coding"]
        codecs = {entry["codec"] for entry in coding.values()}
        assert "small" in codecs
        restored = model.restore(Snapshot.load(tmp_path / "a.kvkeep"))
        for segment, other in zip(session.cache.segments, restored.cache.segments, strict=True):
            keys, other_keys = (s.view(0, s.length).keys for s in (segment, other))
            is_sink = segment.length <= 4
            assert torch.equal(keys, other_keys) == (segment.compressed or is_sink)
        restored.next_token()


@pytest.mark.parametrize("codec", ["small", "smaller"])
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_file_without_rounded_cells_is_exact(tmp_path: Path, codec: Any, tokens: int) -> None:
    """The first token's cell, an attention sink, is stored as it is."""
    add_basis(random_basis(MODEL))
    session = MODEL.session(policy="full")
    if tokens:
        session.feed(TEXT[:tokens])
    session.snapshot().save(tmp_path / "a.kvkeep", codec)
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    assert restored.exactness.bit_exact
    assert read_summary(tmp_path / "a.kvkeep").rounded == ""
    for continued in (session, restored):
        continued.feed(TEXT[1:60])
    assert session.logits.equal(restored.logits)


def test_what_cannot_be_rounded_is_refused_and_changes_no_file(tmp_path: Path) -> None:
    path, session = tmp_path / "a.kvkeep", full_session()
    with pytest.raises(InvalidArgument, match="kvkeep calibrate"):
        session.snapshot().save(path, "small")
    path_of_basis = add_basis(random_basis(MODEL))
    quantised = MODEL.session(policy="full", kv_bits="8")
    quantised.feed(TEXT[:50])
    with pytest.raises(InvalidArgument, match="fewer already"):
        quantised.snapshot().save(path, "small")
    assert not path.exists()
    session.snapshot().save(path, "small")
    path_of_basis.unlink()
    with pytest.raises(StoreError, match="is not here: copy"):
        Snapshot.load(path)
    add_basis(random_basis(MODEL, seed=1))  # a file names its basis: others are not used
    with pytest.raises(StoreError, match="is not here: copy"):
        Snapshot.load(path)


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    lossy_basis.forget_cached()


def test_a_damaged_basis_is_refused_by_name_and_no_session_is_lost(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session, path, basis = full_session(), tmp_path / "a.kvkeep", random_basis(MODEL)
    older, newest = add_basis(random_basis(MODEL, seed=1)), add_basis(basis)
    os.utime(older, (1, 1))
    session.snapshot().save(path, "small")
    damage(newest, -100)
    for codec, file in (("small", newest), ("smaller", newest)):
        with pytest.raises(StoreError, match=f"{file}.*checksum.*run `kvkeep calibrate FILE "):
            session.snapshot().save(path, codec)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match=f"{file}.*checksum.*run `kvkeep calibrate FILE "):
            Engine(MODEL, codec=codec)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=f"{newest}.*replace it by a copy.*`kvkeep calibrate "):
        Snapshot.load(path)
    with pytest.raises(StoreError, match=f"{newest}.*kvkeep calibrate"):
        PrefixStore(tmp_path / "p", codec="small").find(MODEL.fingerprint, TEXT)
    session.snapshot().save_by(path, "small")  # as on shutdown
    assert MODEL.restore(Snapshot.load(path)).exactness.bit_exact
    assert f"{path} is saved exactly, not by codec small" in caplog.text
    assert str(newest) in caplog.text
    damage(newest, 100)  # its header: of what model it is cannot be known
    session.snapshot().save(path, "small")  # in the older one
    older.unlink()
    with pytest.raises(InvalidArgument, match=f"{newest}.*run `kvkeep calibrate FILE "):
        session.snapshot().save(path, "small")
    assert add_basis(basis) == newest  # the same one, measured again
    session.snapshot().save(path, "small")
    assert read_summary(path).rounded == "small"


def test_a_rounding_prefix_store_finds_its_basis_once_and_decodes_only_for_lookups(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store = add_basis(random_basis(MODEL)), PrefixStore(tmp_path / "p", codec="small")
    MODEL.session(policy="full", store=store).feed(TEXT)
    path.unlink()
    lossy_basis.forget_cached()
    assert len(store.find(MODEL.fingerprint, TEXT).blocks) == 2
    blocks = sorted(store.path.glob("*.kvblock"))
    blocks[0].write_bytes(b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(coding, "decode_cells", None)  # none is called
        cells = store_blocks(full_session(tokens=600))
        assert store.add(MODEL.fingerprint, TEXT, 0, cells) == 512
    assert len(store.find(MODEL.fingerprint, TEXT).blocks) == 2


def store_blocks(session: Session) -> Iterator[tuple[Tensor, Tensor]]:
    cells = session.cache.segments[0].view(0, 600)
    for start in (0, 256):
        yield cells.keys[:, :, start : start + 256], cells.values[:, :, start : start + 256]


def test_a_prefix_store_keeps_rounded_blocks_apart_from_exact_ones(tmp_path: Path) -> None:
    add_basis(random_basis(MODEL))
    exact = PrefixStore(tmp_path / "p")
    rounding = PrefixStore(tmp_path / "p", codec="smaller")
    MODEL.session(policy="full", store=rounding).feed(TEXT)
    rounded_bytes = rounding.nbytes
    first = MODEL.session(policy="full", store=exact)
    assert first.feed(TEXT).reused == 0  # a rounded prefix is not taken for an exact one
    assert exact.nbytes - rounded_bytes > 1.5 * rounded_bytes
    exact_session = MODEL.session(policy="full", store=exact)
    rounded_session = MODEL.session(policy="full", store=rounding)
    assert exact_session.feed(TEXT).reused == rounded_session.feed(TEXT).reused == 512
    assert exact_session.exactness.bit_exact
    assert torch.equal(exact_session.logits, first.logits)
    assert rounded_session.exactness.differs == ("cells: rounded by codec smaller",)
    rounded_session.fork().snapshot().save(tmp_path / "a.kvkeep")
    assert read_summary(tmp_path / "a.kvkeep").rounded == "smaller"
    assert PrefixStore(tmp_path / "p", codec="small").find(MODEL.fingerprint, TEXT).blocks == []


def test_an_engine_saves_by_its_codec(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="kvkeep calibrate"):
        Engine(MODEL, folder=tmp_path / "s", codec="small")
    add_basis(random_basis(MODEL))
    with Engine(MODEL, folder=tmp_path / "s", stores=tmp_path / "p", codec="small") as engine:
        engine.create(name="a").result()
        request = GenerationRequest(prompt=tuple(TEXT[:300]), max_tokens=3)
        assert len(list(engine.generate(request, session="a"))) > 0
        engine.create(name="quantised", kv_bits="8").result()
        list(engine.generate(request, session="quantised"))
        assert engine.save("quantised").result() == 1
        engine.snapshot("quantised", label="copy").result()
    files = {path.stem: read_summary(path).rounded for path in (tmp_path / "s").rglob("*.kvkeep")}
    assert files == {"a": "small", "quantised": "", "copy": ""}  # no session is lost
    with Engine(MODEL, folder=tmp_path / "s") as engine:
        records = {record.name: record.rounded for record in engine.sessions().result()}
        assert records == {"a": "small", "quantised": ""}
        more = GenerationRequest(prompt=(5,), max_tokens=1)
        list(engine.generate(more, session="a"))  # the session itself goes on with rounded cells
        anew = engine.generate(replace(request, prompt=(*TEXT[:300], 7)))
        list(anew)
        assert anew.reuse.tokens == 0  # another prompt does not
    assert list((tmp_path / "p").rglob("*.kvblock"))
