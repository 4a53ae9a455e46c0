"""Sessions whose cells are kept in 8 and 4 bits, under every policy."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model
from torch import Tensor

from kvkeep import SessionGroup
from kvkeep.cache import Bits
from kvkeep.cache.quantised import stored_tensors
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.store import PrefixStore
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import PolicyName
from tests.examples import examples

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(700)]
POLICIES = {
    "full": {},
    "sliding": {"max_kv_size": 48},
    "shift": {"max_kv_size": 48},
    "self_extend": {"group": 4, "window": 32},
    "archive": {"max_kv_size": 100, "method": "knorm"},
}
KINDS = [Bits(kv="8"), Bits(kv="8/4"), Bits(kv="4"), Bits(far="8"), Bits(far="4")]
EACH = [(p, k) for p in POLICIES for k in KINDS if p != "full" or k.kv]
NAMES = [f"{p}-{'kv' if k.kv else 'far'}-{k.kv or k.far}" for p, k in EACH]
each = pytest.mark.parametrize(("policy", "bits"), EACH, ids=NAMES)


def new(policy: str, bits: Bits, model: Model = MODEL) -> Session:
    options = {"prefill_step": 32, "kv_bits": bits.kv, "far_bits": bits.far}
    return model.session(policy=policy, **POLICIES[policy] | options)  # type: ignore[arg-type]


def fed(policy: str, bits: Bits, count: int = 150) -> Session:
    session = new(policy, bits)
    session.feed(TEXT[:count])
    return session


def with_restored_cells(session: Session) -> Session:
    """A session that keeps plain cells, which are what the quantised ones say that they are."""
    plain = copy.copy(session.fork())
    memory = plain.core.memory
    memory.bits, memory.cache.layout = Bits(), memory.cache.layout.plain
    memory.cache.far_layout = memory.cache.layout
    for segment in memory.cache.segments:
        segment.layout = memory.cache.layout
        segment.block = copy.copy(segment.block)
        segment.block.slots = segment.block.slots.dequantise(torch.float32)
    return plain


def require_kept_as_asked(session: Session, bits: Bits) -> None:
    for segment in session.cache.segments:
        layout = segment.layout
        assert layout == session.cache.layout_for(segment.is_anchor)
        slots = segment.block.slots
        assert slots.to_layout(layout) is slots
        assert slots.quantised == (segment.is_anchor or bits.kv is not None)


@pytest.mark.parametrize(("policy", "bits"), [e for e in EACH if e[0] != "self_extend"])
def test_the_next_step_attends_to_the_dequantised_cells(policy: str, bits: Bits) -> None:
    """Self-extend moves cells before each step, and quantises them once more."""
    session = fed(policy, bits)
    plain = with_restored_cells(session)
    assert not any(s.block.slots.quantised for s in plain.cache.segments)
    difference = session.score(TEXT[150:155]) - plain.score(TEXT[150:155])
    assert difference.abs().max() <= 1e-4
    assert (session.logits - plain.logits).abs().max() <= 1e-3


@each
def test_the_budget_holds_and_is_smaller(policy: str, bits: Bits) -> None:
    session, plain = new(policy, bits), new(policy, Bits())
    for first in range(0, 300, 75):
        session.feed(TEXT[first : first + 75])
        plain.feed(TEXT[first : first + 75])
        assert session.cache.cells == plain.cache.cells <= session.max_kv_size
        assert session.cache.nbytes < plain.cache.nbytes
        require_kept_as_asked(session, bits)
    if bits.kv and policy in ("sliding", "shift"):
        assert session.cache.nbytes == 48 * session.cache.layout.cell_bytes


@each
def test_edits_pins_rewinds_and_keep_work_as_with_unquantised_cells(
    policy: str, bits: Bits
) -> None:
    session, plain = fed(policy, bits), fed(policy, Bits())
    for one in (session, plain):
        if policy != "self_extend":
            one.delete(130, 134)
            one.insert(135, TEXT[:3])
        if policy not in ("full", "self_extend"):
            one.pin(138, 142)
            one.feed(TEXT[:9])
            one.unpin(138, 142)
        if policy in ("sliding", "shift"):
            one.keep = 9
            one.keep = 2
        one.rewind(4)
        one.feed(TEXT[200:240])
        one.next_token()
    assert session.cache.serials() == plain.cache.serials()
    assert [s.position_map for s in session.cache.segments] == [
        s.position_map for s in plain.cache.segments
    ]
    require_kept_as_asked(session, bits)


@each
def test_forks_and_parent_are_independent(policy: str, bits: Bits) -> None:
    session, beside = fed(policy, bits), fed(policy, bits)
    fork, other = session.fork(), session.fork()
    fork.feed(TEXT[300:340])
    fork.next_token()
    assert torch.equal(session.logits, beside.logits)
    for one in (session, beside):
        one.feed(TEXT[400:420])
        one.next_token()
    assert torch.equal(session.logits, beside.logits)
    other.feed(TEXT[300:340])
    other.next_token()
    assert torch.equal(other.logits, fork.logits)


@each
def test_a_snapshot_holds_every_byte(policy: str, bits: Bits, tmp_path: Path) -> None:
    session = fed(policy, bits)
    size = session.snapshot().save(tmp_path / "a.kvkeep", codec="zstd")
    loaded = Snapshot.load(tmp_path / "a.kvkeep")
    assert loaded.bits == bits
    assert size < session.cache.nbytes + 40_000
    found = MODEL.restore(loaded)
    assert found.bits == bits
    require_kept_as_asked(found, bits)
    for mine, theirs in zip(session.cache.segments, found.cache.segments, strict=True):
        one, other = mine.read(0, mine.length), theirs.read(0, theirs.length)
        pairs = (
            *zip(stored_tensors(one.stored_keys), stored_tensors(other.stored_keys), strict=True),
            *zip(
                stored_tensors(one.stored_values), stored_tensors(other.stored_values), strict=True
            ),
        )
        assert all(torch.equal(x, y) for x, y in pairs)
    for _ in range(20):
        assert session.next_token() == found.next_token()
        assert torch.equal(session.logits, found.logits)


@settings(max_examples=examples(12))
@given(
    st.sampled_from(EACH),
    st.lists(
        st.tuples(
            st.sampled_from(["feed", "write", "rewind", "fork", "delete", "snapshot"]),
            st.integers(1, 40),
        ),
        max_size=8,
    ),
)
def test_which_cells_are_held_never_depends_on_bits(
    kind: tuple[str, Bits], actions: list[tuple[str, int]]
) -> None:
    policy, bits = kind
    sessions = [new(policy, bits), new(policy, Bits())]
    for action, amount in actions:
        refused = []
        for index, session in enumerate(sessions):
            try:
                if action == "feed":
                    session.feed(TEXT[:amount])
                elif action == "write" and session.logits is not None:
                    session.feed([amount])
                elif action == "rewind":
                    session.rewind(amount)
                elif action == "delete":
                    session.delete(max(0, len(session.tokens) - amount), len(session.tokens) - 1)
                elif action == "fork":
                    sessions[index] = session.fork()
                elif action == "snapshot":
                    sessions[index] = MODEL.restore(session.snapshot())
            except InvalidArgument:
                refused.append(index)
        assert refused in ([], [0, 1])
    quantised, plain = (session.cache for session in sessions)
    assert quantised.serials() == plain.serials()
    assert quantised.nbytes <= plain.nbytes
    require_kept_as_asked(sessions[0], bits)


def test_sessions_with_different_bits_decode_in_one_group() -> None:
    kinds = [("full", Bits(kv="8")), ("full", Bits(kv="4")), ("sliding", Bits(far="4"))]
    made = [fed(*kind) for kind in kinds]
    sessions = [*made, made[0].fork(), made[2].fork(), fed("full", Bits())]
    sessions[3].feed(TEXT[5:9])
    alone = [session.fork() for session in sessions]
    group = SessionGroup(sessions)
    storage = sum(session.cache.nbytes for session in sessions)
    assert group.nbytes < storage
    tokens = group.next_tokens()
    for token, session, other in zip(tokens, sessions, alone, strict=True):
        assert token == other.next_token()
        assert session.cache.serials() == other.cache.serials()


@pytest.mark.parametrize("bits", ["8", "4"])
def test_a_quantised_session_can_be_compressed(bits: str) -> None:
    session = fed("full", Bits(kv=bits), 400)
    before = session.cache.nbytes
    report = session.compress(4, method="knorm", recent=16)
    assert report.bytes_before == before
    assert session.cache.nbytes == report.bytes_after < before
    require_kept_as_asked(session, Bits(kv=bits))
    session.feed(TEXT[:5])
    session.next_token()


@pytest.mark.parametrize("how", [{"policy": "full", "kv_bits": "8"}, {"far_bits": "8"}])
def test_a_prefix_store_makes_no_difference(how: dict[str, Any], tmp_path: Path) -> None:
    """Prompts that are cut into the same steps give the same bits."""
    store = PrefixStore(tmp_path / "store")
    alone, first, second = (MODEL.session(640, store=each, **how) for each in (None, store, store))
    first.feed(TEXT[:600])
    assert store.nbytes == 0
    MODEL.session(640, store=store).feed(TEXT[:600])
    held = store.nbytes
    assert second.feed(TEXT[:600]).reused == 0
    alone.feed(TEXT[:600])
    assert store.nbytes == held > 0
    assert torch.equal(first.logits, alone.logits)
    assert torch.equal(second.logits, alone.logits)


def after(step: int, count: int = 300, **settings: Any) -> Tensor:
    """Logits behind a prompt that was read in steps of so many tokens."""
    session = MODEL.session(prefill_step=step, **settings)
    session.feed([(i * i * 7 + 3 * i) % 250 + 1 for i in range(count)])
    assert session.logits is not None
    return session.logits


@pytest.mark.parametrize("bits", ["8", "8/4", "4"])
@pytest.mark.parametrize("policy", ["full", "sliding", "shift"])
def test_with_kv_bits_results_depend_on_the_prefill_step(policy: PolicyName, bits: str) -> None:
    plain, quantised = ({"policy": policy, "max_kv_size": 400, "kv_bits": b} for b in (None, bits))
    assert (after(7, **plain) - after(64, **plain)).abs().max() <= 1e-4
    assert (after(7, **quantised) - after(64, **quantised)).abs().max() > 1e-2
    assert torch.equal(after(300, **quantised), after(512, **quantised))  # cut alike


@pytest.mark.parametrize(("keep", "depends"), [(4, False), (40, True)])
def test_with_far_bits_results_depend_on_the_prefill_step(keep: int, depends: bool) -> None:
    settings = {"max_kv_size": 200, "keep": keep, "far_bits": "8"}
    assert bool((after(7, **settings) - after(64, **settings)).abs().max() > 1e-3) is depends


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bits": "5"}, 'kv_bits must be one of "8", "8/4", "4"; found \'5\''),
        ({"far_bits": "16"}, "far_bits must be one of"),
        ({"kv_bits": 16}, 'kv_bits must be one of "8", "8/4", "4"; found \'16\''),
        ({"kv_bits": True}, "found True"),
        ({"kv_bits": torch.tensor(8.0)}, "found tensor"),
        ({"kv_bits": "8", "far_bits": "4"}, "use only one of them"),
        ({"far_bits": "8", "policy": "full"}, 'policy "full" has none: use kv_bits'),
    ],
)
def test_unknown_bits_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        MODEL.session(64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [8, 4, np.int64(8), torch.tensor(4)])
def test_bits_may_be_integers(bits: Any) -> None:
    for session in (MODEL.session(64, kv_bits=bits), MODEL.session(64, bits=Bits(kv=bits))):
        assert session.bits == Bits(kv=str(int(bits)))
    assert MODEL.session(64, far_bits=bits).bits == Bits(far=str(int(bits)))


@pytest.mark.extended
def test_perplexity_of_the_real_model_hardly_rises_with_fewer_bits(smollm2: Model) -> None:
    """Measured in steps of 128 and token by token: docs/compression-measurements.md."""
    from topics import topic_ids

    ids = topic_ids(smollm2)[:500]
    scores = {}
    for bits in (None, "8", "8/4", "4"):
        session = smollm2.session(policy="full", prefill_step=100, kv_bits=bits)
        scores[bits] = -float(session.score(ids)[100:].mean())
    for bits, most in (("8", 0.005), ("8/4", 0.02), ("4", 0.05)):
        assert scores[bits] - scores[None] <= most
