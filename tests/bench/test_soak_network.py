"""The proxy by which the users of a server get a network with faults."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from benchmarks.soak_faults.network import Network

CONTENT = bytes(range(256)) * 400


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def network() -> Iterator[Network]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = Network(server.server_address[1])
    yield proxy
    proxy.close()
    server.shutdown()
    server.server_close()


def get(network: Network) -> bytes:
    return httpx.get(f"http://127.0.0.1:{network.port}", timeout=60).content


def outcomes_during(network: Network, fault: str, seconds: float) -> list[bytes | Exception]:
    """Ask again and again while a fault lasts; return contents and errors."""
    thread = threading.Thread(target=getattr(network, fault), args=(seconds,))
    outcomes = list[bytes | Exception]()
    thread.start()
    while thread.is_alive():
        try:
            outcomes.append(get(network))
        except httpx.TransportError as error:
            outcomes.append(error)
    return outcomes


def test_bytes_pass_unchanged(network: Network) -> None:
    assert get(network) == CONTENT


def test_a_cut_network_loses_connections_and_no_bytes_of_whole_responses(network: Network) -> None:
    kinds = set[type]()
    while not (
        httpx.ConnectError in kinds and kinds & {httpx.ReadError, httpx.RemoteProtocolError}
    ):
        outcomes = outcomes_during(network, "cut", 1.0)
        kinds |= {type(outcome) for outcome in outcomes}
        assert {outcome for outcome in outcomes if isinstance(outcome, bytes)} <= {CONTENT}
    assert get(network) == CONTENT


def test_a_slow_network_loses_nothing(network: Network) -> None:
    outcomes = outcomes_during(network, "slow", 0.5)
    assert set(outcomes) == {CONTENT}
    assert get(network) == CONTENT
