"""An S3 server of this machine, and a proxy before it by which things go wrong as they do far away.

The server is moto's. It looks at a condition and writes in two steps, so the proxy lets one request
pass at a time: whatever is tried here of writers that race is the protocol's doing.
"""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "kvkeep"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "any",
    "AWS_SECRET_ACCESS_KEY": "any",
    "AWS_REGION": "us-east-1",
}
# What can go wrong with a request: an answer of another kind, in its place or after it was done.
FAULTS = ("before", "after", "500", "500 after", "409", "412", "503", "truncated")


@dataclass
class ObjectServer:
    """endpoint: where S3 is spoken. fault: what goes wrong with a request of that method and path,
    asked at each; None for nothing. seen: methods and paths, and what went wrong."""

    endpoint: str
    fault: Callable[[str, str], str | None] = field(default=lambda method, path: None)
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.endpoint}


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    from moto.server import ThreadedMotoServer

    behind = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    behind.start()
    host, port = behind.get_host_and_port()
    asked = http.client.HTTPConnection(host, port)
    asked.request("PUT", f"/{BUCKET}", headers=_AUTHORISED)
    assert asked.getresponse().status == 200
    found = ObjectServer("")
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(found, host, port))
    proxy.daemon_threads = True
    found.endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
    serving = threading.Thread(target=proxy.serve_forever, daemon=True)
    serving.start()
    try:
        yield found
    finally:
        proxy.shutdown()
        proxy.server_close()
        behind.stop()


_AUTHORISED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
}


def _handler(server: ObjectServer, host: str, port: int) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *anything: Any) -> None:
            pass

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if len(body) < length:  # the client was killed
                self.close_connection = True
                return
            fault = server.fault(self.command, self.path)
            server.seen.append((self.command, self.path, fault))
            if fault == "before":
                self.close_connection = True
                return
            if fault in ("500", "503", "409", "412"):
                self.answer(int(fault), {}, b"")
                return
            with one_at_a_time:
                status, headers, content = self.asked(body)
            if fault == "after":
                self.close_connection = True
            elif fault == "500 after":
                self.answer(500, {}, b"")
            elif fault == "truncated" and content:
                self.answer(status, headers, content[: len(content) // 2], len(content))
                self.close_connection = True
            else:
                self.answer(status, headers, content)

        def asked(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            asked = http.client.HTTPConnection(host, port, timeout=60)
            try:
                asked.request(self.command, self.path, body, dict(self.headers))
                answer = asked.getresponse()
                return answer.status, dict(answer.headers), answer.read()
            finally:
                asked.close()

        def answer(
            self, status: int, headers: dict[str, str], content: bytes, length: int | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            if self.command == "HEAD" and status < 400:
                length = int(headers.get("Content-Length", headers.get("content-length", 0)))
            self.send_header("Content-Length", str(len(content) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    return Proxy
