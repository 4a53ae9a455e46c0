"""Run llama.cpp's own tests of its server against `kvkeep serve` and count what passes.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36  # then unpack it
    python tests/clients/install.py ENVIRONMENTS llama-cpp
    python tests/clients/llama_cpp.py llama_cpp_python-0.3.36 ENVIRONMENTS/llama-cpp/bin/python

Prints a line a file and, with --failures FILE, writes which tests failed and why. Tests of other
models' files, of pictures, and of llama.cpp's router and agent are left out (`FILES`).
"""

import argparse
import collections
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from llama_server import STUB

HERE = Path(__file__).resolve().parent
NAMES = "tokenize template basic completion chat_completion security slot_save stream"
MORE = "compat_oai_responses compat_anthropic ctx_shift infill ignore_eos embedding metrics"
FILES = tuple(f"test_{name}.py" for name in f"{NAMES} {MORE}".split())
OUTCOMES = ("failure", "error", "skipped")
# Without the files of llama.cpp's models nothing is loaded before the first test.
PATCH = """
ServerPreset.load_all = staticmethod(lambda: None)
DEFAULT_REQUEST_TIMEOUT = 60
"""


def prepare(sources: Path, folder: Path) -> Path:
    """Copy the tests, and write a program that stands for llama.cpp's server; return its path."""
    shutil.copytree(sources / "vendor/llama.cpp/tools/server/tests", folder / "tests")
    with (folder / "tests/utils.py").open("a") as file:
        file.write(PATCH)
    program = folder / "llama-server"
    program.write_text(STUB.format(python=sys.executable, socket=str(folder / "socket")))
    program.chmod(0o755)
    return program


def run_tests(python: str, folder: Path, program: Path, files: tuple[str, ...]) -> Path:
    """Run the tests and return the file of their results."""
    results = folder / "results.xml"
    command = [python, "-m", "pytest", "-q", "-m", "not slow", "--tb=short"]
    command += ["--timeout=120", f"--junit-xml={results}", *(f"unit/{name}" for name in files)]
    variables = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(program), "PORT": str(free_port())}
    variables |= {"TMPDIR": str(folder), "PYTHONPATH": str(HERE.parent.parent)}
    server = [sys.executable, str(HERE / "llama_server.py"), str(folder / "socket")]
    with (folder / "log").open("w") as log, subprocess.Popen(server, env=variables) as servers:
        while not (folder / "socket").exists():
            time.sleep(0.1)
        subprocess.run(command, cwd=folder / "tests", env=variables, stdout=log, check=False)
        servers.terminate()
    return results


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, help="unpacked sources of llama-cpp-python")
    parser.add_argument("python", help="interpreter with what the tests need")
    parser.add_argument("--failures", type=Path, help="write the failing tests there")
    parser.add_argument("files", nargs="*", default=FILES, help="names of test files")
    options = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = {}
    failures = []
    with tempfile.TemporaryDirectory(prefix="kvkeep-llama-") as name:
        folder = Path(name)
        program = prepare(options.sources, folder)
        results = run_tests(options.python, folder, program, tuple(options.files))
        for case in ElementTree.parse(results).iter("testcase"):
            file = case.attrib["classname"].rpartition(".")[2]
            outcome = next((child for child in case if child.tag in OUTCOMES), None)
            kind = "passed" if outcome is None else outcome.tag
            counts.setdefault(file, collections.Counter())[kind] += 1
            if outcome is not None and kind != "skipped":
                failures.append(f"{file}::{case.attrib['name']}\n{outcome.text}\n")
    for file, count in counts.items():
        print(f"{file + '.py':30} {count['passed']:3} of {count.total():3} pass")
    print(f"{sum(count['passed'] for count in counts.values())} pass")
    if options.failures:
        options.failures.write_text("\n".join(failures))


if __name__ == "__main__":
    main()
