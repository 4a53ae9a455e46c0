"""An engine in a process of its own that is killed, and what it had acknowledged by then.

The process is not forked from the tests' own: with threads in it, which have computed, a fork may
inherit a lock that nobody lets go of. A server that has none forks it.
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
from small import small_model

from kvkeep.engine import Engine, GeneratedToken, GenerationRequest, Limits
from kvkeep.session.sampling import Sampling

MODEL = small_model()
CELL = MODEL.session(64).cache.layout.cell_bytes
SETTINGS = {"max_kv_size": 64, "prefill_step": 16}
DRAWN = Sampling(temperature=1.0, seed=1)


def engine(folder: Path | None = None, cells: int = 10_000, **limits: float) -> Engine:
    """With memory for so many cells."""
    given = Limits(memory=cells * CELL, **limits)  # type: ignore[arg-type]
    return Engine(MODEL, settings=SETTINGS, limits=given, folder=folder)


def text(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, 256) for _ in range(count))


def write(made: Engine, name: str, count: int, prompt: tuple[int, ...] = ()) -> list[int]:
    answer = made.generate(GenerationRequest(prompt, count, DRAWN, ignore_eos=True), name)
    return [event.token for event in answer if isinstance(event, GeneratedToken)]


Told = list[tuple[str, int]]  # sessions, and how many tokens of each are acknowledged
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["engine.killed"])


def saves_over_and_over(made: Engine, told: Connection) -> None:
    made.create(name="a").result()
    write(made, "a", 1, text(0, 40))
    while True:
        made.save("a").result()
        told.send(("a", made.inspect("a", "0", lambda kept: len(kept.live.tokens)).result()))
        write(made, "a", 3)


def leaves_something_unsaved(made: Engine, told: Connection) -> None:
    for name in ("kept", "new"):
        made.create(name=name).result()
    write(made, "kept", 5, text(0, 40))
    made.save("kept").result()
    write(made, "kept", 5)
    write(made, "new", 5, text(1, 40))
    told.send(("kept", 0))
    time.sleep(60)


def all_that_touches_the_disk(made: Engine, told: Connection) -> None:
    """Saves, moves to disk and back, forks, snapshots, deletes; says what is acknowledged."""

    def acknowledged(name: str, tokens: int) -> None:
        told.send((name, tokens))

    def held(name: str) -> int:
        return made.inspect(name, "0", lambda kept: len(kept.live.tokens)).result()

    for name in ("a", "b"):
        made.create(name=name).result()
        write(made, name, 3, text(0, 40))
        made.save(name).result()
        acknowledged(name, held(name))
    made.fork("a", new="c").result()
    write(made, "c", 4)
    made.save("c").result()
    acknowledged("c", held("c"))
    made.snapshot("a", "s").result()
    acknowledged("snapshot", held("a"))
    for name in ("d", "e"):  # no room for all: others go to disk, and come back
        made.create(name=name).result()
        write(made, name, 3, text(0, 40))
    write(made, "a", 3)
    write(made, "b", 3)
    made.save("a").result()
    acknowledged("a", held("a"))
    acknowledged("b", 0)
    made.delete("b").result()
    made.change("a", "0", "name", lambda session: session.name("all", 0, 9)).result()
    made.save("a").result()
    acknowledged("a", held("a"))


def killed_after(folder: Path, work: Callable[[Engine, Connection], None], seconds: float) -> Told:
    """So long after the first thing was acknowledged."""
    reading, child = _begun(_serve, folder, work)
    first = reading.recv()
    time.sleep(seconds)
    child.kill()
    return [first, *_rest(reading, child)]


def killed_at(folder: Path, moment: int) -> Told | None:
    """Before the so-many-th change of the folder; None if there were fewer.

    A change is what Python tells its auditors of: a file opened to be written, renamed, removed.
    """
    reading, child = _begun(_serve_until, folder, moment)
    told = _rest(reading, child)
    return told if child.exitcode == -signal.SIGKILL else None


def _start_server() -> None:
    """With all that children need imported; it is not told where that is but by the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()


def _begun(target: Callable[..., None], *arguments: object):  # type: ignore[no-untyped-def]
    _start_server()
    reading, writing = _PROCESSES.Pipe(duplex=False)
    child = _PROCESSES.Process(target=target, args=(*arguments, writing))
    child.start()
    writing.close()
    return reading, child


def _rest(reading: Connection, child: multiprocessing.process.BaseProcess) -> Told:
    told: Told = []
    try:
        while True:
            told.append(reading.recv())
    except EOFError:
        child.join()
        return told


def _serve(folder: Path, work: Callable[[Engine, Connection], None], told: Connection) -> None:
    with engine(folder, save_idle_after=1e9) as made:
        work(made, told)


def _serve_until(folder: Path, moment: int, told: Connection) -> None:
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
    with engine(folder, cells=250, save_idle_after=1e9) as made:
        all_that_touches_the_disk(made, told)
