"""Sessions in several threads compute one at a time, with the same results as in turn."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from packed_model import packed_model, spec_of
from small_models import small_model
from torch import Tensor

from kvkeep import Sampling, SessionGroup
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep
from kvkeep.session.session import Session

MODELS = {"float32": small_model(), "compiled": packed_model(spec_of(), 4)}
TEXT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(600)]
DRAWN = Sampling(temperature=1.0, seed=3)
PATIENCE = 60.0  # seconds, for what takes a moment


def run(*works: Callable[[], object]) -> None:
    """Run all at once, each in a thread; raises what one of them raises."""
    errors = list[BaseException]()

    def catching(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=catching, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


@contextmanager
def entries(decoder: Decoder) -> Iterator[list[int]]:
    """Yields a list of how many threads were in the model, each time that one entered it."""
    executor, counts, inside = decoder.executor, list[int](), list[int]()

    class Slow:
        row_limit, rounding = executor.row_limit, executor.rounding

        def forward(
            self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None
        ) -> Tensor:
            inside.append(1)
            counts.append(len(inside))
            time.sleep(0.002)  # other threads enter meanwhile if nothing keeps them out
            try:
                return executor.forward(tokens, step, input_norms)
            finally:
                inside.pop()

        def logits(self, hidden: Tensor) -> Tensor:
            return executor.logits(hidden)

    decoder.executor = Slow()
    try:
        yield counts
    finally:
        decoder.executor = executor


def various(model: Model) -> list[Session]:
    """Forks that share a full window, and sessions that share nothing."""
    parent = model.session(48, prefill_step=20)
    parent.feed(TEXT[:100])
    return [
        parent,
        *(parent.fork() for _ in range(3)),
        model.session(policy="full"),
        model.session(64, policy="archive", window=32),
    ]


def use(session: Session, seed: int) -> list[object]:
    """Use most operations of a session. Returns all logits on the way, and the tokens."""
    results: list[object] = []
    session.feed(TEXT[seed : seed + 50])
    results.append(session.logits)
    for _ in range(6):
        session.next_token(DRAWN)
        results.append(session.logits)
    session.rewind(2)
    fork = session.fork()
    fork.feed(TEXT[:5])
    results += [session.score(TEXT[:7]), fork.logits, session.logits, list(session.tokens)]
    return results


def same(one: list[object], other: list[object]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_sessions_in_threads_give_the_same_results_as_in_turn(model: Model) -> None:
    expected = [use(session, seed) for seed, session in enumerate(various(model))]
    sessions, results = various(model), dict[int, list[object]]()

    def work(seed: int) -> Callable[[], None]:
        def one() -> None:
            results[seed] = use(sessions[seed], seed)

        return one

    run(*(work(seed) for seed in range(len(sessions))))
    assert all(same(results[seed], each) for seed, each in enumerate(expected))


def test_one_thread_at_a_time_is_in_the_model() -> None:
    model = small_model()
    sessions = [model.session(48) for _ in range(5)]
    for session in sessions:
        session.feed(TEXT[:30])
    group = SessionGroup(sessions[3:])

    def edited() -> None:
        sessions[2].insert(10, TEXT[:9])
        sessions[2].delete(3, 6, recompute="suffix")
        sessions[2].replace(5, 6, TEXT[:3])
        sessions[2].rewind(1)
        sessions[2].fork(25)

    with entries(model.decoder) as counts:
        run(
            lambda: [sessions[0].next_token() for _ in range(9)],
            lambda: (sessions[1].feed(TEXT[:40]), sessions[1].score(TEXT[:5])),
            edited,
            lambda: [group.next_tokens() for _ in range(5)],
        )
    assert len(counts) >= 20
    assert max(counts) == 1


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_session_sampled_by_several_threads_takes_each_token_once(model: Model) -> None:
    session, alone = (model.session(48) for _ in range(2))
    for each in (session, alone):
        each.feed(TEXT[:60])
    sampled = list[int]()
    run(*(lambda: sampled.extend(session.next_token() for _ in range(20)) for _ in range(4)))
    expected = [alone.next_token() for _ in range(80)]
    assert session.tokens == alone.tokens
    assert sorted(sampled) == sorted(expected)
    assert torch.equal(session.logits, alone.logits)


def test_a_session_fed_by_several_threads_holds_all_prompts_step_by_step() -> None:
    session = small_model().session(policy="full", prefill_step=5)
    marks = [[each] * 40 for each in (11, 22, 33)]
    run(*(lambda tokens=tokens: session.feed(tokens) for tokens in marks))
    tokens = list(session.tokens)
    assert sorted(tokens) == sorted(token for each in marks for token in each)
    assert all(len(set(tokens[first : first + 5])) == 1 for first in range(0, 120, 5))
    again = small_model().session(policy="full", prefill_step=5)
    again.feed(tokens)
    assert session.cache.serials() == again.cache.serials()
    assert (session.logits - again.logits).abs().max() <= 1e-4


def test_another_session_has_its_turn_between_two_prefill_steps() -> None:
    model = small_model()
    long, short = model.session(prefill_step=10), model.session()
    short.feed(TEXT[:5])
    begun, sampled = threading.Event(), threading.Event()

    def after_a_step(count: int) -> None:
        begun.set()
        assert sampled.wait(PATIENCE)  # by another thread, while this prompt is on its way

    def write() -> None:
        assert begun.wait(PATIENCE)
        short.next_token()
        sampled.set()

    run(lambda: long.feed(TEXT[:100], progress=after_a_step), write)
    assert len(long.tokens) == 100
    assert len(short.tokens) == 6
