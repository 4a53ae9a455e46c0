"""Operands of another shape, dtype or layout than the kernels read are refused unread."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packed_model import packed_model, spec_of
from torch import Tensor

import kvkeep
from kvkeep.cache import RaggedCells
from kvkeep.cache.quantised import QuantisedTensor
from kvkeep.compiled.binding import kernel_library, raise_for_status
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.compiled.structures import (
    DENSE_FORMATS,
    CChunk,
    CDecodeStep,
    CMatrix,
    CModel,
    CSimilarity,
)
from kvkeep.compression.methods.similarity import most_similar
from kvkeep.errors import KernelMismatch, OutOfMemory
from kvkeep.models.weights.formats import FORMATS
from kvkeep.models.weights.packing import pack, quantise

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(40)]
SPEC = spec_of()


def weights() -> dict[str, Tensor]:
    return dict(packed_model(SPEC, None).decoder.tensors)


def executor(tensors: dict[str, Tensor], **packed_ones: object) -> CompiledExecutor:
    return CompiledExecutor(SPEC, tensors, packed_ones)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("model.norm.weight", lambda x: x.float()),
        ("model.norm.weight", lambda x: x[:-32]),
        ("model.embed_tokens.weight", lambda x: x[:-1]),
        ("model.layers.1.mlp.down_proj.weight", lambda x: x.T),
        ("model.layers.2.self_attn.q_proj.weight", lambda x: x.to("meta")),
    ],
)
def test_weights_of_another_shape_dtype_or_device_are_refused_by_the_executor(
    name: str, damaged: Callable[[Tensor], Tensor]
) -> None:
    tensors = weights()
    tensors[name] = damaged(tensors[name])
    with pytest.raises(KernelMismatch, match=name):
        executor(tensors)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda m: replace(m, data=m.data[:-1]),
        lambda m: replace(m, scales=m.scales[:, :-1]),
        lambda m: replace(m, scales=m.scales.float()),
        lambda m: replace(m, rows=m.rows + 16),
        lambda m: replace(m, format=FORMATS["Q8_0"]),
    ],
)
def test_packed_matrices_of_another_shape_or_dtype_are_refused(damaged) -> None:  # type: ignore[no-untyped-def]
    tensors, name = weights(), "model.layers.0.mlp.up_proj.weight"
    good = pack(quantise(tensors[name].float(), 4))
    executor(tensors, **{name: good})
    with pytest.raises(KernelMismatch, match="up_proj"):
        executor(tensors, **{name: damaged(good)})


def test_unused_tensors_are_not_read() -> None:
    tensors = weights()
    tensors["lm_head.bias"] = torch.full((3,), torch.nan, dtype=torch.bfloat16)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.full((1,), torch.nan)
    hidden = torch.randn(2, SPEC.hidden_size).bfloat16()
    assert torch.equal(executor(tensors).logits(hidden), executor(weights()).logits(hidden))


@pytest.mark.parametrize(
    "hidden",
    [
        torch.zeros(1, SPEC.hidden_size),
        torch.zeros(1, SPEC.hidden_size - 32, dtype=torch.bfloat16),
        torch.zeros(1, SPEC.hidden_size, dtype=torch.bfloat16, device="meta"),
    ],
    ids=["float32", "short", "meta"],
)
def test_hidden_states_of_another_shape_dtype_or_device_are_refused(hidden: Tensor) -> None:
    with pytest.raises(KernelMismatch, match="hidden states"):
        executor(weights()).logits(hidden)


def scales_halved(stored: QuantisedTensor) -> QuantisedTensor:
    return QuantisedTensor(stored.data, stored.scale[..., :1])


CELLS = {
    "float32": (None, lambda x: x.float()),
    "a layer less": (None, lambda x: x[:-1]),
    "a KV head less": (None, lambda x: x[:, :-1]),
    "strided numbers": (None, lambda x: torch.stack((x, x), -1)[..., 0]),
    "half as wide": (None, lambda x: x[..., :32]),
    "elsewhere": (None, lambda x: x.to("meta")),
    "scales of another dtype": ("8", lambda x: QuantisedTensor(x.data, x.scale.float())),
    "too few scales": ("4", scales_halved),
    "half as wide in 4 bits": ("4", lambda x: QuantisedTensor(x.data[..., :16], x.scale)),
    "strided in 8 bits": (
        "8",
        lambda x: QuantisedTensor(x.data.repeat(1, 1, 1, 2)[..., ::2], x.scale),
    ),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("kv_bits", "damaged"), CELLS.values(), ids=CELLS)
def test_cells_of_another_layout_are_refused_and_the_session_is_unchanged(  # type: ignore[no-untyped-def]
    kv_bits: str | None, damaged, count: int
) -> None:
    # The prompt's cells are in one segment, the fork's new ones in another.
    parent = packed_model(SPEC, None).session(policy="full", kv_bits=kv_bits)
    parent.feed(PROMPT)
    session = parent.fork()
    segment = session.cache.segments[0]
    segment.block.slots = replace(
        segment.block.slots, stored_keys=damaged(segment.block.slots.stored_keys)
    )
    with pytest.raises(KernelMismatch, match=r"cells|scales"):
        session.feed(PROMPT[:count])
    assert (session.tokens, session.cache.cells) == (PROMPT, len(PROMPT))


@pytest.mark.parametrize("count", [1, 3])
def test_a_bias_of_another_dtype_is_refused(count: int) -> None:
    session = packed_model(SPEC, None).session(policy="full")
    session.feed(PROMPT)
    session.compress(2.0, "keydiff", recent=4)
    (segment,) = (segment for segment in session.cache.segments if segment.compressed)
    slots = segment.block.slots
    assert slots.bias is not None
    segment.block.slots = replace(slots, bias=slots.bias.double())
    with pytest.raises(KernelMismatch, match="bias"):
        session.feed(PROMPT[:count])


def counted(slots: RaggedCells, *changes: tuple[int, int]) -> RaggedCells:
    """Return ragged cells whose counts are wrong for some heads."""
    counts = slots.counts.flatten().clone()
    for head, more in changes:
        counts[head] += more
    return replace(slots, counts=counts.view_as(slots.counts))


OFFSETS: dict[str, Callable[[RaggedCells], RaggedCells]] = {
    "more cells than there are": lambda x: counted(x, (2, 1)),
    "fewer": lambda x: counted(x, (5, -1)),
    "less than none": lambda x: counted(x, (0, -500), (1, 500)),
    "beyond the end and back": lambda x: counted(x, (4, 500), (5, -500)),
    "a layer less": lambda x: replace(x, counts=x.counts.view(2, 3)),
    "a KV head less": lambda x: replace(x, counts=x.counts.view(6, 1)),
    "float32": lambda x: replace(x, stored_keys=x.keys.float()),
    "half as wide": lambda x: replace(x, stored_values=x.values[:, :32]),
    "a bias of another dtype": lambda x: replace(x, bias=x.bias.double()),
    "a bias of fewer": lambda x: replace(x, bias=x.bias[:-1]),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("damaged", OFFSETS.values(), ids=OFFSETS)
def test_ragged_cells_that_do_not_fit_their_offsets_are_refused(
    damaged: Callable[[RaggedCells], RaggedCells], count: int
) -> None:
    session = packed_model(SPEC, None).session(policy="full")
    session.feed(PROMPT)
    session.compress(2.0, "keydiff", recent=4, budget="heads")
    (segment,) = (segment for segment in session.cache.segments if segment.compressed)
    slots, before = segment.block.slots, (session.tokens, session.cache.cells)
    assert isinstance(slots, RaggedCells)
    assert slots.counts.shape == (3, 2)
    segment.block.slots = damaged(slots)
    with pytest.raises(KernelMismatch):
        session.feed(PROMPT[:count])
    segment.block.slots = slots
    assert (session.tokens, session.cache.cells) == before
    session.feed(PROMPT[:count])


@pytest.mark.parametrize("token", [-1, SPEC.vocab_size, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    session = packed_model(SPEC, None).session()
    session.feed(PROMPT)
    memory = session.core.memory
    memory.policy.open(memory.cache, 1)
    with pytest.raises(KernelMismatch, match="each from 0 to 263"), memory.cache.step(1) as step:
        memory.decoder.forward(torch.tensor([token]), step)


def test_similarity_of_vectors_of_other_widths_is_refused() -> None:
    x = torch.zeros(1, 2, 5, 64, dtype=torch.bfloat16)
    for among in (x[..., :32], x[:, :1], x.float()):
        with pytest.raises(KernelMismatch):
            most_similar(x, among)


class RecordedKernels:
    """The kernels, with a list of the memory that each layer of a chunk packs its cells to."""

    def __init__(self, kernels: ctypes.CDLL):
        self._kernels, self.packed = kernels, list[int | None]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)

    def kvkeep_attend_chunk(self, chunk: CChunk) -> object:
        self.packed.append(chunk.packed)
        return self._kernels.kvkeep_attend_chunk(chunk)


def test_all_layers_pack_the_cells_of_a_chunk_to_the_same_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system maps and clears new memory page by page, which takes long."""
    model = packed_model(SPEC, None)
    used = model.decoder.executor
    assert isinstance(used, CompiledExecutor)
    recorded = RecordedKernels(used.kernels)
    monkeypatch.setattr(used, "kernels", recorded)
    model.session().feed(PROMPT)
    assert len(recorded.packed) == SPEC.layers
    assert len({*recorded.packed}) == 1
    assert recorded.packed[0]
    assert recorded.packed[0] % 64 == 0


# Needs more memory than any machine has.
MANY = 2**31 - 64
sanitized = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer aborts allocations that fail"
)


@sanitized
def test_a_call_without_enough_memory_returns_its_status() -> None:
    kernels = kernel_library()
    assert kernels is not None
    one = torch.zeros(64, dtype=torch.bfloat16).data_ptr()
    matrix = CMatrix(DENSE_FORMATS[torch.bfloat16], 16, MANY, 0, one, None, None)
    assert kernels.kvkeep_product(matrix, one, MANY, one, 1) == 2
    chunk = CChunk(tokens=MANY, heads=MANY, kv_heads=1, head_dim=64, rotations=MANY, threads=1)
    assert kernels.kvkeep_attend_chunk(chunk) == 2
    model = CModel(layer_count=1, hidden_size=MANY, mlp_size=MANY, heads=1)
    assert kernels.kvkeep_decode(model, CDecodeStep(sequence_count=MANY, threads=1)) == 2
    alike = CSimilarity(heads=1, row_count=1, column_count=MANY, width=MANY, threads=MANY)
    assert kernels.kvkeep_most_similar(alike) == 2


def test_an_unsupported_head_width_has_a_status_of_its_own() -> None:
    kernels = kernel_library()
    assert kernels is not None
    assert kernels.kvkeep_attend_chunk(CChunk(head_dim=48, kv_heads=1, threads=1)) == 1
    raise_for_status(0)
    with pytest.raises(KernelMismatch):
        raise_for_status(1)
    with pytest.raises(OutOfMemory):
        raise_for_status(2)


SHORT_OF_MEMORY = """
import resource, torch
from packed_model import packed_model, spec_of
from kvkeep.errors import OutOfMemory

model = packed_model(spec_of(128), None)
session = model.session(policy="full", max_kv_size=2000)
session.feed([i % 250 + 1 for i in range(1600)])
session.feed([5] * 17)  # a chunk: allocates everything that is allocated once
before = session.tokens, session.cache.cells, session.logits
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (taken + 1_000_000, hard))  # the cells, packed, take 1.6 MB
try:
    session.feed([7] * 17)
    raise SystemExit("it did not run out of memory")
except OutOfMemory as error:
    assert isinstance(error, MemoryError)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert (session.tokens, session.cache.cells) == before[:2]
assert torch.equal(session.logits, before[2])
session.feed([7] * 17)
print("continued with", len(session.tokens))
"""


@sanitized
@pytest.mark.skipif(sys.platform != "linux", reason="how much a process may take is set by Linux")
def test_a_session_that_runs_out_of_memory_is_unchanged_and_continues() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY],
        env={
            "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(kvkeep.__file__).parents[1]}",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",  # frees large blocks at once
            "MALLOC_ARENA_MAX": "1",  # no free memory in another thread's arena
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (process.returncode, process.stdout) == (0, "continued with 1634\n"), process.stderr[
        -2000:
    ]
