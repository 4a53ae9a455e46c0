"""Method `kvzip` (compression by reconstruction): recall, defaults, refusals and interrupts."""

import pytest
import torch
from small_models import small_model

from kvkeep import Session
from kvkeep.cache import Cells
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.kvzip import KVzip
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.datasets import JUNK, PREFIX, NeedleDataset
from kvkeep.evaluate.haystack import Haystack, manual_text
from kvkeep.evaluate.recall import CompressionSettings, measure_compression
from kvkeep.model import Model
from kvkeep.session.reconstruction import FIRST_PROMPT, STEP_TOKENS

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(400)]


def fed(model: Model = MODEL) -> Session:
    session = model.session(policy="full")
    session.feed(TEXT)
    return session


@pytest.mark.extended
def test_a_fact_in_real_text_is_recalled_at_ratio_8(smollm2: Model) -> None:
    haystack = Haystack.from_text(manual_text(), lambda text: len(smollm2.text.encode(text)))
    sample = NeedleDataset(haystack, 700).sample(1)
    evaluation = measure_compression(smollm2, sample, CompressionSettings("kvzip", 8.0))
    assert evaluation.uncompressed is not None
    assert evaluation.uncompressed.found
    assert evaluation.compressed.found
    assert evaluation.compressed.nbytes * 7.6 <= evaluation.uncompressed.nbytes
    uniform = measure_compression(smollm2, sample, CompressionSettings("kvzip:uniform", 8.0))
    assert uniform.compressed.cells == evaluation.compressed.cells
    assert not uniform.compressed.found


def test_a_fact_across_two_chunks_is_recalled(smollm2: Model) -> None:
    encode = smollm2.text.encode
    fact = encode(" The pass key is 56700. Remember it. 56700 is the pass key.")
    # The first chunk ends with "The pass key is".
    before = STEP_TOKENS - len(encode(FIRST_PROMPT)) - 4
    ids = encode(PREFIX + JUNK * 20)[:before] + fact + encode(JUNK * 12)
    assert smollm2.text.decode(ids[before : before + 4]) == " The pass key is"
    session = smollm2.session(policy="full")
    session.feed(ids)
    session.compress(4, "kvzip")
    session.feed(" What is the pass key? The pass key is")
    assert "".join(session.stream(7)).startswith(" 56700")


def test_kvzip_by_heads_is_the_default_method() -> None:
    default, explicit = fed(), fed()
    reports = [default.compress(4), explicit.compress(4, "kvzip", budget="heads")]
    assert [(report.method, report.budget) for report in reports] == [("kvzip", "heads")] * 2
    default.feed(TEXT[:9])
    explicit.feed(TEXT[:9])
    assert torch.equal(default.logits, explicit.logits)


def test_compressed_sessions_are_refused() -> None:
    session = fed()
    session.compress(2)
    cells = session.cache.cells
    with pytest.raises(InvalidArgument, match="in a new session"):
        session.compress(2, "kvzip")
    assert session.cache.cells == cells
    assert session.compress(2).method == "fitted"


def test_progress_counts_every_repeated_cell() -> None:
    progress_counts: list[int] = []
    fed().compress(4, "kvzip", progress=progress_counts.append)
    # The newest half of the 100 kept cells is never evicted, so it is not repeated.
    assert sum(progress_counts) == len(TEXT) - 50


def test_an_interrupt_leaves_the_session_unchanged() -> None:
    session, uncompressed = fed(), fed()

    def interrupted(cells: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.compress(4, "kvzip", progress=interrupted)
    assert session.cache.cells == len(TEXT)
    for _ in range(5):
        assert session.next_token() == uncompressed.next_token()


@pytest.mark.parametrize("settings", [{"method": "kvzip"}, {"method": "kvzap"}])
def test_an_archive_refuses_methods_that_require_reconstruction_or_a_calibration(
    settings: dict[str, str],
) -> None:
    with pytest.raises(InvalidArgument, match="calibration"):
        MODEL.session(200, policy="archive", **settings)  # type: ignore[arg-type]


def test_kvzap_without_a_calibration_is_refused_with_a_hint() -> None:
    session = fed()
    with pytest.raises(InvalidArgument, match="kvkeep pull --calibrate"):
        session.compress(2, "kvzap")
    assert session.cache.cells == len(TEXT)


def test_scores_spread_to_other_heads_of_the_layer_and_to_neighbours() -> None:
    session = fed()
    reconstruction_scores = torch.full((2, 2, 4), -9.0)
    (
        reconstruction_scores[0, 0, 1],
        reconstruction_scores[1, 1, 2],
        reconstruction_scores[1, 0, 2],
    ) = -1.0, -1.0, -2.5
    cells = Cells.concatenate([cells for _, cells in session.cache.read(0, 4)])
    candidates = Candidates(cells, session.cache.rope, 0.1, reconstruction=reconstruction_scores)
    scores = KVzip().score(candidates)
    expected = reconstruction_scores.clone()
    expected[0, 1, 1] = -3.0  # [1, 0, 2] has a higher score of its own
    expected[0, 0, [0, 2]], expected[0, 1, [0, 2]] = -2.5, -4.5
    expected[1, 1, [1, 3]], expected[1, 0, [1, 3]] = -2.5, -4.0
    assert torch.equal(scores, expected)
