"""Sessions on the compiled path against the same model on torch, in bfloat16 and in float32."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from packed_model import packed_model, spec_of
from torch import Tensor

from kvkeep import SessionGroup, Snapshot
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.weights.packing import MatrixBits
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(600)]
WRITTEN = [(i * 5 + 11) % 250 + 1 for i in range(40)]
FAMILIES = [("llama", 64), ("llama", 32), ("qwen2", 96), ("qwen3", 128)]
SETTINGS: list[dict[str, object]] = [
    {"policy": "full"},
    {"max_kv_size": 300},
    {"max_kv_size": 64, "keep": 5, "prefill_step": 50},
    {"max_kv_size": 100, "policy": "shift", "discard": 30, "prefill_step": 7},
    {"policy": "self_extend", "group": 2, "window": 64, "prefill_step": 100},
]


def by_torch(model: Model, dtype: torch.dtype) -> Model:
    """Return the same model without the compiled kernels."""
    tensors = {name: tensor.to(dtype) for name, tensor in model.decoder.tensors.items()}
    return Model(model.name, model.folder, Decoder(model.spec, tensors), model.text)


def by_torch_of(
    head_dim: int, family: str, bits: MatrixBits | None, settings: dict[str, object]
) -> tuple[Tensor, Tensor]:
    """Return torch's logits in float32 and bfloat16, computed once for all instruction sets."""
    return _by_torch_of(head_dim, family, bits, tuple(settings.items()))


@cache
def _by_torch_of(
    head_dim: int, family: str, bits: MatrixBits | None, settings: tuple[tuple[str, object], ...]
) -> tuple[Tensor, Tensor]:
    model = packed_model(spec_of(head_dim, family), bits)
    exact, rounded = (
        logits_of(by_torch(model, dtype), dict(settings))
        for dtype in (torch.float32, torch.bfloat16)
    )
    return exact, rounded


def logits_of(model: Model, settings: dict[str, object], written: int = 32) -> Tensor:
    """Return the logits after the prompt and after each of some more tokens, `[n, vocab]`."""
    session = model.session(**settings)  # type: ignore[arg-type]
    session.feed(PROMPT[: 3 * (session.max_kv_size or len(PROMPT))])
    rows = [last(session)]
    for token in WRITTEN[:written]:
        session.score([token], token_by_token=True)
        rows.append(last(session))
    return torch.stack(rows)


def last(session: Session) -> Tensor:
    logits = session.logits
    assert logits is not None
    return logits


# Each family with each of the settings, with a width of weights by turns; others before releases.
WIDTHS: tuple[MatrixBits | None, ...] = (None, 8, 4)
CASES = [
    pytest.param(*family, bits, settings, marks=() if (i + j + k) % 3 == 0 else pytest.mark.slow)
    for i, family in enumerate(FAMILIES)
    for j, bits in enumerate(WIDTHS)
    for k, settings in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("family", "head_dim", "bits", "settings"), CASES, ids=str)
def test_logits_are_as_near_to_float32_as_torch_in_bfloat16(
    family: str, head_dim: int, bits: MatrixBits | None, settings: dict[str, object]
) -> None:
    model = packed_model(spec_of(head_dim, family), bits)
    assert isinstance(model.decoder.executor, CompiledExecutor)
    exact, rounded = by_torch_of(head_dim, family, bits, settings)
    reference = (rounded - exact).square().mean()
    compiled = (logits_of(model, settings) - exact).square().mean()
    assert exact.abs().max() > 5
    assert compiled <= 1.2 * reference


def test_a_chunk_is_the_same_on_any_number_of_threads() -> None:
    model = packed_model(spec_of(), 4)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(logits_of(model, {"max_kv_size": 300}, 9))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def edited(session: Session) -> Session:
    session.delete(120, 140)
    session.insert(60, PROMPT[:7])
    return session


MADE: list[Callable[[Model], list[Session]]] = [
    lambda model: [fed(model).fork() for _ in range(3)],
    lambda model: forked(fed(model), 5),
    lambda model: forked(edited(fed(model)), 4),
    lambda model: forked(fed(model, max_kv_size=200), 3),
    lambda model: [fed(model), fed(model, max_kv_size=100), *forked(fed(model, keep=9), 17)],
    lambda model: forked(fed(model, policy="self_extend", group=2, window=64), 3),
    lambda model: [*forked(fed(model, kv_bits="8"), 3), *forked(fed(model), 2)],
    lambda model: [*forked(fed(model, max_kv_size=100, kv_bits="4"), 3), fed(model, kv_bits="8/4")],
    lambda model: forked(edited(fed(model, keep=150, far_bits="4")), 3),
]


def fed(model: Model, **settings: object) -> Session:
    session = model.session(**settings)  # type: ignore[arg-type]
    session.feed(PROMPT[:333])
    return session


def forked(session: Session, count: int) -> list[Session]:
    """Return forks with different generated tokens, the first a fork of a fork."""
    forks = [session.fork() for _ in range(count)]
    for index, fork in enumerate(forks):
        fork.feed(WRITTEN[index : 2 * index + 3])
    return [forks[0].fork(), *forks[1:]]


@pytest.mark.parametrize("make", MADE)
def test_a_group_gives_the_same_bits_as_each_session_alone(
    make: Callable[[Model], list[Session]],
) -> None:
    model = packed_model(spec_of(), 4)
    together, alone = make(model), make(model)
    group = SessionGroup(together)
    for _ in range(12):
        tokens = group.next_tokens()
        assert tokens == [session.next_token() for session in alone]
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(last(one), last(other))


@pytest.mark.parametrize("kind", [{}, {"kv_bits": "8/4"}, {"far_bits": "4"}], ids=str)
def test_a_restored_snapshot_continues_with_the_same_bits(tmp_path, kind) -> None:  # type: ignore[no-untyped-def]
    model = packed_model(spec_of(), 4)
    session = fed(model, max_kv_size=200, **kind)
    path = tmp_path / "one.kvkeep"
    session.snapshot().save(path)
    again = model.restore(Snapshot.load(path))
    assert torch.equal(last(again), last(session))
    for _ in range(20):
        assert again.next_token() == session.next_token()
        assert torch.equal(last(again), last(session))


def test_cells_equal_those_of_torch_to_bfloat16_rounding() -> None:
    model = packed_model(spec_of(), 4)
    sessions = [fed(each) for each in (model, by_torch(model, torch.bfloat16))]
    for session in sessions:
        session.score([7], token_by_token=True)
    here, there = (s.cache.segments[-1].read(0, s.cache.segments[-1].length) for s in sessions)
    assert torch.equal(here.positions, there.positions)
    for x, y in ((here.keys, there.keys), (here.values, there.values)):
        assert (x.float() - y.float()).square().mean() <= 1e-3 * y.float().square().mean()


def over_the_same_cells(model: Model, session: Session, kv_bits: str | None) -> Session:
    """Return a session of another model that continues from the cells of a session."""
    other = model.session(kv_bits=kv_bits)
    memory, results = other.core.memory, session.core.memory.fork()
    results.decoder, results.cache.layout = memory.decoder, memory.cache.layout
    results.cache.far_layout = memory.cache.far_layout
    other.core.state.memory = results
    return other


OVER_QUANTISED = [
    (*family, n, kv_bits)
    for i, family in enumerate(FAMILIES)
    for n, kv_bits in (((1, "8"), (2, "4")) if i % 2 else ((1, "4"), (2, "8")))
]


@pytest.mark.parametrize(("family", "head_dim", "n", "kv_bits"), OVER_QUANTISED)
def test_attention_over_quantised_cells_is_as_exact_as_torch(
    family: str, head_dim: int, n: int, kv_bits: str
) -> None:
    model = packed_model(spec_of(head_dim, family), None)
    session = model.session(kv_bits=kv_bits)
    session.feed(PROMPT)
    models = [by_torch(model, torch.float32), by_torch(model, torch.bfloat16), model]
    exact, reference, results = (over_the_same_cells(each, session, None) for each in models)
    rows: list[Tensor] = []
    for one in (exact, reference, results):
        seen = []
        for first in range(0, 24, n):
            one.feed(WRITTEN[first : first + n])
            seen.append(last(one))
        assert [s.block.slots.quantised for s in one.cache.segments][-2:] == [True, False]
        rows.append(torch.stack(seen))
    error = (rows[1] - rows[0]).square().mean()
    assert (rows[2] - rows[0]).square().mean() <= 1.3 * error


@pytest.mark.parametrize(("kv_bits", "most"), [("8", 1e-3), ("8/4", 1e-2), ("4", 1e-2)])
@pytest.mark.parametrize(("family", "head_dim"), FAMILIES)
def test_new_cells_are_quantised_as_by_torch(
    family: str, head_dim: int, kv_bits: str, most: float
) -> None:
    """All but a few numbers halfway between two codes, which are rounded the other way."""
    model = packed_model(spec_of(head_dim, family), None)
    session = model.session(kv_bits=kv_bits)
    session.feed(PROMPT)
    models = [by_torch(model, torch.bfloat16), model]
    sessions = [over_the_same_cells(each, session, kv_bits) for each in models]
    for one in sessions:
        one.feed(WRITTEN[:1])
    there, here = (s.cache.segments[-1].read(0, 1).dequantise(torch.float32) for s in sessions)
    for x, y in ((here.keys, there.keys), (here.values, there.values)):
        assert (x - y).square().mean() <= most * y.square().mean()


def test_quantised_chunks_are_the_same_on_any_number_of_threads() -> None:
    model = packed_model(spec_of(), 4)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(logits_of(model, {"max_kv_size": 300, "kv_bits": "8/4"}, 9))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
