"""The OpenAPI document lists what the server serves."""

import pytest
from server.conftest import RunningServer


def test_the_document_lists_every_route_with_its_errors(server: RunningServer) -> None:
    with server.client() as client:
        document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/completion"} <= set(paths)
    assert "/v1/sessions/{name}/edit" in paths
    for path in paths.values():
        for operation in path.values():
            assert {"400", "401", "404", "429"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/page/../../x", "/%2e%2e/x", "/page/no.js"])
def test_unknown_paths_are_not_found(server: RunningServer, path: str) -> None:
    with server.client() as client:
        assert client.get(path).status_code == 404
