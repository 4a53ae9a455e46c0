"""`kvkeep serve` with the command line of llama.cpp's server, as its tests start it.

    python llama_server.py SOCKET    # waits at a Unix socket for command lines, as JSON lists

Each command line starts a server in a fork of this process, which has imported everything, since
llama.cpp's tests start a server each. A connection carries the exit status when the server has
ended; a line, or its other end being closed, ends the server.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

STUB = """#!{python} -IS
import json, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
server.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
signal.signal(signal.SIGTERM, lambda *_: server.sendall(b"end\\n"))
status = server.recv(16)
sys.exit(int(status or 1))
"""


def serve_arguments(words: list[str], folder: Path) -> list[str]:
    """Return the arguments of `kvkeep` for those of llama.cpp's server.

    Options without a counterpart are dropped. A session has as many tokens as one of llama.cpp's
    slots, which share the context evenly.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="8080")
    parser.add_argument("--alias")
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--context-shift", action="store_true")
    parser.add_argument("--api-key")
    options = parser.parse_known_args(words)[0]
    slots = 1 if options.kv_unified else options.parallel
    arguments = ["serve", "--quiet", "--host", options.host, "--port", options.port]
    arguments += ["--max-kv-size", str(max(options.ctx_size // slots, 64))]
    arguments += ["--policy", "shift" if options.context_shift else "full"]
    if options.alias:
        arguments += ["--alias", options.alias]
    if options.api_key:
        (folder / "keys").write_text(f"{options.api_key}\n")
        arguments += ["--api-key-file", str(folder / "keys")]
    return [*arguments, "--store", str(folder / "sessions")]


def run_server(connection: socket.socket, words: list[str]) -> None:
    """Run a server in a fork and report its exit status to the connection."""
    folder = Path(tempfile.mkdtemp())
    child = os.fork()
    if child == 0:
        from kvkeep.cli.main import main

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = 0
        try:
            main(serve_arguments(words, folder), prog_name="kvkeep")
        except SystemExit as error:
            status = int(error.code or 0)
        finally:
            os._exit(status)

    def wait() -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(abs(status)).encode())
        connection.close()
        shutil.rmtree(folder, ignore_errors=True)

    def end() -> None:
        connection.recv(16)  # a line, or the end of a stub that was killed
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    threading.Thread(target=end, daemon=True).start()


def main() -> None:
    import kvkeep.fleet.replica
    import kvkeep.server.lifecycle  # noqa: F401

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        while True:
            connection = listener.accept()[0]
            line = connection.makefile("r").readline()
            if line:
                run_server(connection, json.loads(line))


if __name__ == "__main__":
    main()
