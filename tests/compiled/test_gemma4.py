"""Gemma 4 on each instruction set: heads of two widths, cells that are looked at by several layers,
what comes behind the MLP, and experts beside it."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled.test_decoding import by_torch_of, forked, last, logits_of
from gguf import GGMLQuantizationType as Type
from models.gguf_kinds import TOKENS, random_model
from models.gguf_writing import write
from packed_model import packed_model, routed_by_tokens, spec_of
from sanitizers import SANITIZED
from torch import Tensor

from kvkeep import SessionGroup, Snapshot, load_model
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor, unsupported_reason
from kvkeep.compiled.matrices import MAX_KERNEL_ROWS
from kvkeep.model import Model
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

KINDS = [("gemma4", 64), ("gemma4-alone", 512), ("gemma4-experts", 128)]
SETTINGS: list[dict[str, Any]] = [
    {"policy": "full"},
    {"max_kv_size": 64, "keep": 5, "prefill_step": 50},
    {"max_kv_size": 90, "kv_bits": "8", "prefill_step": 50},
    {"max_kv_size": 90, "kv_bits": "4"},
]


WIDTHS = (None, 8, 4)
CASES = [  # each two of kind and settings, and each two of kind and width
    (*KINDS[kind], WIDTHS[width], settings)
    for kind, width in itertools.product(range(3), range(3))
    for number, settings in enumerate(SETTINGS)
    if (kind + width + number) % 3 == 0 and (number in (1, 2) or not SANITIZED)
]


@pytest.mark.parametrize(("family", "head_dim", "bits", "settings"), CASES, ids=str)
def test_logits_are_as_near_to_float32_as_torch_in_bfloat16(
    family: str, head_dim: int, bits: int | None, settings: dict[str, Any]
) -> None:
    model = packed_model(spec_of(head_dim, family), bits)  # type: ignore[arg-type]
    assert isinstance(model.decoder.executor, CompiledExecutor)
    exact, rounded = by_torch_of(head_dim, family, bits, settings)
    reference = (rounded - exact).square().mean()
    compiled = (logits_of(model, settings) - exact).square().mean()
    assert exact.abs().max() > 2
    assert compiled <= 1.2 * reference


def fed(model: Model, **settings: Any) -> Session:
    session = model.session(**settings)
    session.feed([i % 250 + 1 for i in range(130)])
    return session


@pytest.mark.parametrize("kv_bits", [None, "8/4"])
@pytest.mark.parametrize(("family", "head_dim"), KINDS)
def test_a_group_gives_the_same_bits_as_each_session_alone(
    family: str, head_dim: int, kv_bits: str | None
) -> None:
    model = packed_model(spec_of(head_dim, family), 4)
    together, alone = (forked(fed(model, max_kv_size=100, kv_bits=kv_bits), 5) for _ in range(2))
    group = SessionGroup(together)
    for _ in range(4):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(last(one), last(other))


@pytest.mark.parametrize(("family", "head_dim"), KINDS)
def test_logits_are_the_same_on_any_number_of_threads(family: str, head_dim: int) -> None:
    model = packed_model(spec_of(head_dim, family), 4)
    threads, actual = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            # In steps that kernels alone multiply: the library may split long sums among threads.
            options = {"max_kv_size": 40, "kv_bits": "8", "prefill_step": MAX_KERNEL_ROWS}
            actual.append(logits_of(model, options, 4))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(actual[0], actual[1])
    assert torch.equal(actual[0], actual[2])


@pytest.mark.parametrize(("family", "head_dim"), KINDS)
def test_a_restored_snapshot_continues_with_the_same_bits(
    family: str, head_dim: int, tmp_path: Path
) -> None:
    model = packed_model(spec_of(head_dim, family), 4)
    session, path = fed(model, max_kv_size=90), tmp_path / "one.kvkeep"
    session.snapshot().save(path)
    again = model.restore(Snapshot.load(path))
    for _ in range(9):
        assert again.next_token() == session.next_token()
        assert torch.equal(last(again), last(session))


def written_by(model: Model) -> Tensor:
    """Return the logits after a prompt and after each of some generated tokens, `[n, vocab]`."""
    session = model.session(policy="full")
    session.feed(TOKENS[:40])
    rows = [last(session)]
    for token in TOKENS[40:]:
        session.score([token], token_by_token=True)
        rows.append(last(session))
    return torch.stack(rows)


# Others before releases.
FILES = [("gemma4", Type.Q4_0), ("gemma4", Type.Q8_0), ("gemma4", Type.BF16)]
FILES += [("gemma4-alone", Type.BF16), ("gemma4-experts", Type.Q4_0)]


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        pytest.param(kind, stored, marks=() if (kind, stored) in FILES else pytest.mark.slow)
        for kind in ("gemma4", "gemma4-alone", "gemma4-experts")
        for stored in (Type.Q4_0, Type.Q8_0, Type.BF16)
    ],
)
def test_a_gguf_file_decodes_as_near_to_float32_as_by_torch(
    kind: str, stored: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of per-layer embeddings is packed, too."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    theirs = random_model(kind)
    if kind == "gemma4-experts":
        routed_by_tokens(theirs.state_dict(), 0.15)
    path = str(write(tmp_path / "m.gguf", kind, theirs, stored))
    model = load_model(path)
    assert isinstance(model.decoder.executor, CompiledExecutor)
    actual = written_by(model)
    exact = written_by(load_model(path, dtype="float32"))
    monkeypatch.setenv("KVKEEP_COMPILED", "0")
    rounded = written_by(load_model(path))
    error = (rounded - exact).square().mean()
    assert (actual - exact).square().mean() <= 1.2 * error


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"local_head_dim": 48}, r"support head_dim .*, not 48"),
        ({"per_layer_size": 40}, "multiples of 32"),
        ({"intermediate_size": 330}, "multiples of 32"),
    ],
)
def test_unsupported_models_are_reported_with_the_reason(changes: dict[str, Any], why: str) -> None:
    spec = spec_of(64, "gemma4")
    layout = packed_model(spec, None).decoder.new_cache().layout
    assert not unsupported_reason(spec, layout)
    if "local_head_dim" in changes:
        half = tuple(100.0 ** (-i / 24) for i in range(24))
        changes = {**changes, "local_rope": replace(spec.rope, inverse_frequencies=half)}
    assert re.search(why, unsupported_reason(replace(spec, **changes), layout))
