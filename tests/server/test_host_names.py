"""Hosts and origins that a server allows, in the forms in which users write them."""

import httpx
import pytest
from server.conftest import RunningServer
from starlette.testclient import TestClient

from kvkeep.server.app import application
from kvkeep.server.host_names import host_name, parse_host, parse_origin


@pytest.mark.parametrize(
    ("allowed", "sent"),
    [
        ("2001:db8::1", "[2001:db8::1]:8080"),
        ("2001:0DB8:0::1", "[2001:db8::1]"),
        ("[2001:db8::1]:8080", "[2001:db8::1]"),
        ("fe80::1%eth0", "[fe80::1]:8080"),
        ("::", "[::]:8080"),
        ("[::1]", "[::1]:"),
        ("example.com:8080", "example.com:8080"),
        ("Example.com", "example.com"),
    ],
)
def test_a_host_is_allowed_in_any_form(server: RunningServer, allowed: str, sent: str) -> None:
    app = application(server.service, hosts=[allowed])
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/health", headers={"Host": sent}).status_code == 200
    for other in (
        "[2001:db8::2]",
        "example.com.evil",
        "[2001:db8::1]evil",
        "[2001:db8::1",
        "evil:80",
    ):
        assert client.get("/health", headers={"Host": other}).status_code == 421
    assert host_name(host_name(allowed)) == parse_host(allowed)


@pytest.mark.parametrize(
    ("allowed", "sent"),
    [
        ("http://x.example/", "http://x.example"),
        ("HTTPS://X.example:443", "https://x.example"),
        ("http://x.example:80/", "http://x.example"),
        ("http://x.example:8080", "http://x.example:8080"),
        ("http://[::1]:3000/", "http://[::1]:3000"),
        ("vscode-webview://abc", "vscode-webview://abc"),
        ("App://MyApp", "app://MyApp"),
        ("file://", "file://"),
    ],
)
def test_an_origin_is_allowed_in_any_form(server: RunningServer, allowed: str, sent: str) -> None:
    app = application(server.service, origins=[parse_origin(allowed)])
    client = TestClient(app, base_url="http://localhost")
    response: httpx.Response = client.get("/health", headers={"Origin": sent})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == sent
    assert client.get("/health", headers={"Origin": f"{sent}.evil"}).status_code == 403
