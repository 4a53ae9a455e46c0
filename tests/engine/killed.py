"""An engine in a process of its own that is killed, and what it had acknowledged by then.

The process is not forked from the tests' own, which has threads: a fork could inherit a lock that
is never released. A fork server without threads forks it.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from small_models import small_model

from kvkeep.engine import Engine, GeneratedToken, GenerationRequest, Limits
from kvkeep.session.sampling import Sampling

MODEL = small_model()
CELL = MODEL.session(64).cache.layout.cell_bytes
SETTINGS = {"max_kv_size": 64, "prefill_step": 16}
DRAWN = Sampling(temperature=1.0, seed=1)


def new_engine(folder: Path | None = None, cells: int = 10_000, **limits: float) -> Engine:
    """Return an engine with memory for so many cells."""
    all_limits = Limits(memory=cells * CELL, **limits)  # type: ignore[arg-type]
    return Engine(MODEL, settings=SETTINGS, limits=all_limits, folder=folder)


def text(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, 256) for _ in range(count))


def write(engine: Engine, name: str, count: int, prompt: tuple[int, ...] = ()) -> list[int]:
    answer = engine.generate(GenerationRequest(prompt, count, DRAWN, ignore_eos=True), name)
    return [event.token for event in answer if isinstance(event, GeneratedToken)]


Reports = list[tuple[str, int]]  # sessions, and how many tokens of each are acknowledged
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["engine.killed"])


def save_over_and_over(engine: Engine, reports: Connection) -> None:
    engine.create(name="a").result()
    write(engine, "a", 1, text(0, 40))
    while True:
        engine.save("a").result()
        reports.send(
            ("a", engine.inspect("a", "0", lambda record: len(record.live.tokens)).result())
        )
        write(engine, "a", 3)


def leave_something_unsaved(engine: Engine, reports: Connection) -> None:
    for name in ("kept", "new"):
        engine.create(name=name).result()
    write(engine, "kept", 5, text(0, 40))
    engine.save("kept").result()
    write(engine, "kept", 5)
    write(engine, "new", 5, text(1, 40))
    reports.send(("kept", 0))
    time.sleep(60)


def use_the_disk(engine: Engine, reports: Connection) -> None:
    """Save, evict, load, fork, snapshot and delete sessions; report what is acknowledged."""

    def acknowledged(name: str, tokens: int) -> None:
        reports.send((name, tokens))

    def held(name: str) -> int:
        return engine.inspect(name, "0", lambda record: len(record.live.tokens)).result()

    for name in ("a", "b"):
        engine.create(name=name).result()
        write(engine, name, 3, text(0, 40))
        engine.save(name).result()
        acknowledged(name, held(name))
    engine.fork("a", new_name="c").result()
    write(engine, "c", 4)
    engine.save("c").result()
    acknowledged("c", held("c"))
    engine.snapshot("a", "s").result()
    acknowledged("snapshot", held("a"))
    for name in ("d", "e"):  # no room for all: others go to disk, and come back
        engine.create(name=name).result()
        write(engine, name, 3, text(0, 40))
    write(engine, "a", 3)
    write(engine, "b", 3)
    engine.save("a").result()
    acknowledged("a", held("a"))
    acknowledged("b", 0)
    engine.delete("b").result()
    engine.change("a", "0", "name", lambda session: session.name("all", 0, 9)).result()
    engine.save("a").result()
    acknowledged("a", held("a"))


COMPACTED = {"max_kv_size": 300, "policy": "full"}  # of the session that `compact_and_save` makes


def compact_and_save(engine: Engine, reports: Connection) -> None:
    """Compact a session twice, with a fork of before; report each save by the tokens it holds."""

    def save(name: str) -> None:
        engine.save(name).result()
        held = engine.inspect(name, "0", lambda record: len(record.live.tokens)).result()
        reports.send((name, held))

    engine.create(name="a", **COMPACTED).result()
    write(engine, "a", 3, text(0, 200))
    engine.fork("a", new_name="before").result()
    for name in ("a", "before"):
        save(name)
    for _ in range(2):
        engine.change("a", "0", "compact", lambda session: session.compact(120)).result()
        write(engine, "a", 40)
        save("a")


def killed_after(
    folder: Path, work: Callable[[Engine, Connection], None], seconds: float
) -> Reports:
    """Kill an engine so long after its first acknowledgement; returns its reports."""
    reading, child = start_process(_serve, folder, work)
    first = reading.recv()
    time.sleep(seconds)
    child.kill()
    return [first, *_remaining(reading, child)]


def killed_at(
    folder: Path, moment: int, work: Callable[[Engine, Connection], None] = use_the_disk
) -> Reports | None:
    """Kill an engine before a change of the folder, counted from 0; None if there were fewer.

    A change is a Python audit event: a file opened for writing, renamed or removed.
    """
    reading, child = start_process(_serve_until, folder, moment, work)
    reports = _remaining(reading, child)
    return reports if child.exitcode == -signal.SIGKILL else None


def _start_server() -> None:
    """Import all that children need; the server finds it by the environment alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()


def start_process(target: Callable[..., None], *arguments: object):  # type: ignore[no-untyped-def]
    """Return one end of a pipe, and a process that calls the target with the other as the last."""
    _start_server()
    here, there = PROCESSES.Pipe()
    child = PROCESSES.Process(target=target, args=(*arguments, there))
    child.start()
    there.close()
    return here, child


def _remaining(reading: Connection, child: multiprocessing.process.BaseProcess) -> Reports:
    reports: Reports = []
    try:
        while True:
            reports.append(reading.recv())
    except EOFError:
        child.join()
        return reports


def _serve(folder: Path, work: Callable[[Engine, Connection], None], reports: Connection) -> None:
    with new_engine(folder, save_idle_after=1e9) as engine:
        work(engine, reports)


def _serve_until(
    folder: Path, moment: int, work: Callable[[Engine, Connection], None], reports: Connection
) -> None:
    left = [moment]

    def audited(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and str(arguments[1])[:1] != "r"
        if not (writes or event in ("os.rename", "os.remove", "os.link", "os.mkdir")):
            return
        if str(folder) not in str(arguments[0]):
            return
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    sys.addaudithook(audited)
    cells = 250 if work is use_the_disk else 5000
    with new_engine(folder, cells=cells, save_idle_after=1e9) as engine:
        work(engine, reports)
