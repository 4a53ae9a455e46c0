"""Prefix stores of models with local layers or states: prompts continue from stored checkpoints."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_actions import LOCAL_MODEL, loud_model
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import local_spec, small_model, state_specs

from kvkeep.model import Model
from kvkeep.session.session import Session
from kvkeep.storage.prefixes.checkpoint import CHECKPOINT_FORMAT, CHECKPOINT_KIND
from kvkeep.storage.prefixes.inventory import (
    StoredBlock,
    StoredFile,
    kept_checkpoint_ends,
    prompts_of,
    stored_prompts,
    surplus_checkpoints,
)
from kvkeep.storage.prefixes.store import PrefixStore
from kvkeep.storage.snapshots.container import read_container, write_container
from tests.examples import examples

WIDE_MODEL = loud_model(local_spec(window=200))  # whose windows are larger than a step
STATE_MODELS = {kind: small_model(spec=spec) for kind, spec in state_specs().items()}
MODELS = {"local": LOCAL_MODEL, "wide": WIDE_MODEL, **STATE_MODELS}
EXTENDED = ("local", "convolution", "mamba2")
SETTINGS: dict[str, Any] = {"policy": "full", "max_kv_size": 3000, "prefill_step": 128}


def text(count: int, seed: int = 7) -> list[int]:
    return [(i * i * seed + 3 * i) % 250 + 1 for i in range(count)]


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else ())
        for name in MODELS
    ]
)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def fed(model: Model, ids: list[int], folder: Path | None, **settings: Any) -> tuple[Session, int]:
    """Return a session that was fed a prompt, as a new process would, and what it reused."""
    store = None if folder is None else PrefixStore(folder)
    session = model.session(**{**SETTINGS, **settings}, store=store)
    report = session.feed(ids)
    assert report.store_error is None
    return session, report.reused


def reused(model: Model, ids: list[int], folder: Path, **settings: Any) -> int:
    """Require that a store changes no bit of what follows a prompt; return what was reused."""
    session, count = fed(model, ids, folder, **settings)
    fresh, _ = fed(model, ids, None, **settings)
    for _ in range(5):
        assert torch.equal(session.logits, fresh.logits)
        assert session.next_token() == fresh.next_token()
    return count


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the checkpoints of the only stored prompt, the oldest first."""
    (prompt,) = stored_prompts(folder)
    return [Path(b.checkpoint.location) for b in prompt.blocks if b.checkpoint is not None]


def rewrite(path: Path, document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Change a checkpoint's file, and give it correct checksums."""
    content = read_container(path, CHECKPOINT_KIND, CHECKPOINT_FORMAT)
    changed = {**content.tensors, **tensors}
    write_container(
        path, CHECKPOINT_KIND, CHECKPOINT_FORMAT, {**content.document, **document}, changed
    )


def test_a_stored_prompt_continues_from_its_newest_checkpoint_to_the_bit(
    model: Model, tmp_path: Path
) -> None:
    assert reused(model, text(1000), tmp_path) == 0
    assert reused(model, text(1000), tmp_path) == 768
    assert reused(model, text(700) + text(300, 11), tmp_path) == 512, "another last question"
    assert reused(model, text(1000) + text(300, 11), tmp_path) == 768, "the next turn"
    assert reused(model, text(1000) + text(300, 11), tmp_path) == 1280


def test_a_beginning_that_several_prompts_share_gets_a_checkpoint(
    model: Model, tmp_path: Path
) -> None:
    """A system prompt is evaluated twice at most, and its checkpoint is not thinned."""
    system = text(600)
    counts = [reused(model, system + text(500, seed), tmp_path) for seed in (11, 13, 17)]
    assert counts == [0, 512, 512], "near the end of the first prompt there is one anyway"
    assert reused(model, system + text(1300, 11), tmp_path) == 1024
    assert fed(model, system + text(100, 23), tmp_path)[1] == 512, "it was not thinned"


def test_a_short_beginning_that_prompts_share_is_evaluated_twice(
    model: Model, tmp_path: Path
) -> None:
    counts = [fed(model, text(300) + text(900, seed), tmp_path)[1] for seed in (11, 13, 17)]
    assert counts == [0, 0, 256]


def test_lost_and_damaged_checkpoints_degrade_to_earlier_ones(model: Model, tmp_path: Path) -> None:
    ids = text(1100)
    fed(model, ids, tmp_path)
    files = checkpoint_files(tmp_path)
    original = [path.read_bytes() for path in files]
    damages = [(768, b"not a checkpoint"), (512, original[0]), (0, original[0][:-70])]
    for (end, damage), path in zip(damages, reversed(files), strict=True):
        path.write_bytes(damage)
        feeding = model.session(**SETTINGS, store=PrefixStore(tmp_path)).feeding(ids)
        assert next(feeding).done == end or not end
        assert feeding.report.reused == end
        feeding.close()
    for path in files:
        path.unlink()
    assert reused(model, ids, tmp_path) == 0
    assert reused(model, ids, tmp_path) == 1024, "they were stored again"


def test_a_block_that_is_lost_makes_later_checkpoints_unusable(
    model: Model, tmp_path: Path
) -> None:
    ids = text(1100)
    fed(model, ids, tmp_path)
    (prompt,) = stored_prompts(tmp_path)
    os.unlink(prompt.blocks[2].location)
    assert reused(model, ids, tmp_path) == 512
    assert fed(model, ids, tmp_path)[1] == 1024


def test_crafted_checkpoints_are_not_used(model: Model, tmp_path: Path) -> None:
    ids = text(300)
    fed(model, ids, tmp_path)
    (path,) = checkpoint_files(tmp_path)
    original = path.read_bytes()
    content = read_container(path, CHECKPOINT_KIND, CHECKPOINT_FORMAT)
    entries = content.document["segments"]
    changed: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = [
        ({"tokens": 255}, {}),
        ({"tokens": "256"}, {}),
        ({"segments": "x"}, {}),
        ({"segments": [*entries, {}]}, {}),
        ({"key": "0" * 32}, {}),
        ({}, {"recurrent.layers.9.conv": torch.zeros(2, 2)}),
    ]
    for name, tensor in content.tensors.items():
        changed.append(({}, {name: torch.cat((tensor, tensor))}))
        if tensor.is_floating_point() and not name.startswith("segment"):
            changed.append(({}, {name: torch.full_like(tensor, torch.nan)}))
        if not tensor.is_floating_point():  # serials and positions of the window
            changed.append(({}, {name: tensor.flip(0)}))
            changed.append(({}, {name: tensor + 1}))
    for entry in entries:
        for field in ({"limit": 4000}, {"frozen": True}, {"sealed": True}, {"start": 1}):
            changed.append(({"segments": [{**entry, **field}]}, {}))
        changed.append(({"segments": [{**entry, "map": {"group": 1, "offset": -1}}]}, {}))
    if entries:
        changed.append(({"segments": []}, {}))
    for document, tensors in changed:
        path.write_bytes(original)
        rewrite(path, document, tensors)
        session = model.session(**SETTINGS, store=PrefixStore(tmp_path))
        feeding = session.feeding(ids)
        assert next(feeding).done == 128, (document, list(tensors))
        feeding.close()
    path.write_bytes(original)
    assert reused(model, ids, tmp_path) == 256


@pytest.mark.parametrize("name", ["wide", "delta_net"])
def test_a_growing_chat_keeps_few_checkpoints(name: str, tmp_path: Path) -> None:
    model, previous = MODELS[name], 0
    for count in range(300, 2300, 300):
        assert fed(model, text(count), tmp_path)[1] == previous // 256 * 256
        previous = count
        (prompt,) = stored_prompts(tmp_path)
        assert prompt.checkpoint_ends == kept_checkpoint_ends(count, 256)
    assert len(prompt.checkpoint_ends) == 4


def test_the_quota_counts_checkpoints(tmp_path: Path) -> None:
    model, sizes = WIDE_MODEL, list[int]()
    fed(model, text(1100), tmp_path)
    total = PrefixStore(tmp_path).nbytes
    assert total == sum(path.stat().st_size for path in tmp_path.glob("*.kv*"))
    store = PrefixStore(tmp_path / "small", max_bytes=total // 2)
    for seed in (7, 11, 13):
        for _ in range(2):
            session = model.session(**SETTINGS, store=store)
            session.feed(text(1100, seed))
            sizes.append(store.nbytes)
            for checkpoint in store.path.glob("*.kvcheckpoint"):
                assert checkpoint.with_suffix(".kvblock").exists()
    assert max(sizes) <= store.max_bytes
    assert fed(model, text(1100, 13), store.path)[1] > 0
    store.gc(0)
    assert store.nbytes == 0


@pytest.mark.parametrize("name", ["wide", "delta_net"])
@pytest.mark.parametrize(("step", "count"), [(64, 768), (512, 512), (384, 768)])
def test_checkpoints_are_at_ends_of_steps(name: str, step: int, count: int, tmp_path: Path) -> None:
    model = MODELS[name]
    assert [reused(model, text(900), tmp_path, prefill_step=step) for _ in range(2)] == [0, count]


def test_a_prefill_step_that_shares_no_end_with_blocks_is_reported(tmp_path: Path) -> None:
    session = LOCAL_MODEL.session(max_kv_size=3000, prefill_step=100, store=PrefixStore(tmp_path))
    assert "choose a power of two" in (session.feed(text(300)).store_error or "")


@pytest.mark.parametrize("policy", ["sliding", "shift"])
def test_bounded_sessions_reuse_what_they_hold(model: Model, policy: str, tmp_path: Path) -> None:
    settings = {"policy": policy, "max_kv_size": 600}
    assert [reused(model, text(900), tmp_path, **settings) for _ in range(2)] == [0, 512]
    session, count = fed(model, text(900), tmp_path)  # without a bound, and equal to rounding
    assert count == 512
    torch.testing.assert_close(
        session.logits, fed(model, text(900), None)[0].logits, atol=1e-3, rtol=1e-3
    )


def test_windows_of_another_size_are_not_used(tmp_path: Path) -> None:
    """A budget below the window and its spare cells makes windows smaller."""
    fed(WIDE_MODEL, text(300), tmp_path)
    session, count = fed(WIDE_MODEL, text(300), tmp_path, policy="sliding", max_kv_size=310)
    assert count == 0
    fresh, _ = fed(WIDE_MODEL, text(300), None, policy="sliding", max_kv_size=310)
    assert torch.equal(session.logits, fresh.logits)


def test_a_session_from_the_store_can_go_back_to_its_checkpoint(
    model: Model, tmp_path: Path
) -> None:
    fed(model, text(700), tmp_path)
    session, count = fed(model, [*text(700), 5, 6], tmp_path)
    assert session.checkpoints[0] == count
    begun, fresh = session.beginning(count), fed(model, text(count), None)[0]
    for each in (begun, fresh):
        each.feed(text(100, 11))
    assert torch.equal(begun.logits, fresh.logits)


def test_checkpoints_without_blocks_are_no_prompts(tmp_path: Path) -> None:
    for name in ("root-a.kvblock", "root-a.kvcheckpoint", "a-b.kvcheckpoint"):
        (tmp_path / name).write_bytes(b"x" * 10)
    (prompt,) = stored_prompts(tmp_path)
    assert (prompt.token_count, prompt.nbytes, prompt.checkpoint_ends) == (256, 20, [256])
    assert prompts_of([replace(prompt.blocks[0], checkpoint=None)])[0].checkpoint_ends == []


def test_checkpoints_that_no_prompt_keeps_are_surplus() -> None:
    """Prompts of 6 and of 4 blocks that branch after the first; each block has a checkpoint."""

    def block(parent: str, key: str) -> StoredBlock:
        return StoredBlock(
            *(StoredFile(parent, key, x, f"{key}{x}", 1, 0.0) for x in (False, True))
        )

    chains = ("0", "1", "2", "3", "4", "5"), ("0", "a", "b", "c")
    pairs = {pair for chain in chains for pair in itertools.pairwise(("root", *chain))}
    prompts = prompts_of(block(*pair) for pair in sorted(pairs))
    assert {file.key for file in surplus_checkpoints(prompts)} == {"1", "2"}


@pytest.mark.extended
@settings(max_examples=examples(6), deadline=None)
@given(
    name=st.sampled_from(["wide", "delta_net"]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["feed", "feed", "lose", "damage", "swap"]),
            st.integers(0, 1300),
            st.integers(0, 3),
        ),
        min_size=3,
        max_size=8,
    ),
)
def test_whatever_is_lost_a_prompt_is_evaluated_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, name: str, actions: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    fed(MODELS[name], text(1000), folder)
    for kind, place, seed in actions:
        files = sorted(folder.glob("*.kv*"))
        if kind == "feed":
            reused(MODELS[name], text(place + 1) + text(1300 - place, seed + 11), folder)
        elif files and kind == "lose":
            files[place % len(files)].unlink()
        elif files and kind == "damage":
            path = files[place % len(files)]
            path.write_bytes(path.read_bytes()[: -1 - seed])
        elif files:
            files[place % len(files)].write_bytes(files[seed % len(files)].read_bytes())


@given(st.integers(0, 400), st.integers(0, 400))
def test_a_longer_prompt_needs_no_other_checkpoints_of_its_beginning(first: int, more: int) -> None:
    kept, longer = kept_checkpoint_ends(first, 1), kept_checkpoint_ends(first + more, 1)
    assert {end for end in longer if end <= first} <= set(kept)
    assert len(longer) <= (first + more).bit_length() + 1
    for place in range(first):  # what is evaluated again is less than twice the distance
        nearest = max((end for end in kept if end <= place), default=0)
        assert place - nearest <= 2 * (first - place)
