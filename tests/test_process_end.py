"""The end of a process: daemon threads stop computing, and work at exit is done."""

import subprocess
import sys
from pathlib import Path

import pytest
from timeouts import PATIENCE


def run_script(script: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


FEEDS_FOR_EVER = """
import threading
from small_models import small_model
session, started = small_model().session(2048, prefill_step=512), threading.Event()
def run():
    while True:
        session.feed([7] * 512)
        started.set()
threading.Thread(target=run, daemon=True).start()
started.wait()
"""
ENGINE_NOT_CLOSED = """
from small_models import small_model
from kvkeep.engine import Engine, GenerationRequest
engine = Engine(small_model())
generation = engine.generate(GenerationRequest((1, 2, 3), None, ignore_eos=True))
next(generation)
"""
FREES_TENSORS_BETWEEN_STEPS = """
import torch
from small_models import small_model
from kvkeep.engine import Engine, GenerationRequest
engine, calls = Engine(small_model()), []
def free_tensors(token):
    calls.append(token)
    for _ in range(20_000):
        torch.empty(1)
request = GenerationRequest((1, 2, 3), None, ignore_eos=True)
generation = engine.submit(request, listener=free_tensors).result()[0]
while not calls:
    pass
"""
SCRIPTS = {
    "thread": FEEDS_FOR_EVER,
    "engine": ENGINE_NOT_CLOSED,
    "between steps": FREES_TENSORS_BETWEEN_STEPS,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_process_ends_while_a_daemon_thread_computes(script: str) -> None:
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_engine_can_be_closed_at_exit() -> None:
    script = f"""
import atexit
engines = []
atexit.register(lambda: engines[0].close(grace=1.0))
{ENGINE_NOT_CLOSED}
engines.append(engine)
"""
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_engine_answers_no_calls_at_exit() -> None:
    """It answers callbacks registered after kvkeep's import; those registered before run later."""
    script = f"""
import atexit
calls = []
def ask():
    try:
        print(calls[0].sessions().result())
    except Exception as error:
        print(error)
atexit.register(ask)
{ENGINE_NOT_CLOSED}
calls.append(engine)
atexit.register(lambda: print(len(engine.sessions().result())))
"""
    done = run_script(script)
    refusal = b"the process ends: the engine can only be closed"
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, [b"0", refusal], b"")


def test_work_at_exit_is_done_by_the_ending_thread() -> None:
    """Callbacks of `atexit` can compute, whether they were registered before kvkeep or after."""
    script = """
import atexit
sessions = []
atexit.register(lambda: print(sessions[0].feed([5, 6]).tokens))
from small_models import small_model
sessions.append(small_model().session(64))
atexit.register(lambda: print(sessions[0].feed([5, 6, 7]).tokens))
sessions[0].feed([1])
"""
    done = run_script(script)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [b"3", b"2"], b"")
