"""The prefix cache in an object store that several machines share."""

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lossy_basis import random_basis
from small_models import local_spec, small_model, state_specs

from kvkeep import Snapshot, load_model
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.storage.lossy.basis import add_basis, newest_basis
from kvkeep.storage.lossy.shared import share_bases
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.folder import FolderObjectStore
from kvkeep.storage.objects.interface import MAX_GET_BYTES, ChunkFactory
from kvkeep.storage.objects.paths import ObjectPath
from kvkeep.storage.prefixes.inventory import (
    evict_blocks,
    prompts_of,
    roundings,
    stored_blocks,
    stored_prompts,
)
from kvkeep.storage.prefixes.shared import SharedPrefixCache
from kvkeep.storage.prefixes.write_queue import WriteQueue
from kvkeep.storage.sessions.shared import SharedSessions

CHECKPOINT_MODELS = {
    "local": small_model(spec=local_spec(window=60)),
    "delta_net": small_model(spec=state_specs()["delta_net"]),
}
PLAIN = small_model()
SECRET = secrets.token_bytes(32)
PROMPT = [(7 * i) % 500 for i in range(700)]
PROMPT_BYTES = [token % 255 + 1 for token in PROMPT]


@pytest.fixture
def tiny(tiny_folder: Path) -> Iterator[Model]:
    return load_model(tiny_folder, dtype="float32")


def prefix_cache(
    model: Model, objects: ObjectStore, secret: bytes = SECRET, owner: str = "0"
) -> SharedPrefixCache:
    return SharedPrefixCache(objects, secret, model.arithmetic, owner)


def feed(
    model: Model, store: SharedPrefixCache | None, prompt: list[int]
) -> tuple[int, torch.Tensor]:
    """Feed a prompt. Returns the number of reused tokens and the logits after the prompt."""
    session = model.session(max_kv_size=2048, prefill_step=128, store=store)
    report = session.feed(prompt)
    if store is not None:
        store.flush()
    return report.reused, session.logits


def block_keys(objects: ObjectStore) -> list[str]:
    """Return the keys of the blocks of the only stored prompt, in order."""
    (prompt,) = prompts_of(stored_blocks(objects))
    return [block.location for block in prompt.blocks]


def test_another_process_reuses_blocks_bit_for_bit(objects: ObjectStore, tiny: Model) -> None:
    reused, logits = feed(tiny, prefix_cache(tiny, objects), PROMPT)
    assert reused == 0
    reused_again, logits_again = feed(tiny, prefix_cache(tiny, objects), PROMPT)
    assert reused_again == 512
    assert torch.equal(logits, logits_again)
    reused_partly, _ = feed(tiny, prefix_cache(tiny, objects), [*PROMPT[:300], *PROMPT])
    assert reused_partly == 256


def test_a_match_reports_where_the_prompt_differs(objects: ObjectStore, tiny: Model) -> None:
    store = prefix_cache(tiny, objects)
    feed(tiny, store, PROMPT)
    other = [*PROMPT[:300], 9, *PROMPT[301:]]
    match = store.find(tiny.fingerprint, other)
    assert (match.token_count, match.differs_at) == (256, 300)


def test_blocks_of_another_owner_secret_or_processor_are_not_found(
    objects: ObjectStore, tiny: Model
) -> None:
    feed(tiny, prefix_cache(tiny, objects), PROMPT)
    for store in (
        prefix_cache(tiny, objects, owner="1"),
        prefix_cache(tiny, objects, secrets.token_bytes(32)),
        SharedPrefixCache(objects, SECRET, {"kernels": "another"}),
    ):
        assert feed(tiny, store, PROMPT)[0] == 0
    assert (
        prefix_cache(tiny, objects).for_owner("1").find(tiny.fingerprint, PROMPT).token_count == 512
    )


def test_a_block_made_without_the_secret_is_not_used(objects: ObjectStore, tiny: Model) -> None:
    """The forged block has the right name and correct checksums, but another secret."""
    store = prefix_cache(tiny, objects)
    _, expected = feed(tiny, store, PROMPT)
    own_keys = block_keys(objects)
    forger = prefix_cache(tiny, objects, secrets.token_bytes(32))
    feed(tiny, forger, [(3 * i) % 500 for i in range(700)])
    keys = sorted(stored.key for stored in objects.list_objects("prefixes/"))
    forged = next(key for key in keys if key not in own_keys)
    objects.put(own_keys[0], objects.get(forged)[0])
    reused, logits = feed(tiny, store, PROMPT)
    assert reused == 0
    assert torch.equal(logits, expected)


def test_a_damaged_block_is_evaluated_again(objects: ObjectStore, tiny: Model) -> None:
    store = prefix_cache(tiny, objects)
    feed(tiny, store, PROMPT)
    key = block_keys(objects)[1]
    content = bytearray(objects.get(key)[0])
    content[-100] ^= 4
    objects.put(key, bytes(content))
    assert feed(tiny, store, PROMPT)[0] == 256
    assert feed(tiny, store, PROMPT)[0] == 512


def test_a_block_under_another_name_is_not_used(objects: ObjectStore, tiny: Model) -> None:
    store = prefix_cache(tiny, objects)
    feed(tiny, store, PROMPT)
    first, second = block_keys(objects)
    objects.put(first, objects.get(second)[0])
    assert feed(tiny, store, PROMPT)[0] == 0


def test_evict_to_evicts_the_ends_of_the_oldest_prompts_first(
    objects: ObjectStore, tiny: Model
) -> None:
    store, later = prefix_cache(tiny, objects), [*PROMPT[:300], *reversed(PROMPT)]
    feed(tiny, store, PROMPT)
    time.sleep(1.1)  # S3 reports modification times in whole seconds
    feed(tiny, store.for_owner("another"), later)
    blocks = list(stored_blocks(objects))
    total, block_bytes = sum(block.nbytes for block in blocks), blocks[0].nbytes
    assert evict_blocks(objects, total) == (0, total)
    assert evict_blocks(objects, total - block_bytes) == (block_bytes, total - block_bytes)
    assert feed(tiny, store.for_owner("another"), later)[0] == len(later) // 256 * 256
    assert feed(tiny, store, PROMPT)[0] == 256, "its first block is still stored"
    assert evict_blocks(objects, 0) == (total, 0)
    assert [*stored_blocks(objects)] == []


def test_orphan_blocks_are_evicted_too(objects: ObjectStore) -> None:
    for name in ("a/a", "b/c", "c/b", "x/e", "y/e"):
        objects.put(f"prefixes/orphans/{name}.kvblock", b"12")
    assert evict_blocks(objects, 4) == (6, 4)
    assert evict_blocks(objects, 0) == (4, 0)
    assert [*stored_blocks(objects)] == []


def test_listing_prompts_ends_although_block_names_form_a_cycle(tmp_path: Path) -> None:
    for parent, key in (("a", "b"), ("b", "a"), ("a", "c")):
        (tmp_path / f"{parent}-{key}.kvblock").touch()
    (prompt,) = stored_prompts(tmp_path)
    assert [block.key for block in prompt.blocks] == ["b", "a", "c"]


def test_an_engine_uses_a_separate_prefix_cache_per_owner(
    objects: ObjectStore, tiny: Model
) -> None:
    shared = prefix_cache(tiny, objects)
    with Engine(tiny, settings={"max_kv_size": 2048}, stores=shared.for_owner) as engine:
        for owner in ("a", "b"):
            engine.generate(GenerationRequest(tuple(PROMPT), 1), owner=owner).text()
            shared.flush()
    assert {info.key.split("/")[1] for info in objects.list_objects("prefixes/")} == {"a", "b"}
    with Engine(
        tiny, settings={"max_kv_size": 2048}, stores=prefix_cache(tiny, objects).for_owner
    ) as engine:
        generation = engine.generate(GenerationRequest(tuple(PROMPT), 1), owner="a")
        generation.text()
        assert generation.reuse.tokens == 512


class _PausedStore:
    """A store whose writes wait until it is resumed."""

    def __init__(self, objects: ObjectStore):
        self._objects, self.resumed = objects, threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def put_chunks(self, key: str, iter_chunks: ChunkFactory) -> None:
        assert self.resumed.wait(30)
        self._objects.put_chunks(key, iter_chunks)


@pytest.mark.parametrize(
    ("kind", "max_blocks", "expected"),
    [("plain", 0, (1, 0)), ("plain", 3.9, (3, 0)), ("local", 2, (2, 0)), ("local", 99, (7, 5))],
)
def test_what_waits_to_be_written_is_bounded_in_bytes(
    tmp_path: Path, kind: str, max_blocks: float, expected: tuple[int, int]
) -> None:
    """A block that is larger waits alone. Checkpoints count, and so do blocks of other prompts."""
    model, paused = CHECKPOINT_MODELS.get(kind, PLAIN), _PausedStore(FolderObjectStore(tmp_path))
    block_bytes = 256 * model.session(max_kv_size=9).cache.layout.cell_bytes
    shared = SharedPrefixCache(
        paused,  # type: ignore[arg-type]
        SECRET,
        model.arithmetic,
        queue=WriteQueue(int(max_blocks * block_bytes)),
    )
    for prompt in (PROMPT_BYTES * 2, PROMPT_BYTES[::-1]):
        model.session(max_kv_size=2048, prefill_step=128, store=shared).feed(prompt)
    paused.resumed.set()
    shared.flush()
    suffixes = [path.suffix for path in tmp_path.rglob("*.kv*")]
    assert (suffixes.count(".kvblock"), suffixes.count(".kvcheckpoint")) == expected


def test_headers_of_several_owners_are_read_at_once(objects: ObjectStore, tiny: Model) -> None:
    """Each has the time of a request to the store, and owners may be thousands."""
    for owner in ("a", "b"):
        feed(tiny, prefix_cache(tiny, objects, owner=owner), PROMPT)
    prompts, both_are_read = prompts_of(stored_blocks(objects)), threading.Barrier(2)

    def path_of(key: str) -> ObjectPath:
        both_are_read.wait(30)
        return ObjectPath(objects, key)

    assert roundings(prompts, path_of) == {}


def test_a_secret_of_a_wrong_length_is_refused(objects: ObjectStore, tiny: Model) -> None:
    with pytest.raises(InvalidArgument, match="32 bytes"):
        prefix_cache(tiny, objects, b"short")


@pytest.mark.parametrize("kind", ["local", "delta_net"])
def test_checkpoints_of_models_that_need_them_are_shared(objects: ObjectStore, kind: str) -> None:
    model, ids = CHECKPOINT_MODELS[kind], [i * i % 250 + 1 for i in range(1100)]
    _, expected = feed(model, None, ids)
    assert [feed(model, prefix_cache(model, objects), ids)[0] for _ in range(2)] == [0, 1024]
    (prompt,) = prompts_of(stored_blocks(objects))
    assert prompt.checkpoint_ends == [512, 768, 1024]
    forger = prefix_cache(model, objects, secrets.token_bytes(32))
    feed(model, forger, ids)
    files = [info.key for info in objects.list_objects("prefixes/") if "checkpoint" in info.key]
    own = [block.checkpoint.location for block in prompt.blocks if block.checkpoint is not None]
    forged = sorted(set(files) - set(own))
    assert len(own) == len(forged) == 3
    objects.put(own[2], objects.get(own[1])[0])  # of other tokens
    for path in forged:  # made without the secret
        objects.put(own[1], objects.get(path)[0])
        store = prefix_cache(model, objects)
        feeding = model.session(max_kv_size=2048, prefill_step=128, store=store).feeding(ids)
        assert next(feeding).done == 512
        feeding.close()
    reused, logits = feed(model, prefix_cache(model, objects), ids)
    assert (reused, logits.equal(expected)) == (512, True)
    total = sum(info.st_size for info in objects.list_objects("prefixes/"))
    assert evict_blocks(objects, 0) == (total, 0)


class _RecordingStore:
    """A store that records the keys of the objects that are read."""

    def __init__(self, objects: ObjectStore):
        self._objects, self.read = objects, list[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def get(self, key: str, max_bytes: int = MAX_GET_BYTES) -> tuple[bytes, str]:
        self.read.append(key)
        return self._objects.get(key, max_bytes)


def test_a_basis_is_read_from_the_store_where_it_is_missing(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sessions = small_model(), SharedSessions(objects)
    fingerprint, session = model.fingerprint.to_dict(), model.session(max_kv_size=2048)
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "a"))
    key = f"bases/{add_basis(random_basis(model)).name}"
    objects.put("bases/old/0.kvbasis", b"of other software")
    share_bases(objects, fingerprint)
    session.feed(PROMPT_BYTES)
    with sessions.lock("one") as path:
        session.snapshot().save(path, "small")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "b"))
    for expected in ([key], []):
        recording = _RecordingStore(objects)
        share_bases(recording, fingerprint)  # type: ignore[arg-type]
        assert recording.read == expected
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "c"))
    own = add_basis(random_basis(model, seed=1))
    assert Snapshot.load(sessions.path("one")).rounded == "small"
    assert newest_basis(fingerprint).digest == own.stem


def test_machines_share_a_basis_and_blocks_that_are_rounded_in_it(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = small_model(), dict[str, int]()
    for machine in "ab":  # a has a basis, b takes it from the store
        monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / machine))
        if machine == "a":
            add_basis(random_basis(model))
            objects.put_chunks("bases/0.kvbasis", lambda: [b"damaged"])  # is skipped
        share_bases(objects, model.fingerprint.to_dict())
        store = SharedPrefixCache(objects, SECRET, model.arithmetic, codec="smaller")
        assert feed(model, store, PROMPT_BYTES)[0] == (512 if machine == "b" else 0)
        sizes[machine] = sum(block.nbytes for block in stored_blocks(objects))
    assert sizes["a"] == sizes["b"]
    assert feed(model, prefix_cache(model, objects), PROMPT_BYTES)[0] == 0
    exact_bytes = sum(block.nbytes for block in stored_blocks(objects)) - sizes["b"]
    assert exact_bytes > 1.5 * sizes["b"]
