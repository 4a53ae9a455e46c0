"""Time and memory that hostile requests take from a server, and how long others wait meanwhile.

    python -m benchmarks.hostile_requests --out results.json

Starts `kvkeep serve`, sends one request after another, and prints for each: the status, the seconds
until its answer, the longest that `/health` took meanwhile, the server's processor time, and how
far its memory rose above what it was before.
"""

import http.client
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import httpx
import psutil

from benchmarks.command import Measurement, model_option, out_option, write_record
from benchmarks.hostile_cases import HostileCase, hostile_cases

_TIMEOUT = 150.0  # seconds


@dataclass(frozen=True)
class Cost:
    """status: 0 for none. megabytes: of resident memory, above that before the request."""

    name: str
    status: int
    seconds: float
    health_seconds: float
    cpu_seconds: float
    megabytes: float
    answer: str


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, model: str, folder: Path):
        self._command = [sys.executable, "-m", "kvkeep", "serve", "-m", model, "--port", "0"]
        self._command += ["--store", str(folder), "--max-kv-size", "2048"]
        self._log = (folder / "log").open("w+")
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self._process = subprocess.Popen(self._command, stderr=self._log, stdout=self._log)
        self.port = 0
        while not self.port:
            time.sleep(0.2)
            if self._process.poll() is not None:
                raise RuntimeError(Path(self._log.name).read_text()[-2000:])
            listening = psutil.Process(self._process.pid).net_connections("tcp")
            self.port = next((c.laddr.port for c in listening if c.status == "LISTEN"), 0)
        httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=60).raise_for_status()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def cost(self, case: HostileCase) -> Cost:
        """Send a request; measure it. Restarts the server if it does not answer in time."""
        body, process = case.body(), psutil.Process(self._process.pid)
        self._reset_peak()
        before, start_cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
        with self._health_polled() as health:
            start = time.perf_counter()
            status, answer = self._post(case, body)
            seconds = time.perf_counter() - start
        if self._process.poll() is not None:
            self.start()
            return Cost(case.name, 0, seconds, max(health), 0, 0, "the server died")
        cpu_seconds = sum(process.cpu_times()[:2]) - start_cpu
        megabytes = max(0.0, (self._peak_bytes() - before) / 1e6)
        if status == 0:
            self.stop()
            self.start()
        return Cost(case.name, status, seconds, max(health), cpu_seconds, megabytes, answer)

    def _post(self, case: HostileCase, body: bytes) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", **case.headers}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT)
        try:
            connection.request("POST", case.path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(2000).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()

    @contextmanager
    def _health_polled(self) -> Iterator[list[float]]:
        done, waits = threading.Event(), [0.0]

        def poll() -> None:
            with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=_TIMEOUT) as client:
                while not done.wait(0.02):
                    start = time.perf_counter()
                    try:
                        client.get("/health")
                    except httpx.HTTPError:
                        if self._process.poll() is not None:
                            return
                    waits.append(time.perf_counter() - start)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield waits
        finally:
            done.set()
            thread.join(_TIMEOUT)

    def _reset_peak(self) -> None:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def _peak_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@click.command(cls=Measurement)
@model_option
@click.option("--only", default="", help="Only requests whose names contain this.")
@out_option
def main(name: str, only: str, out: Path | None) -> None:
    """Measure hostile requests against a server."""
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(name, Path(folder))
        try:
            server.cost(next(hostile_cases()))  # imports, and the tokenizer of constraints
            server.cost(_WARM_UP)
            click.echo("status  seconds   health      cpu       MB  request")
            for case in hostile_cases():
                if only in case.name:
                    cost = server.cost(case)
                    costs.append(cost)
                    click.echo(
                        f"{cost.status:6} {cost.seconds:8.2f} {cost.health_seconds:8.2f} "
                        f"{cost.cpu_seconds:8.2f} {cost.megabytes:8.0f}  {cost.name}"
                    )
        finally:
            server.stop()
    write_record(out, name, costs=[asdict(cost) for cost in costs])


_WARM_UP = HostileCase(
    "", "/completion", lambda: b'{"prompt":"x","n_predict":1,"json_schema":{"type":"integer"}}'
)


if __name__ == "__main__":
    main()
