"""torch's default dtype and device, set by a caller, change no result."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from packed_model import packed_model, spec_of
from small_models import small_model, write_small_folder
from torch import Tensor

import kvkeep
from kvkeep import PrefixStore, Sampling, SessionGroup, Snapshot
from kvkeep.compression.methods import METHODS
from kvkeep.evaluate.calibrate import calibrate
from kvkeep.model import Model
from kvkeep.session.session import Session

IDS = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(200)]
DRAWN = Sampling(0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3)
DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@contextmanager
def default(value: torch.dtype | str) -> Iterator[None]:
    """Set a default. Nothing can be computed on "meta", so a tensor that lands there shows."""
    before = torch.get_default_dtype()
    try:
        if isinstance(value, torch.dtype):
            torch.set_default_dtype(value)
        else:
            torch.set_default_device(value)
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def wrapping(model: Model, path: Path) -> list[Tensor]:
    """Chunks and single tokens into a ring that wraps."""
    session = model.session(max_kv_size=40, prefill_step=24)
    return [*fed(session), session.score(IDS[:30])]


def in_few_bits(model: Model, path: Path) -> list[Tensor]:
    return [
        row
        for bits in ({"kv_bits": "8/4"}, {"kv_bits": "4"}, {"far_bits": "8"})
        for row in fed(model.session(max_kv_size=40, keep=12, prefill_step=24, **bits))
    ]


def by_other_policies(model: Model, path: Path) -> list[Tensor]:
    sessions = [
        model.session(max_kv_size=40, policy="shift", discard=7, prefill_step=24),
        model.session(max_kv_size=60, policy="self_extend", group=4, window=16, prefill_step=24),
        model.session(max_kv_size=40, policy="archive", window=16, prefill_step=24),
    ]
    return [row for session in sessions for row in fed(session, 50)]


def in_a_group(model: Model, path: Path) -> list[Tensor]:
    parent = model.session(max_kv_size=40, prefill_step=24)
    parent.feed(IDS[:60])
    sessions = [parent.fork(), parent.fork(), model.session(kv_bits="8")]
    sessions[1].feed(IDS[3:9])
    sessions[2].feed(IDS[:30])
    group = SessionGroup(sessions)
    for _ in range(5):
        group.next_tokens(DRAWN)
    return [last(session) for session in sessions]


def edited(model: Model, path: Path) -> list[Tensor]:
    session = model.session(max_kv_size=80, prefill_step=24)
    session.feed(IDS[:60])
    session.pin(20, 25)
    session.delete(30, 36)
    session.insert(10, IDS[:5])
    session.replace(45, 50, IDS[60:63])
    session.feed(IDS[:40])
    session.rewind(3)
    session.keep = 9
    return fed(session, 30)


def compressed(model: Model, path: Path) -> list[Tensor]:
    statistics = calibrate(model, [IDS[i % 200] for i in range(3 * 512)])
    rows = []
    for method in METHODS:
        session = model.session(policy="full")
        session.cache.observe()
        session.feed(IDS[:60])
        session.compress(3.0, method, recent=8, calibration=statistics)
        rows += fed(session, 5)
    session = model.session(policy="full")
    session.feed(IDS[:60])
    session.compress(3.0, "fitted", recent=8, calibration=statistics)
    return [*rows, *fed(session, 5)]


def compressed_by_heads(model: Model, path: Path) -> list[Tensor]:
    rows = []
    path.mkdir(parents=True, exist_ok=True)
    for bits in (None, "8/4"):
        session = model.session(policy="full", kv_bits=bits)
        session.feed(IDS[:60])
        session.compress(2.0, "keydiff", recent=8, budget="heads")
        rows += fed(session, 30)
        for method, budget in (("knorm", "heads"), ("fitted", "uniform"), ("random", "uniform")):
            session.compress(1.5, method, recent=8, budget=budget)
            rows += fed(session, 5)
        session.snapshot().save(path / "heads.kvkeep")
        session = model.restore(Snapshot.load(path / "heads.kvkeep"))
        group = SessionGroup([session, session.fork()])
        group.next_tokens(DRAWN)
        rows += [last(each) for each in group.sessions]
    session = model.session(60, policy="archive", method="knorm", budget="heads", far_bits="8")
    return [*rows, *fed(session, 100)]


def saved_to_files(model: Model, path: Path) -> list[Tensor]:
    store = PrefixStore(path / "store")
    rows = []
    for codec in ("none", "zstd", "int8"):
        session = model.session(max_kv_size=140, store=store)
        session.feed(IDS)
        session.snapshot().save(path / f"{codec}.kvkeep", codec=codec)
        restored = model.restore(Snapshot.load(path / f"{codec}.kvkeep"))
        rows += fed(restored, 5)
    return rows


def fed(session: Session, count: int = 60) -> list[Tensor]:
    """Logits after a prompt in chunks, after single tokens, and after sampled ones."""
    session.feed(IDS[:count])
    rows = [last(session)]
    for token in IDS[:4]:
        session.feed([token])
        rows.append(last(session))
    for how in (Sampling(), DRAWN, DRAWN):
        session.next_token(how)
        rows.append(last(session))
    return rows


def last(session: Session) -> Tensor:
    logits = session.logits
    assert logits is not None
    assert logits.dtype is torch.float32
    return logits


WITH_KERNELS = [wrapping, in_few_bits, in_a_group]
WAYS = [*WITH_KERNELS, by_other_policies, edited, compressed, compressed_by_heads, saved_to_files]
SMALL = {"small": lambda: packed_model(spec_of(), 4), "small, by torch": small_model}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", SMALL.values(), ids=SMALL)
def test_sessions_are_bit_equal_under_any_torch_default(
    way: Callable[[Model, Path], list[Tensor]], model: Callable[[], Model], tmp_path: Path
) -> None:
    expected = way(model(), tmp_path / "none")
    for what in (*DTYPES, "meta"):
        same_under(what, way, model(), expected, tmp_path)


@pytest.mark.parametrize("way", WITH_KERNELS)
def test_sessions_of_the_default_model_are_bit_equal_under_any_torch_default(
    way: Callable[[Model, Path], list[Tensor]], smollm2: Model, tmp_path: Path
) -> None:
    expected = way(smollm2, tmp_path)
    for what in (torch.bfloat16, torch.float64, "meta"):
        same_under(what, way, smollm2, expected, tmp_path)


def same_under(
    what: torch.dtype | str,
    way: Callable[[Model, Path], list[Tensor]],
    model: Model,
    expected: list[Tensor],
    path: Path,
) -> None:
    with default(what):
        found = way(model, path / str(what))
    assert len(found) == len(expected)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), what


@pytest.mark.parametrize("what", [*DTYPES, "meta"], ids=str)
def test_defaults_do_not_change_how_a_model_is_loaded(
    what: torch.dtype | str, tmp_path: Path
) -> None:
    folder = str(write_small_folder(tmp_path / "model"))
    expected = fed(kvkeep.load_model(folder, dtype="float32").session(40))
    with default(what):
        loaded = kvkeep.load_model(folder, dtype="float32")
    for found in (
        fed(loaded.session(40)),
        fed(kvkeep.load_model(folder, dtype="float32").session(40)),
    ):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# Functions that create a tensor of the default dtype on the default device.
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def factory_calls() -> Iterator[tuple[str, ast.Call]]:
    root = Path(kvkeep.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and node.func.attr in FACTORIES
            ):
                yield f"{path.relative_to(root)}:{node.lineno} torch.{node.func.attr}", node


def test_every_new_tensor_has_an_explicit_dtype_and_device() -> None:
    calls = list(factory_calls())
    assert len(calls) > 20
    incomplete = [
        place
        for place, call in calls
        if not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]
    assert incomplete == []
