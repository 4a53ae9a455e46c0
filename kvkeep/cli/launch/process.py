"""Running a client as a child process, and the shell script that does the same."""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from kvkeep.cli.launch.clients import ClientSettings

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP")  # those that the platform has


def run_client(command: Sequence[str], environment: Mapping[str, str | None]) -> int:
    """Run a client to its end; return its exit status, 128 + N if signal N ended it.

    Signals of this process are passed on. Those of the terminal reach the client by themselves.
    """
    variables = {name: value for name, value in _merged(environment).items() if value is not None}
    with _signals_held() as held:
        process = subprocess.Popen(command, env=variables)
        held.pass_on_to(process)
        status = process.wait()
    return status if status >= 0 else 128 - status


def _merged(environment: Mapping[str, str | None]) -> dict[str, str | None]:
    return {**os.environ, **environment}


class _SignalRelay:
    """Passes signals on to a process, also those that came before it was started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._waiting.append(signal_number)
        elif signal_number != signal.SIGINT or not _terminal_interrupts():
            self._process.send_signal(signal_number)

    def pass_on_to(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        for signal_number in self._waiting:
            process.send_signal(signal_number)


@contextmanager
def _signals_held() -> Iterator[_SignalRelay]:
    relay = _SignalRelay()
    numbers = [getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, for the client too
        numbers.remove(signal.SIGHUP)
    previous = {number: signal.signal(number, relay.handle) for number in numbers}
    try:
        yield relay
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _terminal_interrupts() -> bool:
    """Whether Ctrl-C in the terminal is sent to the client too, as to all of this process group."""
    with suppress(OSError), open(os.ctermid(), "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False  # there is no terminal


def write_files(settings: ClientSettings, folder: Path) -> None:
    """Write the files of a client's settings."""
    for name, text in settings.files.items():
        (folder / name).write_text(text, encoding="utf-8")


def shell_script(settings: ClientSettings, folder: Path, command: Sequence[str]) -> str:
    """Return the shell script that runs a client with its settings."""
    lines = [f"mkdir -p {shlex.quote(str(folder))}"] if settings.files else []
    for name, text in settings.files.items():
        lines += [f"cat > {shlex.quote(str(folder / name))} << 'END'", text.rstrip("\n"), "END"]
    for variable, value in settings.environment.items():
        lines.append(
            f"unset {variable}" if value is None else f"export {variable}={shlex.quote(value)}"
        )
    return "\n".join([*lines, shlex.join(command)])
