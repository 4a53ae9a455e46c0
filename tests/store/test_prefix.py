"""The prefix store: KV blocks of prompt prefixes, shared by processes, within a quota."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from small_models import small_model, write_small_folder
from store.prefill import prompt
from topics import topic_ids

from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.loader import load_model
from kvkeep.model import Model
from kvkeep.storage.files.atomic import TEMPORARY_PREFIX
from kvkeep.storage.prefixes import store as prefix_store
from kvkeep.storage.prefixes.inventory import BLOCK_FORMAT, BLOCK_KIND, BLOCK_TOKENS
from kvkeep.storage.prefixes.store import PrefixStore
from kvkeep.storage.snapshots.container import read_container, write_container

MODEL = small_model()
SCRIPT = Path(__file__).with_name("prefill.py")
LAYOUT = MODEL.session().cache.layout
BLOCK_BYTES = BLOCK_TOKENS * LAYOUT.cell_bytes
FILE_BYTES = BLOCK_BYTES + 8192


def random_cells(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = (LAYOUT.layers, LAYOUT.kv_heads, BLOCK_TOKENS, LAYOUT.head_dim)
    return torch.randn(shape, generator=random), torch.randn(shape, generator=random)


def add_whole_blocks(store: PrefixStore, tokens: list[int]) -> list[bool]:
    """Add every whole block of a prompt with random cells. Returns which were stored."""
    ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    return [add_last_block(store, tokens[:end]) for end in ends]


def add_last_block(store: PrefixStore, tokens: list[int]) -> bool:
    """Add the last block of a prompt with random cells. Returns whether it was stored."""
    stored = store.add(
        MODEL.fingerprint, tokens, len(tokens) - BLOCK_TOKENS, [random_cells(len(tokens))]
    )
    return stored == len(tokens)


def start_process(*arguments: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(SCRIPT), *map(str, arguments)])


def folder_size(folder: Path) -> int:
    """Return the bytes of all files in a folder, including temporary ones."""
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


# Sharing between processes


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_folder(tmp_path_factory.mktemp("small"))


def test_a_later_process_reuses_the_prefix_of_an_earlier_one(
    small_folder: Path, tmp_path: Path
) -> None:
    store, out = tmp_path / "store", tmp_path / "first.pt"
    assert start_process(small_folder, "float32", store, 10**9, 0, 3000, out).wait() == 0
    first, model = torch.load(out), load_model(str(small_folder), dtype="float32")
    assert first["reused"] == 0
    second = model.session(policy="full", store=PrefixStore(store))
    assert second.feed(prompt(0, 3000)).reused >= 2816
    without_store = model.session(policy="full")
    without_store.feed(prompt(0, 3000))
    assert torch.equal(first["logits"], without_store.logits)
    assert (second.logits - without_store.logits).abs().max() <= 1e-4


def test_several_processes_can_add_blocks_concurrently(small_folder: Path, tmp_path: Path) -> None:
    store, quota = tmp_path / "store", 100 * FILE_BYTES
    outs = [tmp_path / f"{i}.pt" for i in range(3)]
    running = [
        start_process(small_folder, "float32", store, quota, i % 2, 1100, out)
        for i, out in enumerate(outs)
    ]
    assert [child.wait() for child in running] == [0] * 3
    match = PrefixStore(store).find(MODEL.fingerprint, prompt(0, 1100))
    assert match.token_count == 1024
    assert len(list(store.glob("*.kvblock"))) == 8
    logits = [torch.load(outs[i])["logits"] for i in (0, 2)]
    assert (logits[0] - logits[1]).abs().max() <= 1e-4


@pytest.mark.slow
def test_the_real_model_in_bfloat16_differs_by_rounding_only(
    smollm2: Model, tmp_path: Path
) -> None:
    ids, store = topic_ids(smollm2)[:3000], PrefixStore(tmp_path)
    without_store = smollm2.session(policy="full")
    without_store.feed(ids)
    smollm2.session(policy="full", store=store).feed(ids[:2900])
    reusing = smollm2.session(policy="full", store=store)
    assert reusing.feed(ids).reused == 2816
    difference = (without_store.logits - reusing.logits).abs().max()
    expected, actual = (s.logits.double().log_softmax(-1) for s in (without_store, reusing))
    divergence = float((expected.exp() * (expected - actual)).sum())
    print(f"largest difference {difference:.3f}, KL {divergence:.2e}")
    assert difference <= 1.0  # logits reach 40; chunks begin elsewhere, and bfloat16 rounds
    assert divergence <= 5e-3


# Lookups


@pytest.mark.parametrize("policy", ["full", "sliding", "shift"])
def test_a_session_that_reused_a_prefix_continues_like_one_that_did_not(
    tmp_path: Path, policy: str
) -> None:
    store, ids = PrefixStore(tmp_path), prompt(3, 1000)
    MODEL.session(policy=policy, store=store).feed(ids)
    session, without_store = MODEL.session(policy=policy, store=store), MODEL.session(policy=policy)
    ids += prompt(4, 100)
    report = session.feed(ids)
    without_store.feed(ids)
    assert report.reused == 768
    assert (session.logits - without_store.logits).abs().max() <= 1e-4
    for _ in range(20):
        assert session.next_token() == without_store.next_token()


def test_at_least_one_token_is_evaluated_for_its_logits(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(3, 512)
    for expected in (0, 256):
        session = MODEL.session(store=store)
        assert session.feed(ids).reused == expected
        assert session.logits is not None


def test_a_match_reports_the_token_at_which_prompts_differ(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 1024)
    add_whole_blocks(store, ids)
    other = [*ids[:700], 1 + ids[700] % 255, *ids[701:]]
    assert store.find(MODEL.fingerprint, other).token_count == 512
    assert store.find(MODEL.fingerprint, other).differs_at == 700
    assert store.differs_at(MODEL.fingerprint, other) == (512, 700)
    assert store.find(MODEL.fingerprint, ids).differs_at is None
    assert store.find(MODEL.fingerprint, [255, *ids]).differs_at == int(ids[0] == 255)
    longer = ids + prompt(6, 300)
    assert store.find(MODEL.fingerprint, longer).differs_at == 1024
    report = MODEL.session(store=store).feed(other)
    assert (report.reused, report.differs_at) == (512, 700)


def test_the_longest_common_prefix_of_several_prompts_is_reported(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 256)
    for changed in (10, 90, 40):
        add_whole_blocks(store, [*ids[:changed], 1 + ids[changed] % 255, *ids[changed + 1 :]])
    assert store.differs_at(MODEL.fingerprint, ids) == (0, 90)


def test_a_miss_is_compared_with_the_prompts_used_last(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 256)
    for age, changed in enumerate((60, 20, 30, 10, 90, 40)):
        known = set(tmp_path.glob("*.kvblock"))
        add_whole_blocks(store, [*ids[:changed], 1 + ids[changed] % 255, *ids[changed + 1 :]])
        (block,) = set(tmp_path.glob("*.kvblock")) - known
        os.utime(block, (1000 - age, 1000 - age))
    assert store.find(MODEL.fingerprint, ids).differs_at == 60
    assert store.differs_at(MODEL.fingerprint, ids) == (0, 60)


def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 600)
    add_whole_blocks(store, ids)
    assert store.find(small_model(seed=1).fingerprint, ids).token_count == 0


def test_tokens_are_compared_in_addition_to_the_key(tmp_path: Path) -> None:
    """The stored tokens are changed, as if two prompts had the same hash."""
    store, ids = PrefixStore(tmp_path), prompt(5, 256)
    add_whole_blocks(store, ids)
    others = torch.tensor(prompt(6, 256), dtype=torch.int32)
    rewrite_block(only_block(tmp_path), tokens=others)
    assert store.find(MODEL.fingerprint, ids).token_count == 0


def only_block(folder: Path) -> Path:
    (file,) = (path for path in folder.glob("*.kvblock") if path.is_file())
    return file


def rewrite_block(
    file: Path, document: dict[str, object] | None = None, **tensors: torch.Tensor
) -> None:
    """Write a block again, validly, with another document or with some tensors replaced."""
    content = read_container(file, BLOCK_KIND, BLOCK_FORMAT)
    write_container(
        file, BLOCK_KIND, BLOCK_FORMAT, document or content.document, {**content.tensors, **tensors}
    )


def test_a_block_computed_after_other_tokens_is_not_found(tmp_path: Path) -> None:
    """The block's own tokens match, but its cells attended to other tokens before them."""
    store, same_tokens = PrefixStore(tmp_path), prompt(5, BLOCK_TOKENS)
    first_prompt, second_prompt = (
        prompt(6, BLOCK_TOKENS) + same_tokens,
        prompt(7, BLOCK_TOKENS) + same_tokens,
    )
    for ids in (first_prompt, second_prompt):
        add_whole_blocks(store, ids)
    first, second = (
        sorted(tmp_path.glob("*.kvblock"), key=lambda path: -path.stat().st_mtime_ns)[index]
        for index in (1, 3)
    )
    contents = first.read_bytes(), second.read_bytes()
    for ids in (first_prompt, second_prompt):
        assert store.find(MODEL.fingerprint, ids).token_count == 2 * BLOCK_TOKENS
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    for ids in (first_prompt, second_prompt):
        assert store.find(MODEL.fingerprint, ids).token_count == BLOCK_TOKENS
        assert store.differs_at(MODEL.fingerprint, ids) == (BLOCK_TOKENS, BLOCK_TOKENS)


def test_a_block_without_its_preceding_tokens_is_replaced(tmp_path: Path) -> None:
    """Earlier versions wrote such blocks."""
    store, ids = PrefixStore(tmp_path), prompt(5, BLOCK_TOKENS)
    add_whole_blocks(store, ids)
    rewrite_block(only_block(tmp_path), {"start": 0})
    assert store.find(MODEL.fingerprint, ids).token_count == 0
    assert add_whole_blocks(store, ids) == [True]
    assert store.find(MODEL.fingerprint, ids).token_count == BLOCK_TOKENS


@pytest.mark.parametrize("missing", ["keys", "values", "tokens"])
def test_a_block_without_one_of_its_tensors_is_a_miss(tmp_path: Path, missing: str) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 300)
    add_whole_blocks(store, ids)
    file = only_block(tmp_path)
    content = read_container(file, BLOCK_KIND, BLOCK_FORMAT)
    del content.tensors[missing]
    write_container(file, BLOCK_KIND, BLOCK_FORMAT, content.document, content.tensors)
    assert MODEL.session(store=store).feed(ids).reused == 0
    assert MODEL.session(store=store).feed(ids).reused == BLOCK_TOKENS


@pytest.mark.parametrize(
    "other",
    [
        {"keys": torch.zeros(LAYOUT.layers, LAYOUT.kv_heads, BLOCK_TOKENS, 2 * LAYOUT.head_dim)},
        {"values": torch.zeros(LAYOUT.layers, LAYOUT.kv_heads, BLOCK_TOKENS - 1, LAYOUT.head_dim)},
        {"values": torch.zeros(BLOCK_TOKENS)},
        {"keys": random_cells()[0].bfloat16()},
        {"tokens": torch.zeros(BLOCK_TOKENS, dtype=torch.int64)},
        {"tokens": torch.zeros(2, BLOCK_TOKENS // 2, dtype=torch.int32)},
        {"tokens": torch.zeros(0, dtype=torch.int32)},
    ],
    ids=lambda other: "-".join(f"{name}{list(x.shape)}" for name, x in other.items()),
)
def test_a_block_with_wrong_tensors_is_a_miss(
    tmp_path: Path, other: dict[str, torch.Tensor]
) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 300)
    add_whole_blocks(store, ids)
    rewrite_block(only_block(tmp_path), **other)
    store.differs_at(MODEL.fingerprint, ids)
    assert MODEL.session(store=store).feed(ids).reused == 0
    assert MODEL.session(store=store).feed(ids).reused == BLOCK_TOKENS


def test_a_folder_named_like_a_block_is_ignored(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 2 * BLOCK_TOKENS + 10)
    (tmp_path / "some.kvblock").mkdir()
    assert add_whole_blocks(store, ids) == [True, True]
    assert store.gc(0) > 0
    add_whole_blocks(store, ids[:BLOCK_TOKENS])
    file = only_block(tmp_path)
    file.unlink()
    file.mkdir()
    report = MODEL.session(store=store).feed(ids)
    assert (report.reused, report.store_error) == (0, None)
    assert sorted(tmp_path.glob("*.kvblock")) == sorted([file, tmp_path / "some.kvblock"])


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign"])
def test_a_corrupt_block_is_a_miss_and_is_replaced(tmp_path: Path, damage: str) -> None:
    store, ids = PrefixStore(tmp_path), prompt(5, 1000)
    MODEL.session(policy="full", store=store).feed(ids)
    second = sorted(tmp_path.glob("*.kvblock"), key=lambda path: -path.stat().st_mtime_ns)[1]
    data = bytearray(second.read_bytes())
    data[len(data) // 2] ^= 4
    broken = {"flip": data, "truncate": data[:-9], "empty": b"", "foreign": b"not a block"}
    second.write_bytes(broken[damage])
    session, without_store = (
        MODEL.session(policy="full", store=prefix_store) for prefix_store in (store, None)
    )
    assert session.feed(ids).reused == 256
    without_store.feed(ids)
    assert (session.logits - without_store.logits).abs().max() <= 1e-4
    assert MODEL.session(policy="full", store=store).feed(ids).reused == 768


# The quota


def test_the_quota_holds_around_every_file_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measure the folder before and after each call that changes its size."""
    store, sizes = PrefixStore(tmp_path, max_bytes=10 * FILE_BYTES), list[int]()

    def measured(call: Callable[..., None], *arguments: object) -> None:
        sizes.append(folder_size(tmp_path))
        call(*arguments)
        sizes.append(folder_size(tmp_path))

    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, partial(measured, getattr(os, name)))
    for seed in range(25):
        ids = prompt(seed, 2 * BLOCK_TOKENS)
        for end in (BLOCK_TOKENS, 2 * BLOCK_TOKENS):
            assert add_last_block(store, ids[:end])
            assert store.nbytes <= folder_size(tmp_path) <= store.max_bytes
    assert len(sizes) >= 2 * 2 * 50
    assert 8 * BLOCK_BYTES < max(sizes) <= store.max_bytes
    assert (
        store.find(MODEL.fingerprint, prompt(24, 2 * BLOCK_TOKENS)).token_count == 2 * BLOCK_TOKENS
    )
    assert store.find(MODEL.fingerprint, prompt(0, 2 * BLOCK_TOKENS)).token_count == 0


def test_the_quota_holds_across_processes(small_folder: Path, tmp_path: Path) -> None:
    store, quota = tmp_path / "store", 10 * FILE_BYTES
    store.mkdir()
    running = [
        start_process(small_folder, "float32", store, quota, i, 1100, tmp_path / f"{i}.pt")
        for i in range(3)
    ]
    sizes = []
    while any(child.poll() is None for child in running):
        sizes.append(folder_size(store))
        time.sleep(0.02)
    assert [child.wait() for child in running] == [0] * 3
    assert max(sizes, default=0) <= quota
    assert 5 * BLOCK_BYTES < folder_size(store) <= quota
    assert [x for x in os.listdir(store) if x.startswith(TEMPORARY_PREFIX)] == []


def test_the_least_recently_used_blocks_are_evicted(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, max_bytes=4 * FILE_BYTES)
    for seed in range(4):
        add_whole_blocks(store, prompt(seed, BLOCK_TOKENS))
    assert store.find(MODEL.fingerprint, prompt(0, BLOCK_TOKENS)).token_count == BLOCK_TOKENS
    for seed in (4, 5):
        add_whole_blocks(store, prompt(seed, BLOCK_TOKENS))
    stored_tokens = [
        store.differs_at(MODEL.fingerprint, prompt(seed, BLOCK_TOKENS))[0] for seed in range(6)
    ]
    assert stored_tokens == [BLOCK_TOKENS, 0, 0, BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS]


def test_the_end_of_a_prompt_is_evicted_before_its_beginning(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, max_bytes=6 * FILE_BYTES)
    add_whole_blocks(store, prompt(0, 4 * BLOCK_TOKENS))
    for seed in (1, 2, 3):
        add_whole_blocks(store, prompt(seed, BLOCK_TOKENS))
    assert (
        store.find(MODEL.fingerprint, prompt(0, 4 * BLOCK_TOKENS)).token_count == 3 * BLOCK_TOKENS
    )


def test_a_prompt_longer_than_the_quota_keeps_its_beginning(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, max_bytes=5 * FILE_BYTES)
    added = add_whole_blocks(store, prompt(0, 12 * BLOCK_TOKENS))
    assert added == [True] * 5 + [False] * 7
    assert (
        store.find(MODEL.fingerprint, prompt(0, 12 * BLOCK_TOKENS)).token_count == 5 * BLOCK_TOKENS
    )


def test_a_block_larger_than_the_quota_is_not_stored(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, max_bytes=BLOCK_BYTES)
    assert add_whole_blocks(store, prompt(0, BLOCK_TOKENS)) == [False]
    assert store.nbytes == 0


def test_a_block_without_its_predecessors_is_not_stored(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path)
    assert not add_last_block(store, prompt(0, 2 * BLOCK_TOKENS))
    assert store.nbytes == 0


def test_gc_evicts_to_the_limit_and_removes_files_of_killed_writers(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path)
    add_whole_blocks(store, prompt(0, 4 * BLOCK_TOKENS))
    (tmp_path / f"{TEMPORARY_PREFIX}0123456789abcdef.kvblock").write_bytes(bytes(10_000))
    before = store.nbytes
    assert store.gc(2 * FILE_BYTES) == before - store.nbytes >= 2 * BLOCK_BYTES
    assert (
        store.find(MODEL.fingerprint, prompt(0, 4 * BLOCK_TOKENS)).token_count == 2 * BLOCK_TOKENS
    )
    store.gc(0)
    assert os.listdir(tmp_path) == ["lock"]


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="max_bytes"):
        PrefixStore(tmp_path, 0)
    with pytest.raises(InvalidArgument, match="max_bytes"):
        PrefixStore(tmp_path).gc(-1)
    with pytest.raises(InvalidArgument, match="start"):
        PrefixStore(tmp_path).add(MODEL.fingerprint, prompt(0, 600), 100, [random_cells()])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be used as a prefix store"):
        PrefixStore(tmp_path / "file")


def test_a_failed_write_raises_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PrefixStore(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        add_whole_blocks(store, prompt(0, BLOCK_TOKENS))
    assert store.nbytes == 0


# Which cells sessions store


@pytest.mark.parametrize("policy", ["sliding", "shift"])
def test_prefixes_are_reused_by_a_budget_smaller_than_the_prompt(
    tmp_path: Path, policy: str
) -> None:
    store, ids = PrefixStore(tmp_path), prompt(7, 1500)
    without_store = MODEL.session(600, policy=policy)
    without_store.feed(ids)
    MODEL.session(policy="full", store=store).feed(ids)
    for _ in range(2):
        session = MODEL.session(600, policy=policy, store=store)
        assert session.feed(ids).reused == 512
        assert session.cache.cells == without_store.cache.cells
        assert (session.logits - without_store.logits).abs().max() <= 1e-4


def test_cells_computed_after_an_eviction_are_not_stored(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(7, 1500)
    bounded = MODEL.session(600, store=store, prefill_step=300)
    bounded.feed(ids)
    # The first eviction comes after 600 tokens, which hold two whole blocks.
    assert store.find(MODEL.fingerprint, ids).token_count == 512
    session, without_store = (
        MODEL.session(policy="full", store=prefix_store) for prefix_store in (store, None)
    )
    assert session.feed(ids).reused == 512
    without_store.feed(ids)
    assert (session.logits - without_store.logits).abs().max() <= 1e-4


def test_only_the_first_prompt_of_a_session_is_stored(tmp_path: Path) -> None:
    store, draw = PrefixStore(tmp_path), random.Random(1)
    session = MODEL.session(store=store)
    session.feed(prompt(7, 300))
    session.feed([draw.randrange(1, 256) for _ in range(600)])
    session.delete(100, 120)
    session.feed(prompt(8, 600))
    assert len(list(tmp_path.glob("*.kvblock"))) == 1


def test_keep_minus_one_works_with_a_store(tmp_path: Path) -> None:
    store, ids = PrefixStore(tmp_path), prompt(9, 700)
    without_store = MODEL.session(1000, keep=-1)
    without_store.feed(ids)
    for expected in (0, 512):
        session = MODEL.session(1000, keep=-1, store=store)
        assert session.feed(ids).reused == expected
        assert session.keep == 700
        assert (session.logits - without_store.logits).abs().max() <= 1e-4
    for fed in (session, without_store):
        fed.feed(prompt(10, 600))
    assert (session.logits - without_store.logits).abs().max() <= 1e-4


# The cost of adding


@contextmanager
def counted_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count computed block keys, opened files, updated times and listed folders."""
    work, counting = Counter[str](), True

    def count_event(event: str, arguments: tuple[object, ...]) -> None:
        if counting and event in ("open", "os.utime", "os.scandir", "os.listdir"):
            work[event] += 1

    def key(parent: str, tokens: torch.Tensor) -> str:
        work["keys"] += 1
        return compute(parent, tokens)

    compute = prefix_store.block_key
    monkeypatch.setattr(prefix_store, "block_key", key)
    sys.addaudithook(count_event)
    yield work
    counting = False  # an audit hook cannot be removed


def test_the_cost_of_storing_a_block_does_not_grow_with_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for blocks in (4, 16):
        store = PrefixStore(tmp_path / str(blocks))
        with counted_work(monkeypatch) as work:
            MODEL.session(policy="full", store=store).feed(prompt(5, blocks * BLOCK_TOKENS))
        assert (
            store.find(MODEL.fingerprint, prompt(5, blocks * BLOCK_TOKENS)).token_count
            == blocks * BLOCK_TOKENS
        )
        counts.append(work)
    few, many = counts
    assert few["keys"] >= 4
    assert few["open"] >= 4
    for kind, count in many.items():
        assert count / 16 <= 1.5 * few[kind] / 4, kind
