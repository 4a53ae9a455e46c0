"""A server on 127.0.0.1 that speaks the Hugging Face hub's API, as huggingface_hub uses it."""

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves the repositories in a folder, as OWNER/NAME/FILE.

    downloads: the file and first byte of each download. cut_after: if set, the connection is cut
    after this many bytes of files, and later downloads fail. architecture: of GGUF models, as the
    hub states it.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.downloads: list[tuple[str, int]] = []
        self.cut_after: int | None = None
        self.architecture: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "HubServer":
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/.*|/revision/.*)?", path):
            self._send_listing(match[1], (match[2] or "").startswith("/tree/"))
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.*)", path):
            self._send_file(match[1], match[2])
        else:
            self._send_error(404, "EntryNotFound")

    def _send_listing(self, repository: str, as_tree: bool) -> None:
        folder = self.server.folder / repository
        if not folder.is_dir():
            self._send_error(401, "RepoNotFound")
            return
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = [self._entry(path, folder, as_tree) for path in files]
        info: dict[str, Any] = {"id": repository, "sha": COMMIT, "siblings": entries}
        if self.server.architecture:
            info["gguf"] = {"architecture": self.server.architecture}
        self._send_json(entries if as_tree else info)

    def _entry(self, path: Path, folder: Path, as_tree: bool) -> dict[str, Any]:
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lfs = {"size": size, "pointerSize": 134}
        if as_tree:
            lfs |= {"oid": digest}
            return {"type": "file", "path": name, "size": size, "oid": digest[:40], "lfs": lfs}
        return {
            "rfilename": name,
            "size": size,
            "blobId": digest[:40],
            "lfs": lfs | {"sha256": digest},
        }

    def _send_file(self, repository: str, name: str) -> None:
        path = self.server.folder / repository / name
        if not path.is_file():
            self._send_error(404, "EntryNotFound")
            return
        content = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(match[1]) if match else 0
        if self.command == "GET":
            if self.server.cut_after == 0:
                self._send_error(500, "Unavailable")
                return
            self.server.downloads.append((name, first))
        self.send_response(206 if match else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - first))
        if match:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self._write(content[first:])

    def _write(self, content: bytes) -> None:
        if self.server.cut_after is None:
            self.wfile.write(content)
            return
        self.wfile.write(content[: self.server.cut_after])
        self.server.cut_after = max(0, self.server.cut_after - len(content))

    def _send_json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass
