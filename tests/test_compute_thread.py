"""One thread computes the steps of all: complete, in turn, and without a deadlock."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from small_models import small_model
from timeouts import PATIENCE
from torch import Tensor

from kvkeep.engine import Engine, GeneratedToken, GenerationRequest
from kvkeep.errors import ContextFull
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep
from kvkeep.runtime import worker
from kvkeep.session.session import Session

TEXT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(100)]


@pytest.fixture(autouse=True)
def new_worker() -> None:
    """As in a process that has just started."""
    worker.replace_worker()


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@contextmanager
def watched(decoder: Decoder, observe: Callable[[], object]) -> Iterator[None]:
    """Calls `observe` with each step, in the thread that computes it."""
    executor = decoder.executor

    class Watched:
        row_limit, rounding = executor.row_limit, executor.rounding

        def forward(
            self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None
        ) -> Tensor:
            observe()
            return executor.forward(tokens, step, input_norms)

        def logits(self, hidden: Tensor) -> Tensor:
            return executor.logits(hidden)

    decoder.executor = Watched()
    try:
        yield
    finally:
        decoder.executor = executor


def test_one_thread_computes_the_steps_of_all() -> None:
    model, threads = small_model(), list[int]()
    sessions = [model.session(48) for _ in range(4)]
    with watched(model.decoder, lambda: threads.append(threading.get_ident())):
        sessions[0].feed(TEXT[:5])
        sessions[0].next_token()
        for session in sessions[1:]:  # one after the other, each in a thread of its own
            in_a_thread(lambda session=session: (session.feed(TEXT[:5]), session.score(TEXT[:3])))
        sessions[0].next_token()
    assert len(threads) >= 9
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_long_work_is_computed_by_its_caller_and_leaves_no_team() -> None:
    model, threads = small_model(), list[int]()
    session, other = model.session(48), model.session(48)
    for each in (session, other):
        each.feed(TEXT[:20])

    def edit(edited: Session) -> None:
        edited.insert(5, TEXT[20:23])
        edited.rewind(2)

    with watched(model.decoder, lambda: threads.append(threading.get_ident())):
        edit(session)
        assert set(threads) == {threading.get_ident()}
        threads.clear()
        in_a_thread(lambda: edit(other))
        assert threads
        assert threading.get_ident() not in threads
    assert list(session.tokens) == list(other.tokens)


def test_an_idle_team_ends() -> None:
    """Otherwise it would be a second team for a program that computes by torch alone."""
    script = "import torch, threading, time\n" + TEAMS
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


TEAMS = f"""
import os
from kvkeep.engine.thread import EngineThread
from kvkeep.runtime import worker
from kvkeep.runtime.worker import _omp_pause

def threads():
    return len(os.listdir("/proc/self/task"))

@worker.computes_in_worker
def step():
    (torch.ones(2000, 2000) @ torch.ones(2000, 2000)).sum()
    return threads()

def require_fewer(than):
    until = time.monotonic() + {PATIENCE}
    while threads() >= than:
        assert time.monotonic() < until, threads()
        time.sleep(0.01)

if _omp_pause() is not None and os.path.isdir("/proc/self/task"):
    torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # a team of this thread's
    step()
    require_fewer(step())
    engine = EngineThread(lambda: False, 60, lambda: None)
    engine.start()
    within = engine.submit(step).result()
    require_fewer(within)
    assert step() <= within  # in the engine's thread, and no second team
    engine.close()
"""


@pytest.fixture
def interruptible() -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_long_work_and_nothing_has_changed() -> None:
    model = small_model()
    session = model.session(96)
    session.feed(TEXT[:90])
    steps = list[int]()

    def observe() -> None:
        steps.append(1)
        if len(steps) == 1:
            interrupt()

    with watched(model.decoder, observe), pytest.raises(KeyboardInterrupt):
        session.delete(1, 3, recompute="suffix")
    assert len(steps) == 1
    assert list(session.tokens) == TEXT[:90]
    session.next_token()


@pytest.mark.parametrize("engine", [False, True], ids=["alone", "engine"])
def test_a_step_is_computed_on_as_many_threads_as_its_caller_has(engine: bool) -> None:
    model, counts = small_model(), list[int]()
    session, before = model.session(48), torch.get_num_threads()
    session.feed(TEXT[:5])
    in_a_thread(session.next_token)

    def count_threads() -> None:
        counts.append(torch.get_num_threads())

    try:
        with hosted(model, engine) as host, watched(model.decoder, count_threads):
            for count in (2, 1):
                torch.set_num_threads(count)
                session.next_token()
            if host:
                host.generate(GenerationRequest(tuple(TEXT[:5]), 1)).text()
    finally:
        torch.set_num_threads(before)
    assert counts[:2] == [2, 1]
    assert counts[2:] == [before] * len(counts[2:])


@contextmanager
def hosted(model: Model, engine: bool) -> Iterator[Engine | None]:
    """An engine that has started, or none."""
    if not engine:
        yield None
        return
    with Engine(model, settings={"max_kv_size": 96}) as started:
        started.generate(GenerationRequest(tuple(TEXT[:5]), 1)).text()
        yield started


def test_an_error_is_raised_in_the_caller_and_other_steps_have_their_turn() -> None:
    model, errors = small_model(), list[BaseException]()
    full, other = model.session(8, policy="full"), model.session(48)
    other.feed(TEXT[:5])

    def overfill() -> None:
        try:
            full.feed(TEXT[:9])
        except ContextFull as error:
            errors.append(error)

    in_a_thread(overfill)
    assert len(errors) == 1
    assert list(full.tokens) == []
    alone = small_model().session(48)
    alone.feed(TEXT[:5])
    assert other.next_token() == alone.next_token()


@pytest.mark.parametrize("engine", [False, True], ids=["alone", "engine"])
def test_nothing_of_the_last_caller_is_held(engine: bool) -> None:
    model = small_model()
    model.session(48).feed(TEXT[:5])
    sessions = [model.session(48)]
    gone = weakref.ref(sessions[0])
    with hosted(model, engine):
        in_a_thread(lambda: sessions.pop().feed(TEXT[:5]))
        gc.collect()
        assert gone() is None


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("engine", [False, True], ids=["alone", "engine"])
def test_ctrl_c_waits_for_a_token_that_another_thread_has_begun_for_this_one(engine: bool) -> None:
    model = small_model()
    session, alone = model.session(48), small_model().session(48)
    for each in (session, alone):
        each.feed(TEXT[:5])
    with hosted(model, engine):
        in_a_thread(session.next_token)
        with watched(model.decoder, interrupt), pytest.raises(KeyboardInterrupt):
            session.next_token()
        assert len(session.tokens) == 7
    expected = [alone.next_token() for _ in range(3)]
    assert session.next_token() == expected[2]
    assert list(session.tokens) == list(alone.tokens)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("engine", [False, True], ids=["alone", "engine"])
def test_ctrl_c_ends_the_wait_for_a_turn_and_nothing_has_changed(engine: bool) -> None:
    model = small_model()
    session, other = model.session(48), model.session(48)
    session.feed(TEXT[:5])
    in_a_thread(lambda: other.feed(TEXT[:5]))
    computes, proceed, sampled = threading.Event(), threading.Event(), list[int]()

    def blocked() -> None:
        computes.set()
        assert proceed.wait(PATIENCE)

    with hosted(model, engine), watched(model.decoder, blocked):
        thread = threading.Thread(target=lambda: sampled.append(other.next_token()))
        thread.start()
        assert computes.wait(PATIENCE)
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            session.next_token()
        proceed.set()
        thread.join(PATIENCE)
    assert len(sampled) == 1
    assert list(session.tokens) == TEXT[:5]
    session.next_token()
    assert len(session.tokens) == 6


def test_an_engine_computes_its_own_steps_and_those_of_other_threads() -> None:
    model, idents = small_model(), list[int]()
    session = model.session(48)
    with hosted(model, True) as engine:
        assert engine is not None
        host = engine.call(threading.get_ident).result()
        with watched(model.decoder, lambda: idents.append(threading.get_ident())):
            generation = engine.generate(GenerationRequest(tuple(TEXT), 10**6, ignore_eos=True))
            while not isinstance(next(generation), GeneratedToken):
                pass
            session.feed(TEXT[:20])  # in its turn, while the engine generates
            before = len(generation.generated)
            for _ in range(5):
                session.next_token()
            idents_before = len(idents)
            session.rewind(1)  # by its caller, in its turn
            assert threading.get_ident() in idents[idents_before:]
            generation.cancel()
            while engine.totals().result().running:
                pass
            session.next_token()  # by an idle engine
        assert len(generation.generated) >= before
        assert set(idents) == {host, threading.get_ident()}
    with watched(model.decoder, lambda: idents.append(threading.get_ident())):
        session.next_token()
    assert idents[-1] not in (host, threading.get_ident())


def test_the_steps_of_threads_are_the_same_to_the_bit_with_an_engine_as_without() -> None:
    model = small_model()
    alone, session = model.session(48), model.session(48)
    alone.feed(TEXT[:60])
    expected = [alone.next_token() for _ in range(8)]
    with hosted(model, True):
        session.feed(TEXT[:60])
        assert [session.next_token() for _ in range(8)] == expected
    assert torch.equal(session.logits, alone.logits)


def test_other_threads_compute_while_the_engine_waits_for_something_else() -> None:
    """Even for a result of theirs: nothing waits for ever."""
    model = small_model()
    session, computed = model.session(48), threading.Event()
    with hosted(model, True) as engine:
        assert engine is not None
        waits = engine.call(lambda: computed.wait(PATIENCE))
        session.feed(TEXT[:20])
        computed.set()
        assert waits.result(PATIENCE)
        assert engine.generate(GenerationRequest(tuple(TEXT[:5]), 1)).text() is not None


def test_of_two_engines_one_computes_for_both_and_the_second_goes_on_alone() -> None:
    model = small_model()
    request = GenerationRequest(tuple(TEXT[:40]), 8, ignore_eos=True)
    with Engine(model, settings={"max_kv_size": 96}) as second:
        with hosted(model, True) as first:
            assert first is not None
            expected = first.generate(request).text()
            assert second.generate(request).text() == expected
        other = GenerationRequest(tuple(TEXT[40:]), 8, ignore_eos=True)
        assert second.generate(other).text()
        assert second.generate(request).text() == expected


def test_generations_and_steps_of_other_threads_run_within_a_compression() -> None:
    """Each in the engine's thread, which holds the lock until the compression has ended."""
    model, order = small_model(), list[str]()
    session = model.session(48)
    session.feed(TEXT[:5])
    with Engine(model, settings={"max_kv_size": 96, "policy": "full"}) as engine:
        engine.create(name="a").result()
        engine.generate(GenerationRequest(tuple(TEXT[:60]), 0), session="a").text()
        generation = engine.generate(GenerationRequest(tuple(TEXT[:9]), 80, ignore_eos=True))
        host = engine.call(threading.get_ident).result()
        requested = threading.Event()

        def outside() -> None:
            requested.set()
            session.next_token()
            order.append("outside")

        thread = threading.Thread(target=outside)

        def progress(cells: int) -> None:
            assert threading.get_ident() == host
            assert worker._worker.holds_lock
            if not requested.is_set():
                thread.start()
                assert requested.wait(PATIENCE)
            before = len(generation.generated)
            while "outside" not in order:  # run by this thread, which has the lock
                engine.yield_turn()
            order.append("generated" if len(generation.generated) > before else "prefilled")

        def compress(named: Session) -> None:
            named.compress(2.0, "kvzip", recent=8, progress=progress)
            order.append("compressed")

        engine.change("a", "0", "compress", compress).result()
        thread.join(PATIENCE)
        generation.cancel()
    assert order[-1] == "compressed"
    assert "generated" in order


FORKED = """
import os, signal, sys, threading
import torch
from packed_model import packed_model, spec_of
from kvkeep import Sampling
from kvkeep.engine import Engine, GenerationRequest

signal.alarm({patience})  # for the child, too, if it hangs
torch.set_num_threads(2)
model = packed_model(spec_of(), 4)
text = list(range(1, 60))
session, alone = model.session(48), model.session(48)
for each in (session, alone):
    each.feed(text)
if {in_threads}:
    thread = threading.Thread(target=lambda: alone.fork().next_token())
    thread.start()
    thread.join()
engine = Engine(model) if {engine} else None
if engine:
    engine.generate(GenerationRequest(tuple(text), 2)).text()
expected = [alone.next_token() for _ in range(3)]
child = os.fork()
if not child:
    signal.alarm({patience})
    session.feed(text[:20])
    session.rewind(20)
    again = model.session(48)
    again.feed(text)
    os._exit([again.next_token() for _ in range(3)] != expected)
_, status = os.waitpid(child, 0)
assert status == 0, status
session.next_token()
if engine:
    engine.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(("in_threads", "engine"), [(False, False), (True, False), (False, True)])
def test_a_forked_child_computes_and_so_does_its_parent(in_threads: bool, engine: bool) -> None:
    script = FORKED.format(patience=int(PATIENCE), in_threads=in_threads, engine=engine)
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", [False, True], ids=["alone", "engine"])
def test_an_error_that_is_dropped_holds_nothing_of_its_call(engine: bool) -> None:
    """Cells that a call used are freed at once, not when garbage is collected."""
    held: list[weakref.ref[object]] = []

    class Held:
        pass

    @worker.computes_in_worker
    def fails() -> None:
        used = Held()
        held.append(weakref.ref(used))
        raise ContextFull("no room")

    with hosted(small_model(), engine):
        gc.disable()
        try:
            for _ in range(3):
                with suppress(ContextFull):
                    fails()
            # Once this call is done, the thread holds no earlier one.
            worker.computes_in_worker(lambda: None)()
            assert [each() for each in held] == [None] * 3
        finally:
            gc.enable()
