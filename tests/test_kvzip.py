"""Compressing by reconstruction: what a session still knows, and that it is the default."""

import pytest
import torch
from small import small_model

from kvkeep import Session
from kvkeep.cache import Cells
from kvkeep.compression.methods import Candidates
from kvkeep.compression.methods.kvzip import KVzip
from kvkeep.compression.reconstruction import FIRST_PROMPT, STEP
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import Haystack
from kvkeep.evaluate.manual import manual_text
from kvkeep.evaluate.needle import Needle
from kvkeep.evaluate.passkey import JUNK, PREFIX
from kvkeep.evaluate.recall import Compressing, compress_after_reading
from kvkeep.model import Model

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(400)]


def fed(model: Model = MODEL) -> Session:
    session = model.session(policy="full")
    session.feed(TEXT)
    return session


@pytest.mark.extended
def test_a_fact_in_real_text_is_found_in_an_eighth_of_the_cells(smollm2: Model) -> None:
    haystack = Haystack.of(manual_text(), lambda text: len(smollm2.text.encode(text)))
    sample = Needle(haystack, 700).sample(1)
    found = compress_after_reading(smollm2, sample, Compressing("kvzip", 8.0))
    assert found.uncompressed is not None
    assert found.uncompressed.found
    assert found.compressed.found
    assert found.compressed.nbytes * 7.6 <= found.uncompressed.nbytes
    evenly = compress_after_reading(smollm2, sample, Compressing("kvzip:uniform", 8.0))
    assert evenly.compressed.cells == found.compressed.cells
    assert not evenly.compressed.found


def test_a_fact_that_lies_across_two_chunks_is_found(smollm2: Model) -> None:
    encode = smollm2.text.encode
    fact = encode(" The pass key is 56700. Remember it. 56700 is the pass key.")
    before = STEP - len(encode(FIRST_PROMPT)) - 4  # the first chunk ends with "The pass key is"
    ids = encode(PREFIX + JUNK * 20)[:before] + fact + encode(JUNK * 12)
    assert smollm2.text.decode(ids[before : before + 4]) == " The pass key is"
    session = smollm2.session(policy="full")
    session.feed(ids)
    session.compress(4, "kvzip")
    session.feed(" What is the pass key? The pass key is")
    assert "".join(session.stream(7)).startswith(" 56700")


def test_it_is_what_compresses_unless_another_method_is_asked_for() -> None:
    one, other = fed(), fed()
    reports = [one.compress(4), other.compress(4, "kvzip", budget="heads")]
    assert [(each.method, each.budget) for each in reports] == [("kvzip", "heads")] * 2
    one.feed(TEXT[:9])
    other.feed(TEXT[:9])
    assert torch.equal(one.logits, other.logits)


def test_what_was_compressed_cannot_be_repeated() -> None:
    session = fed()
    session.compress(2)
    cells = session.cache.cells
    with pytest.raises(InvalidArgument, match="read the text anew"):
        session.compress(2, "kvzip")
    assert session.cache.cells == cells
    assert session.compress(2).method == "fitted"


def test_progress_is_told_of_every_cell_that_is_repeated() -> None:
    told: list[int] = []
    fed().compress(4, "kvzip", progress=told.append)
    assert sum(told) == len(TEXT) - 50  # the newest half of what is left stays in any case


def test_an_interrupt_leaves_the_session_as_it_was() -> None:
    session, alone = fed(), fed()

    def interrupted(cells: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.compress(4, "kvzip", progress=interrupted)
    assert session.cache.cells == len(TEXT)
    for _ in range(5):
        assert session.next_token() == alone.next_token()


@pytest.mark.parametrize("how", [{"method": "kvzip"}, {"method": "kvzap"}])
def test_an_archive_takes_no_method_that_it_cannot_decide_by(how: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="calibration"):
        MODEL.session(200, policy="archive", **how)  # type: ignore[arg-type]


def test_a_surrogate_that_is_not_there_is_asked_for() -> None:
    session = fed()
    with pytest.raises(InvalidArgument, match="kvkeep pull --calibrate"):
        session.compress(2, "kvzap")
    assert session.cache.cells == len(TEXT)


def test_what_a_head_needs_others_of_its_layer_and_cells_beside_it_need_by_factors() -> None:
    session = fed()
    needed = torch.full((2, 2, 4), -9.0)
    needed[0, 0, 1], needed[1, 1, 2], needed[1, 0, 2] = -1.0, -1.0, -2.5
    cells = Cells.concatenate([cells for _, cells in session.cache.read(0, 4)])
    candidates = Candidates(cells, session.cache.rope, 0.1, reconstruction=needed)
    found = KVzip().score(candidates)
    expected = needed.clone()
    expected[0, 1, 1] = -3.0  # [1, 0, 2] is worth more by itself
    expected[0, 0, [0, 2]], expected[0, 1, [0, 2]] = -2.5, -4.5
    expected[1, 1, [1, 3]], expected[1, 0, [1, 3]] = -2.5, -4.0
    assert torch.equal(found, expected)
