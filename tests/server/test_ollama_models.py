"""Ollama's routes about models."""

from typing import Any

import httpx
from server.conftest import RunningServer


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/api/{path}", json=body)


def test_the_model_is_listed_and_described(server: RunningServer) -> None:
    (listed,) = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert (listed["name"], listed["details"]["family"]) == ("smollm2", "llama")
    assert listed["size"] > 1_000_000
    assert listed["details"]["parameter_size"] == "134.52M"
    (loaded,) = httpx.get(f"{server.url}/api/ps").json()["models"]
    assert loaded["digest"] == listed["digest"]
    version = httpx.get(f"{server.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)  # Codex refuses older servers
    for name in ("smollm2", "smollm2:latest"):
        shown = post(server, "show", model=name).json()
        assert shown["model_info"]["llama.context_length"] == 2048
        assert {"completion", "tools"} <= set(shown["capabilities"])
        assert shown["template"]
    missing = post(server, "show", model="other")
    assert missing.status_code == 404
    assert "other" in missing.json()["error"]


def test_changes_of_models_are_refused_with_advice(server: RunningServer) -> None:
    for path in ("pull", "create", "copy", "push"):
        response = post(server, path)
        assert response.status_code == 400
        assert "kvkeep pull" in response.json()["error"]
