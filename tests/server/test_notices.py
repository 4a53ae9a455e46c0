"""Headers that name the ignored fields of a request; refused fields."""

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.conftest import RunningServer

from kvkeep.server.notices import Notices

MESSAGES = [{"role": "user", "content": "Hi"}]
IGNORED = "X-Kvkeep-Ignored"
HARMLESS = {
    "model": "smollm2",
    "user": "ada",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "cache_control": {"type": "ephemeral"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/completion": {"prompt": "Hi", "n_predict": 1},
}


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json={**BODIES[path], **fields})


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named_in_a_header(
    server: RunningServer, path: str, stream: bool
) -> None:
    response = post(server, path, stream=stream, typical_p=0.5, watermark=True, **HARMLESS)
    assert response.status_code == 200
    assert response.headers[IGNORED] == "typical_p, watermark"


@pytest.mark.parametrize("path", BODIES)
def test_harmless_fields_and_neutral_values_are_not_named(server: RunningServer, path: str) -> None:
    neutral = {"typical_p": 1.0, "mirostat": 0, "background": False, "watermark": None, "tags": []}
    response = post(server, path, **HARMLESS, **neutral)
    assert response.status_code == 200
    assert IGNORED not in response.headers


def test_fields_of_nested_objects_are_named_by_their_path(server: RunningServer) -> None:
    stream_options = {"include_usage": True, "include_obfuscation": False, "every": 2}
    response = post(server, "/v1/chat/completions", stream=True, stream_options=stream_options)
    assert response.headers[IGNORED] == "stream_options.every"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "audio", {"voice": "alloy", "format": "wav"}),
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
        ("/v1/responses", "background", True),
        ("/v1/responses", "conversation", "conv_1"),
        ("/v1/responses", "prompt", {"id": "pmpt_1"}),
    ],
)
def test_fields_that_cannot_be_followed_are_refused(
    server: RunningServer, path: str, field: str, value: Any
) -> None:
    response = post(server, path, **{field: value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"alignment": "approximate"}, "alignment"),
        ("/v1/chat/completions", {"alignment": {"mode": "x"}}, "alignment.mode"),
        ("/v1/chat/completions", {"alignment": {"min_saved": 3}}, "alignment.mode"),
        ("/v1/messages", {"alignment": {"mode": "exact", "min": 3}}, "alignment.min"),
        ("/v1/responses", {"input": ["x"]}, "input.0"),
        ("/v1/completions", {"prompt": [[1, "x"]]}, "prompt.0.1"),
    ],
)
def test_errors_in_fields_of_several_types_name_the_place(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    """Not the first of the types, which the value was not meant to be."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    with server.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param}: ")


def test_chats_name_a_prediction_and_a_prompt(server: RunningServer) -> None:
    prediction = {"type": "content", "content": "Hello"}
    response = post(server, "/v1/chat/completions", prediction=prediction, prompt="Hi")
    assert response.headers[IGNORED] == "prediction, prompt"


@given(st.lists(st.text(max_size=300), max_size=20), st.lists(st.text(max_size=300), max_size=20))
def test_headers_are_short_printable_lines(fields: list[str], warnings: list[str]) -> None:
    notices = Notices()
    notices.ignore(*fields)
    notices.warn(*warnings)
    for _, value in notices.headers():
        assert len(value) <= 1000
        assert value.isascii()
        assert value.decode().isprintable()
