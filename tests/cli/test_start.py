"""Ctrl-C during startup, and standard streams that are closed or fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from timeouts import PATIENCE

# A module that Python imports first: it sends a signal during a later import.
SITE = """
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == os.environ["AT_IMPORT"]:
            sys.meta_path.remove(Finder)
            signal.raise_signal(int(os.environ["SIGNAL"]))
sys.meta_path.insert(0, Finder)
"""


@pytest.fixture
def interrupted(start, tmp_path: Path):
    """Send a command a signal when it imports a module; return its status and stderr."""
    (tmp_path / "sitecustomize.py").write_text(SITE)

    def call(module: str, number: int, *arguments: object) -> tuple[int, str]:
        places = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        asked = {"AT_IMPORT": module, "SIGNAL": str(int(number)), "PYTHONPATH": places}
        process = start(*arguments, environment=asked)
        out, said = process.communicate(b"Hi\n", timeout=PATIENCE)
        assert out == b""
        return process.returncode, said.decode()

    return call


@pytest.mark.parametrize(
    "module",
    [
        *("click", "kvkeep.cli.main", "kvkeep.cli.chat", "filelock"),
        *("numpy", "torch._C", "torch.nn", "jinja2"),
    ],
)
def test_ctrl_c_during_startup_is_silent(interrupted, tiny, monkeypatch, tmp_path, module):
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    status, said = interrupted(module, signal.SIGINT, "chat", "--session", "s", "-q", *tiny)
    assert (status, said) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_during_startup_are_silent(interrupted, tiny, number) -> None:
    status, said = interrupted("numpy", number, "generate", "-q", *tiny)
    assert (status, said) == (128 + number, "")


def _closed(*numbers: int):
    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


@pytest.mark.parametrize("numbers", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_change_no_result(
    start, invoke, tiny, tmp_path: Path, numbers: tuple[int, ...]
) -> None:
    file = tmp_path / "report.json"
    asked = ["generate", "-p", "Once", "-n", 3, "--seed", 1, *tiny]
    text = invoke(*asked).stdout.encode()
    process = start(*asked, "--report", file, preexec_fn=_closed(*numbers))
    out, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert out == (b"" if 1 in numbers else text)
    assert said.startswith(b"" if 2 in numbers else b"prompt 1 at")
    assert said.count(b"\n") == (0 if 2 in numbers else 1)
    assert json.loads(file.read_text())["generated_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "closed", "status", "said"),
    [
        (["generate"], (0,), 2, "the prompt is empty"),
        (["chat", "-q"], (0,), 0, ""),
        (["generate", "-p", "x", "-m", "no-such-model"], (1,), 2, "no model"),
        (["generate", "-p", "x", "-m", "no-such-model"], (2,), 2, ""),
        (["--help"], (1,), 0, ""),
        (["sessions", "list"], (0, 1, 2), 0, ""),
        (["--bogus"], (2,), 2, ""),
    ],
)
def test_errors_with_closed_streams(start, tiny, arguments, closed, status, said) -> None:
    model = tiny if "-m" not in arguments and arguments[0] in ("generate", "chat") else []
    process = start(*arguments, *model, preexec_fn=_closed(*closed))
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert b"Traceback" not in out + err
    assert said in err.decode()
    assert err.count(b"\n") == bool(said)
    assert not out


@pytest.mark.parametrize("command", [["--help"], ["models"], ["generate", "-p", "x", "-n", "2"]])
def test_output_that_cannot_be_written_is_an_error(start, tiny, command) -> None:
    with open("/dev/full", "wb") as full:
        model = [*tiny, "-q"] if command[0] == "generate" else []
        process = start(*command, *model, stdout=full)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert said.decode().splitlines() == ["kvkeep: error: No space left on device"]


@pytest.mark.parametrize("command", [["--help"], ["models"], ["generate", "--help"]])
def test_a_pipe_closed_before_the_start_is_not_an_error(start, command) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*command, stdout=writer)
    os.close(writer)
    _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (141, b"")


def test_a_closed_stderr_does_not_end_the_command(start, tiny, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    options = ("-n", 3, "--temperature", 0, "--max-kv-size", 64, *tiny)
    process = start("chat", *options, stderr=writer)
    out, _ = process.communicate(b"Hi\n/memory\n/nope\nAnd?\n", timeout=PATIENCE)
    assert process.returncode == 0
    assert out.count(b"\n") >= 2
    os.close(writer)


NOT_TEXT = os.fsdecode(b"a\xff")


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["generate", "-p", NOT_TEXT],
            ["generate", "-f", NOT_TEXT],
            ["chat", "--system", NOT_TEXT],
        ),
        ["generate", "-p", "x", "-m", NOT_TEXT],
        *(
            ["generate", "-p", "x", option, NOT_TEXT]
            for option in ("--stop", "--device", "--policy", "--session", "--max-kv-size", "--seed")
        ),
        *(["pull", NOT_TEXT], ["why", "-p", NOT_TEXT], ["calibrate", NOT_TEXT, "-o", NOT_TEXT]),
        *(["sessions", "show", NOT_TEXT], ["sessions", "export", NOT_TEXT, NOT_TEXT]),
        *(["sessions", "rm", NOT_TEXT], [NOT_TEXT], ["generate", NOT_TEXT]),
    ],
)
def test_arguments_that_are_not_utf8_are_one_line_errors(invoke, home, arguments) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("kvkeep: error: ")


def test_an_argument_that_is_not_utf8_in_a_new_process(home: Path) -> None:
    command = [sys.executable.encode(), b"-m", b"kvkeep", b"generate", b"-p", b"a\xff"]
    done = subprocess.run(command, check=False, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert b"kvkeep: error: the prompt is not UTF-8 text from character 1 on" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
