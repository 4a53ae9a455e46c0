"""Evaluated beginnings of prompts in a store that several machines share."""

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvkeep import load_model
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.prefixes.inventory import make_room, stored_blocks, stored_prompts
from kvkeep.storage.prefixes.shared import SharedPrefixCache

SECRET = secrets.token_bytes(32)
PROMPT = [(7 * i) % 500 for i in range(700)]


@pytest.fixture
def tiny(tiny_folder: Path) -> Iterator[Model]:
    return load_model(tiny_folder, dtype="float32")


def prefixes(
    model: Model, objects: ObjectStore, secret: bytes = SECRET, owner: str = "0"
) -> SharedPrefixCache:
    return SharedPrefixCache(objects, secret, model.arithmetic, owner)


def fed(
    model: Model, store: SharedPrefixCache | None, prompt: list[int]
) -> tuple[int, torch.Tensor]:
    """How many tokens were reused, and the logits after the prompt."""
    session = model.session(max_kv_size=2048, prefill_step=128, store=store)
    feed = session.feed(prompt)
    if store is not None:
        store.flush()
    return feed.reused, session.logits


def test_another_process_reuses_blocks_bit_for_bit(objects: ObjectStore, tiny: Model) -> None:
    reused, logits = fed(tiny, prefixes(tiny, objects), PROMPT)
    assert reused == 0
    again, same = fed(tiny, prefixes(tiny, objects), PROMPT)
    assert again == 512
    assert torch.equal(logits, same)
    longer, _ = fed(tiny, prefixes(tiny, objects), [*PROMPT[:300], *PROMPT])
    assert longer == 256


def test_a_match_reports_where_the_prompt_differs(objects: ObjectStore, tiny: Model) -> None:
    store = prefixes(tiny, objects)
    fed(tiny, store, PROMPT)
    other = [*PROMPT[:300], 9, *PROMPT[301:]]
    found = store.find(tiny.fingerprint, other)
    assert (found.tokens, found.differs_at) == (256, 300)


def test_nobody_finds_what_another_owner_or_secret_or_processor_has(
    objects: ObjectStore, tiny: Model
) -> None:
    fed(tiny, prefixes(tiny, objects), PROMPT)
    for store in (
        prefixes(tiny, objects, owner="1"),
        prefixes(tiny, objects, secrets.token_bytes(32)),
        SharedPrefixCache(objects, SECRET, {"kernels": "another"}),
    ):
        assert fed(tiny, store, PROMPT)[0] == 0
    assert prefixes(tiny, objects).for_owner("1").find(tiny.fingerprint, PROMPT).tokens == 512


def test_a_block_made_without_the_secret_is_not_used(objects: ObjectStore, tiny: Model) -> None:
    """One that verifies by all checksums, under the right name, without the secret."""
    store = prefixes(tiny, objects)
    _, right = fed(tiny, store, PROMPT)
    forger = prefixes(tiny, objects, secrets.token_bytes(32))
    fed(tiny, forger, [(3 * i) % 500 for i in range(700)])
    keys = sorted(stored.key for stored in objects.list_objects("prefixes/"))
    own = [block.path.key for block in store._blocks(tiny.fingerprint, PROMPT)]
    forged = next(key for key in keys if key not in own)
    objects.put(own[0], objects.get(forged)[0])
    reused, logits = fed(tiny, store, PROMPT)
    assert reused == 0
    assert torch.equal(logits, right)


def test_a_block_that_was_damaged_is_evaluated_again(objects: ObjectStore, tiny: Model) -> None:
    store = prefixes(tiny, objects)
    fed(tiny, store, PROMPT)
    place = store._blocks(tiny.fingerprint, PROMPT)[1].path
    content = bytearray(objects.get(place.key)[0])
    content[-100] ^= 4
    objects.put(place.key, bytes(content))
    assert fed(tiny, store, PROMPT)[0] == 256
    assert fed(tiny, store, PROMPT)[0] == 512


def test_a_block_under_another_name_is_not_used(objects: ObjectStore, tiny: Model) -> None:
    store = prefixes(tiny, objects)
    fed(tiny, store, PROMPT)
    first, second = (block.path for block in store._blocks(tiny.fingerprint, PROMPT))
    objects.put(first.key, objects.get(second.key)[0])
    assert fed(tiny, store, PROMPT)[0] == 0


def test_room_is_made_from_the_ends_of_the_prompts_that_were_written_first(
    objects: ObjectStore, tiny: Model
) -> None:
    store, later = prefixes(tiny, objects), [*PROMPT[:300], *reversed(PROMPT)]
    fed(tiny, store, PROMPT)
    time.sleep(1.1)  # S3 tells whole seconds
    fed(tiny, store.for_owner("another"), later)
    blocks = list(stored_blocks(objects))
    size, each = sum(block.nbytes for block in blocks), blocks[0].nbytes
    assert make_room(objects, size) == (0, size)
    assert make_room(objects, size - each) == (each, size - each)
    assert fed(tiny, store.for_owner("another"), later)[0] == len(later) // 256 * 256
    assert fed(tiny, store, PROMPT)[0] == 256, "its beginning is still there"
    assert make_room(objects, 0) == (size, 0)
    assert [*stored_blocks(objects)] == []


def test_blocks_of_no_prompt_are_evicted_too(objects: ObjectStore) -> None:
    for name in ("a/a", "b/c", "c/b", "x/e", "y/e"):
        objects.put(f"prefixes/mischief/{name}.kvblock", b"12")
    assert make_room(objects, 4) == (6, 4)
    assert make_room(objects, 0) == (4, 0)
    assert [*stored_blocks(objects)] == []


def test_names_that_go_round_in_a_circle_end(tmp_path: Path) -> None:
    for parent, key in (("a", "b"), ("b", "a"), ("a", "c")):
        (tmp_path / f"{parent}-{key}.kvblock").touch()
    (prompt,) = stored_prompts(tmp_path)
    assert [block.key for block in prompt.blocks] == ["b", "a", "c"]


def test_an_engine_gives_each_owner_its_own(objects: ObjectStore, tiny: Model) -> None:
    shared = prefixes(tiny, objects)
    with Engine(tiny, settings={"max_kv_size": 2048}, stores=shared.for_owner) as engine:
        for owner in ("a", "b"):
            engine.generate(GenerationRequest(tuple(PROMPT), 1), owner=owner).text()
            shared.flush()
    assert objects.list_folders("prefixes/") == ["a", "b"]
    with Engine(
        tiny, settings={"max_kv_size": 2048}, stores=prefixes(tiny, objects).for_owner
    ) as engine:
        answer = engine.generate(GenerationRequest(tuple(PROMPT), 1), owner="a")
        answer.text()
        assert answer.reuse.tokens == 512


def test_a_secret_of_another_length_is_refused(objects: ObjectStore, tiny: Model) -> None:
    with pytest.raises(InvalidArgument, match="32 bytes"):
        prefixes(tiny, objects, b"short")
