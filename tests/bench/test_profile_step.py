"""The profile of a decode step."""

import pytest
from packed_model import packed_model, spec_of

from benchmarks.profile_step import profile_step, table
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.compiled.structures import PHASES
from kvkeep.models.layers.decoder import Decoder

PROMPT = [(i * 7) % 250 + 1 for i in range(300)]


@pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
def test_the_phases_of_the_kernels_add_up_to_the_step() -> None:
    model, progress = packed_model(spec_of(), 4), []
    profile = profile_step(model, PROMPT, 200, 10, progress.append)
    assert sum(progress) == 10
    assert profile.context == 200
    assert [share.name for share in profile.shares] == [*PHASES, "head", "everything else"]
    assert all(share.seconds >= 0 for share in profile.shares)
    assert 0 < sum(share.seconds for share in profile.shares[: len(PHASES)]) <= profile.seconds
    read = {share.name: share.bytes for share in profile.shares}
    compiled = model.decoder.executor
    assert isinstance(compiled, CompiledExecutor)
    parts = ("projections", "output", "mlp", "head")
    assert sum(read[name] or 0 for name in parts) == sum(compiled.matrix_bytes().values())
    assert (read["attention"] or 0) >= 210 * 2 * 3 * 2 * 64 * 2  # cells, layers, heads, dims
    assert compiled.seconds is None
    assert "after 200 tokens" in table([profile])


def test_without_kernels_the_operators_are_named() -> None:
    model = packed_model(spec_of(), None)
    model.decoder = Decoder(model.spec, model.decoder.tensors)
    profile = profile_step(model, PROMPT, 50, 5, lambda count: None)
    assert any("mm" in share.name for share in profile.shares)
    assert "µs" in table([profile])
