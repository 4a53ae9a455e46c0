"""Lookups in prefix caches take place beside the work of an engine, and change no bit of it."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from packed_model import packed_model, spec_of
from small_models import small_model

from kvkeep.compiled.binding import kernel_library
from kvkeep.engine import Engine, GeneratedToken, Generation, GenerationRequest
from kvkeep.errors import Cancelled, StoreError
from kvkeep.storage.prefixes.block import CheckpointNeed, PrefixMatch
from kvkeep.storage.prefixes.store import PrefixStore
from kvkeep.storage.snapshots.fingerprint import Fingerprint

EXACT = kernel_library() is not None  # with torch, rows of a forward pass differ by rounding
MODEL = packed_model(spec_of(32), None) if EXACT else small_model()
SETTINGS: dict[str, Any] = {"policy": "sliding", "max_kv_size": 2000, "prefill_step": 128}
PATIENCE = 30.0  # seconds, after which a lookup that nothing lets end fails the test
UNENDING = GenerationRequest(tuple(range(1, 50)), None, ignore_eos=True, speculate=False)


class GatedStore(PrefixStore):
    """A store in a folder, of which each lookup of a whole block waits until it may end.

    begun: the first tokens of the prompts that were looked up, in this order.
    """

    def __init__(self, path: Path, error: BaseException | None = None):
        super().__init__(path)
        self.gate, self.begun, self._error = threading.Event(), list[int](), error
        self._has_begun = threading.Semaphore(0)

    def find(
        self, fingerprint: Fingerprint, tokens: Sequence[int], need: CheckpointNeed | None = None
    ) -> PrefixMatch:
        if len(tokens) >= 256:
            self.begun.append(tokens[0])
            self._has_begun.release()
            if not self.gate.wait(PATIENCE):
                raise AssertionError("the lookup kept the engine from all else")
            if self._error is not None:
                raise self._error
        return super().find(fingerprint, tokens, need)

    def wait_for_lookups(self, count: int) -> None:
        for _ in range(count):
            assert self._has_begun.acquire(timeout=PATIENCE)


def text(count: int, first: int = 7) -> tuple[int, ...]:
    return (first, *((i * i * 7 + 3 * i) % 250 + 1 for i in range(1, count)))


def request(prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(prompt, 5, ignore_eos=True, logprobs=0)


def result(generation: Generation) -> list[tuple[int, float]]:
    """Each token with its logprob, which differs if any bit of the logits does."""
    tokens = [event for event in generation if isinstance(event, GeneratedToken)]
    return [(x.token, x.logprob.logprob if EXACT else 0.0) for x in tokens if x.logprob]


def alone(prompt: tuple[int, ...]) -> list[tuple[int, float]]:
    with Engine(MODEL, settings=SETTINGS) as engine:
        return result(engine.generate(request(prompt)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GatedStore]:
    """A store with one prompt, whose lookups wait until its gate opens."""
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: PrefixStore(tmp_path)) as engine:
        engine.generate(request(text(700))).text()
    gated = GatedStore(tmp_path)
    yield gated
    gated.gate.set()


def test_other_generations_decode_and_prefill_during_a_lookup(store: GatedStore) -> None:
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: store) as engine:
        decoding = engine.generate(UNENDING)
        found = engine.generate(request(text(700)))
        store.wait_for_lookups(1)
        tokens = (event for event in decoding if isinstance(event, GeneratedToken))
        assert len(list(itertools.islice(tokens, 50))) == 50
        assert result(engine.generate(request(text(200)))) == alone(text(200))
        assert not store.gate.is_set()
        store.gate.set()
        assert result(found) == alone(text(700))
        assert (found.reuse.tokens, found.reuse.source) == (512, "store")
        decoding.cancel()


def test_prompts_that_no_block_can_hold_wait_for_no_lookup(store: GatedStore) -> None:
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: store) as engine:
        found = [engine.generate(request(text(300, first))) for first in range(1, 6)]
        store.wait_for_lookups(4)
        assert result(engine.generate(request(text(3)))) == alone(text(3))
        assert not store.gate.is_set()
        store.gate.set()
        for generation in found:
            generation.text()


def test_other_sessions_are_fed_during_the_lookup_of_a_session(store: GatedStore) -> None:
    session = MODEL.session(**SETTINGS, store=store)
    feeding = threading.Thread(target=session.feed, args=(text(700),))
    feeding.start()
    store.wait_for_lookups(1)
    assert MODEL.session(**SETTINGS).feed(text(200)).tokens == 200
    assert not store.gate.is_set()
    assert not session.tokens
    store.gate.set()
    feeding.join()
    assert len(session.tokens) == 700


def test_an_engine_without_other_work_waits_for_a_lookup(store: GatedStore) -> None:
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: store) as engine:
        generation = engine.generate(request(text(700)))
        store.wait_for_lookups(1)
        assert engine.totals().result().running == 1
        store.gate.set()
        assert result(generation) == alone(text(700))


def test_a_generation_is_cancelled_during_its_lookup(store: GatedStore) -> None:
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: store) as engine:
        generation = engine.generate(request(text(700)))
        store.wait_for_lookups(1)
        generation.cancel()
        with pytest.raises(Cancelled):
            generation.text()
        assert engine.totals().result().running == 0
        store.gate.set()
        assert result(engine.generate(request(text(700)))) == alone(text(700))


def test_an_engine_closes_during_a_lookup(store: GatedStore) -> None:
    engine = Engine(MODEL, settings=SETTINGS, stores=lambda _: store)
    generation = engine.generate(request(text(700)))
    store.wait_for_lookups(1)
    engine.close()
    assert not store.gate.is_set()
    with pytest.raises(Cancelled):
        generation.text()


def test_an_engine_that_closes_with_grace_waits_for_a_lookup(store: GatedStore) -> None:
    engine = Engine(MODEL, settings=SETTINGS, stores=lambda _: store)
    generation = engine.generate(request(text(700)))
    store.wait_for_lookups(1)
    closing = threading.Thread(target=engine.close, args=(PATIENCE,))
    closing.start()
    store.gate.set()
    assert result(generation) == alone(text(700))
    closing.join()


def test_prompts_with_one_first_block_are_looked_up_one_after_the_other(
    store: GatedStore,
) -> None:
    """The second one finds what the first one stored; another text waits for neither."""
    first, second, other = text(600, 9), text(650, 9), text(700, 11)
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: store) as engine:
        generations = [engine.generate(request(prompt)) for prompt in (first, second, other)]
        store.wait_for_lookups(2)
        assert store.begun == [9, 11]
        store.gate.set()
        assert [result(x) for x in generations] == [alone(x) for x in (first, second, other)]
        assert [x.reuse.tokens for x in generations] == [0, 512, 0]


@pytest.mark.parametrize("num_prompts", [3, 9])
def test_a_prompt_is_evaluated_whose_lookup_fails(tmp_path: Path, num_prompts: int) -> None:
    store = GatedStore(tmp_path, StoreError("the store is unreachable"))
    store.gate.set()
    prompts = [text(300, first) for first in range(1, num_prompts + 1)]
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: store) as engine:
        generations = [engine.generate(request(prompt)) for prompt in prompts]
        assert [result(x) for x in generations] == [alone(prompt) for prompt in prompts]


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_defect_of_a_store_ends_only_the_generation_that_meets_it(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    store = GatedStore(tmp_path, kind("a defect of the store"))
    store.gate.set()
    with Engine(MODEL, settings=SETTINGS, stores=lambda _: store) as engine:
        decoding = engine.generate(request(text(200)))
        with pytest.raises(RuntimeError, match="a defect of the store"):
            engine.generate(request(text(700, 9))).text()
        assert result(decoding) == alone(text(200))
