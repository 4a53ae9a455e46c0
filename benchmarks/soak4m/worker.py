"""One life of a run: restore the newest snapshot, evaluate windows, save, and be killed.

    python -m benchmarks.soak4m.worker FOLDER MODEL TOKENS RUN WINDOW STEP ... (by `soak4m` alone)

After each window the session is saved to a file, and then the state of the run, which names that
file, is replaced atomically. So a run goes on from its last window whenever it is killed.
"""

import fcntl
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import psutil
import torch

from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.soak4m.runs import Plan, Run, all_runs, new_session, open_model, stored_calibration
from benchmarks.soak4m.state import Restored, State, Window
from benchmarks.soak4m.text import Text, default_roots, make_text, stored_text
from kvkeep import Model, Session, Snapshot
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import write_json


class Life:
    """A process's part of a run.

    kill: ends the process as SIGKILL does. report: called with a line after each window.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        model: Model,
        text: Text,
        kill: Callable[[], NoReturn],
        report: Callable[[str], None],
    ) -> None:
        self.run, self.plan, self.folder, self.model = run, run.plan, folder, model
        self.ids, self.kill, self.report = text.ids, kill, report
        self.path = folder / f"{run.name}.json"
        self.state = State.load(self.path, run)
        self.started_at = self.state.tokens
        self.process = psutil.Process()
        self.session = self._open()

    def live(self) -> None:
        """Evaluate windows until the run is complete, or the process is killed."""
        while not self.state.is_complete:
            self._evaluate_window()
            if self.state.tokens % self.plan.kill_every == 0 and not self.state.is_complete:
                self._go_on_and_be_killed()

    def _open(self) -> Session:
        state = self.state
        state.lives += 1
        state.machines.append(asdict(describe_machine()))
        if not state.tokens:
            return self._new_session()
        snapshot = Snapshot.load(self._snapshot_path(state.tokens))
        calibration = stored_calibration(self.run, self.model, self.folder, self.ids)
        session = self.model.restore(snapshot, calibration=calibration)
        same_logits, same_next = logits_digest(session) == state.logits, None
        if state.next_logits is not None:
            fork = session.fork()
            fork.score(self._next_step())
            same_next = logits_digest(fork) == state.next_logits
        state.restored.append(Restored(state.tokens, same_logits, same_next))
        if not same_logits or same_next is False:
            write_json(self.path, asdict(state))
            raise InvalidArgument(
                f"{self.run.name}: the session restored at {state.tokens:,} tokens has other logits"
            )
        return session

    def _evaluate_window(self) -> None:
        state, plan = self.state, self.plan
        end = min(state.tokens + plan.window, self.run.tokens)
        ids, cpu, scores = self.ids[state.tokens : end].tolist(), 0.0, list[torch.Tensor]()
        for start in range(0, len(ids), plan.step):
            before = time.process_time()
            scores.append(self.session.score(ids[start : start + plan.step]))
            cpu += time.process_time() - before
        number, logprobs = math.ceil(end / plan.window), torch.cat(scores)
        rss_bytes, has_reference = self.process.memory_info().rss, len(ids) > plan.reference_from
        compared, fresh = None, None
        if has_reference and (number - 1) % plan.reference_every == plan.reference_every - 1:
            compared = perplexity(logprobs[plan.reference_from :])
            fresh = perplexity(self._new_session().score(ids)[plan.reference_from :])
        self.session.snapshot().save(self._snapshot_path(end))
        window = Window(
            tokens=end,
            perplexity=perplexity(logprobs[1:] if not state.tokens else logprobs),
            cpu_ms=rounded(1000 * cpu / len(ids)),
            life_windows=math.ceil((end - self.started_at) / plan.window),
            rss_bytes=rss_bytes,
            kv_bytes=self.session.cache.nbytes,
            cells=self.session.cache.cells,
            snapshot_bytes=self._snapshot_path(end).stat().st_size,
            compared=compared,
            fresh=fresh,
        )
        before_path = self._snapshot_path(state.tokens)
        state.tokens, state.next_logits = end, None
        state.logits = logits_digest(self.session)
        state.windows.append(window)
        write_json(self.path, asdict(state))
        before_path.unlink(missing_ok=True)
        self.report(progress_line(self.run, window))

    def _go_on_and_be_killed(self) -> None:
        """Evaluate one more step, store the digest of its logits, and end the process."""
        self.session.score(self._next_step())
        self.state.next_logits = logits_digest(self.session)
        write_json(self.path, asdict(self.state))
        self.kill()

    def _new_session(self) -> Session:
        calibration = stored_calibration(self.run, self.model, self.folder, self.ids)
        return new_session(self.run, self.model, calibration)

    def _next_step(self) -> list[int]:
        first = self.state.tokens
        numbers: list[int] = self.ids[first : first + self.plan.step].tolist()
        return numbers

    def _snapshot_path(self, tokens: int) -> Path:
        return self.folder / f"{self.run.name}-{tokens}.kvkeep"


def perplexity(logprobs: torch.Tensor) -> float:
    """Return the perplexity of tokens with these natural log probabilities."""
    return rounded(math.exp(min(700.0, -float(logprobs.mean()))))


def logits_digest(session: Session) -> str:
    """Return the SHA-256 of the bits of a session's last logits."""
    logits = session.logits
    assert logits is not None
    return hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest()


def progress_line(run: Run, window: Window) -> str:
    """Return a line of progress after a window."""
    beside = "" if window.fresh is None else f", {window.compared:.4g} beside {window.fresh:.4g}"
    return (
        f"{run.name}: {window.tokens:,} of {run.tokens:,} tokens, perplexity "
        f"{window.perplexity:.4g}{beside}, {window.rss_bytes / 1e6:,.0f} MB, "
        f"{window.cpu_ms:.3g} ms of CPU time a token"
    )


@contextmanager
def run_lock(folder: Path, name: str) -> Iterator[None]:
    """Wait until no other process works on a run."""
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Live one life of the run that the arguments, a JSON document, define."""
    arguments = json.loads(sys.argv[1])
    folder, plan = Path(arguments["folder"]), Plan(**arguments["plan"])
    run = all_runs(arguments["model"], arguments["tokens"], plan)[arguments["run"]]
    with run_lock(folder, run.name):
        model = open_model(run, folder)
        text = stored_text(
            folder,
            run.text_name,
            lambda: make_text(default_roots(), model.text.encode, run.tokens),
        )
        Life(run, folder, model, text, _kill, lambda line: print(line, flush=True)).live()


def _kill() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process goes on after SIGKILL")


if __name__ == "__main__":
    main()
