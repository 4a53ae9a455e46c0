"""What holds of every request: it is let in or refused, and told why."""

from pathlib import Path

import httpx
import pytest
from server.conftest import Running, running

from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys
from kvkeep.server.security import MAX_BODY

ONE, TWO = "one-key-of-sixteen", "two-key-of-sixteen"


def test_it_is_well_and_names_its_model(server: Running) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "smollm2"
        assert client.get("/v1/models/smollm2").json() == model
        assert client.get("/v1/models/other").status_code == 404


def test_a_request_for_another_host_is_refused(server: Running) -> None:
    with server.client() as client:
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil", ""):
            assert client.get("/health", headers={"Host": host}).status_code == 421
        assert client.get("/health", headers={"Host": "LOCALHOST:1"}).status_code == 200


@pytest.mark.parametrize("named", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_what_curl_sends_of_itself_is_json(server: Running, named: dict[str, str]) -> None:
    answer = httpx.post(f"{server.url}/tokenize", content=b'{"content": "a"}', headers=named)
    assert answer.status_code == 200
    assert answer.json()["tokens"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(server: Running, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * MAX_BODY + b'"}'
    pieces = (body[at : at + 2**16] for at in range(0, len(body), 2**16))
    with server.client() as client:
        answer = client.post("/v1/completions", content=pieces if chunked else body)
        assert answer.status_code == 413
        assert "8,000,000 bytes" in answer.json()["error"]["message"]


def test_an_error_says_where_it_is(server: Running) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "temperature": "warm"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "temperature"
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
        assert client.delete("/v1/completions").status_code == 405


def test_no_page_may_ask_it_that_was_not_named(server: Running) -> None:
    with server.client() as client:
        answer = client.get("/health", headers={"Origin": "http://evil.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_only_those_with_a_key_are_let_in(smollm2: Model, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of two users\n{ONE}\n\n{TWO}\n")
    with running(smollm2, tmp_path / "kept", ApiKeys.read(file, tmp_path)) as server:
        asked = {"prompt": "a", "max_tokens": 1}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": ONE},
            {"X-Api-Key": f"{ONE} "[:-2]},
        ):
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": f"Bearer {ONE}"}, {"X-Api-Key": TWO}):
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers)
            assert answer.status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 200


def test_owners_stay_who_they_are_and_tell_nothing_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{ONE}\n{TWO}\n")
    before, after = (ApiKeys.read(file, tmp_path / "secret") for _ in range(2))
    assert before.owner(ONE) == after.owner(ONE) != before.owner(TWO)
    assert ApiKeys.read(file, tmp_path / "other").owner(ONE) != before.owner(ONE)
    assert ((tmp_path / "secret" / "secret").stat().st_mode & 0o777) == 0o600


@pytest.mark.parametrize("text", ["", "# none\n", "short\n"])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InvalidArgument):
        ApiKeys.read(file, tmp_path)


def test_what_one_key_asked_another_does_not_reuse(smollm2: Model, tmp_path: Path) -> None:
    keys, prompt = ApiKeys((ONE, TWO)), "A secret of mine. " * 60
    with running(smollm2, tmp_path, keys) as server:

        def reused(key: str) -> int:
            with server.client(key) as client:
                answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
                details = answer.json()["usage"]["prompt_tokens_details"]
                found: int = details["cached_tokens"]
                return found

        assert reused(ONE) == 0
        assert reused(ONE) > 0
        assert reused(TWO) == 0


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", "http://127.0.0.1:1"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_pages_of_others_are_refused(server: Running, origin: str, kind: str | None) -> None:
    """A browser sends what any page says, and asks nobody first for these kinds of bodies."""
    with server.client() as client:
        headers = {"Origin": origin} if kind is None else {"Origin": origin, "Content-Type": kind}
        answer = client.post("/v1/sessions", content='{"name": "theirs"}', headers=headers)
        assert answer.status_code == 403
        assert client.get("/v1/sessions/theirs").status_code == 404


def test_the_page_itself_is_let_in_only_to_look(server: Running) -> None:
    """Where nobody allowed more, and in what a browser says of it."""
    with server.client() as client:
        headers = {"Origin": server.url}
        assert client.get("/v1/sessions", headers=headers).status_code == 200
        refused = client.post("/v1/sessions", json={}, headers=headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "read_only"
        asked = client.post("/v1/prefix/explain", json={"text": "A text"}, headers=headers)
        assert asked.status_code == 200
