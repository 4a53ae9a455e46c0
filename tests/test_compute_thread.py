"""Once a second thread computes, one thread does it for all: whole, in turn, and no one hangs."""

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
from patience import PATIENCE
from small import small_model
from torch import Tensor

from kvkeep.errors import ContextFull
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import AnyStep
from kvkeep.runtime import worker
from kvkeep.runtime.compute_thread import ComputeThread
from kvkeep.session.session import Session

TEXT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(100)]


@pytest.fixture(autouse=True)
def nobody_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that begins."""
    monkeypatch.setattr(worker, "_TURNS", worker._Turns())


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@contextmanager
def watched(decoder: Decoder, seen: Callable[[], object]) -> Iterator[None]:
    """Calls `seen` with each step, in the thread that computes it."""
    usual = decoder.executor

    class Watched:
        def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
            seen()
            return usual.hidden(tokens, step)

        def logits(self, hidden: Tensor) -> Tensor:
            return usual.logits(hidden)

    decoder.executor = Watched()
    try:
        yield
    finally:
        decoder.executor = usual


def test_one_thread_computes_steps_for_all() -> None:
    model, found = small_model(), list[int]()
    sessions = [model.session(48) for _ in range(4)]
    with watched(model.decoder, lambda: found.append(threading.get_ident())):
        sessions[0].feed(TEXT[:5])
        sessions[0].next_token()
        for session in sessions[1:]:  # one after the other, each in a thread of its own
            in_a_thread(lambda session=session: (session.feed(TEXT[:5]), session.score(TEXT[:3])))
        sessions[0].next_token()
    assert len(found) >= 9
    assert len(set(found)) == 1
    assert threading.get_ident() not in found


def test_what_may_take_long_is_computed_by_who_asks_and_leaves_no_team() -> None:
    model, found = small_model(), list[int]()
    session, other = model.session(48), model.session(48)
    for each in (session, other):
        each.feed(TEXT[:20])

    def edit(edited: Session) -> None:
        edited.insert(5, TEXT[20:23])
        edited.rewind(2)

    with watched(model.decoder, lambda: found.append(threading.get_ident())):
        edit(session)
        assert set(found) == {threading.get_ident()}
        found.clear()
        in_a_thread(lambda: edit(other))
        assert found
        assert threading.get_ident() not in found
    assert list(session.tokens) == list(other.tokens)


def test_a_team_that_nobody_asks_ends() -> None:
    """Else it would be one too many for who computes by torch alone."""
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
from kvkeep.runtime import worker
from kvkeep.runtime.compute_thread import _pause

def threads():
    return len(os.listdir("/proc/self/task"))

@worker.computes
def step():
    (torch.ones(2000, 2000) @ torch.ones(2000, 2000)).sum()
    return threads()

if _pause() is not None and os.path.isdir("/proc/self/task"):
    torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # a team of this thread's
    step()
    within = step()
    until = time.monotonic() + {PATIENCE}
    while threads() >= within:
        assert time.monotonic() < until, threads()
        time.sleep(0.01)
"""


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_breaks_off_what_may_take_long_and_nothing_comes_of_it() -> None:
    model = small_model()
    session = model.session(96)
    session.feed(TEXT[:90])
    steps = list[int]()

    def seen() -> None:
        steps.append(1)
        if len(steps) == 1:
            interrupt()

    with watched(model.decoder, seen), pytest.raises(KeyboardInterrupt):
        session.delete(1, 3, recompute="suffix")
    assert len(steps) == 1
    assert list(session.tokens) == TEXT[:90]
    session.next_token()


def test_it_computes_on_as_many_threads_as_who_asked() -> None:
    model, found = small_model(), list[int]()
    session, usual = model.session(48), torch.get_num_threads()
    session.feed(TEXT[:5])
    in_a_thread(session.next_token)
    try:
        with watched(model.decoder, lambda: found.append(torch.get_num_threads())):
            for count in (2, 1):
                torch.set_num_threads(count)
                session.next_token()
    finally:
        torch.set_num_threads(usual)
    assert found == [2, 1]


def test_an_error_is_raised_where_it_was_asked_and_others_have_their_turn() -> None:
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


def test_nothing_of_who_asked_last_is_held() -> None:
    model = small_model()
    model.session(48).feed(TEXT[:5])
    sessions = [model.session(48)]
    gone = weakref.ref(sessions[0])
    in_a_thread(lambda: sessions.pop().feed(TEXT[:5]))
    gc.collect()
    assert gone() is None


@pytest.fixture
def interruptible() -> Iterator[None]:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_waits_for_a_token_that_another_thread_has_begun_for_this_one() -> None:
    model = small_model()
    session, alone = model.session(48), small_model().session(48)
    for each in (session, alone):
        each.feed(TEXT[:5])
    in_a_thread(session.next_token)
    with watched(model.decoder, interrupt), pytest.raises(KeyboardInterrupt):
        session.next_token()
    assert len(session.tokens) == 7
    wanted = [alone.next_token() for _ in range(3)]
    assert session.next_token() == wanted[2]
    assert list(session.tokens) == list(alone.tokens)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_wait_for_a_turn_and_nothing_comes_of_it() -> None:
    model = small_model()
    session, other = model.session(48), model.session(48)
    session.feed(TEXT[:5])
    in_a_thread(lambda: other.feed(TEXT[:5]))
    computes, goes_on, written = threading.Event(), threading.Event(), list[int]()

    def blocked() -> None:
        computes.set()
        assert goes_on.wait(PATIENCE)

    with watched(model.decoder, blocked):
        writer = threading.Thread(target=lambda: written.append(other.next_token()))
        writer.start()
        assert computes.wait(PATIENCE)
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            session.next_token()
        goes_on.set()
        writer.join(PATIENCE)
    assert len(written) == 1
    assert list(session.tokens) == TEXT[:5]
    session.next_token()
    assert len(session.tokens) == 6


FORKED = """
import os, signal, sys, threading
import torch
from packed_model import packed_model, spec_of
from kvkeep import Sampling

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
wanted = [alone.next_token() for _ in range(3)]
child = os.fork()
if not child:
    signal.alarm({patience})
    session.feed(text[:20])
    session.rewind(20)
    again = model.session(48)
    again.feed(text)
    os._exit([again.next_token() for _ in range(3)] != wanted)
_, status = os.waitpid(child, 0)
assert status == 0, status
session.next_token()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("in_threads", [False, True])
def test_a_forked_child_computes_and_so_does_its_parent(in_threads: bool) -> None:
    script = FORKED.format(patience=int(PATIENCE), in_threads=in_threads)
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


def test_an_error_that_is_dropped_holds_nothing_of_its_call() -> None:
    """Cells that a call looked at go at once, not when garbage is collected."""
    held: list[weakref.ref[object]] = []

    class Held:
        pass

    def fails() -> None:
        looked_at = Held()
        held.append(weakref.ref(looked_at))
        raise ContextFull("no room")

    thread = ComputeThread()
    gc.disable()
    try:
        for _ in range(3):
            with suppress(ContextFull):
                thread.done(fails)
        thread.done(lambda: None)  # by then the thread has let go of the last one
        assert [each() for each in held] == [None] * 3
    finally:
        gc.enable()
