"""Checks on every request: host, origin, size, key; and health."""

import pickle
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server
from starlette.testclient import TestClient

from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.app import application
from kvkeep.server.key_file import add_key, hash_key, hash_keys_in_place
from kvkeep.server.keys import ApiKeys
from kvkeep.server.limits import MAX_BODY_BYTES
from kvkeep.server.service import Service
from kvkeep.session.alignment import AlignmentOptions

ONE, TWO = "one-key-of-sixteen", "two-key-of-sixteen"


def test_health_and_models_describe_the_served_model(server: RunningServer) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        models = client.get("/v1/models").json()
        (model,) = models["data"]
        assert (models["has_more"], models["first_id"]) == (False, "smollm2")
        assert (model["id"], model["display_name"]) == ("smollm2", "smollm2")
        assert (model["object"], model["type"]) == ("model", "model")
        for name in ("n_ctx", "context_length", "max_model_len", "max_input_tokens"):
            assert model[name] == 2048
        assert client.get("/v1/models/smollm2").json() == model
        assert client.get("/v1/models/other").status_code == 404


def test_a_wrong_host_header_is_refused(server: RunningServer) -> None:
    with server.client() as client:
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil", ""):
            assert client.get("/health", headers={"Host": host}).status_code == 421
        assert client.get("/health", headers={"Host": "LOCALHOST:1"}).status_code == 200


@pytest.mark.parametrize("named", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_the_default_content_type_of_curl_is_taken_as_json(
    server: RunningServer, named: dict[str, str]
) -> None:
    response = httpx.post(f"{server.url}/tokenize", content=b'{"content": "a"}', headers=named)
    assert response.status_code == 200
    assert response.json()["tokens"]


@pytest.mark.parametrize("chunked", [False, True])
def test_an_oversized_body_is_refused(server: RunningServer, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    pieces = (body[at : at + 2**16] for at in range(0, len(body), 2**16))
    with server.client() as client:
        response = client.post("/v1/completions", content=pieces if chunked else body)
        assert response.status_code == 413
        assert "64,000,000 bytes" in response.json()["error"]["message"]


def test_errors_have_the_form_of_the_paths_api(server: RunningServer) -> None:
    def refusal(path: str, content: Iterator[bytes] | bytes) -> Any:
        return client.post(path, content=content).json()

    with server.client() as client:
        for content in (b"{", iter([b"a" * MAX_BODY_BYTES, b"a"])):
            refused = refusal("/v1/messages", content)
            assert refused["type"] == "error"
            assert refused["error"].keys() == {"type", "message"}
        assert refused["error"]["type"] == "request_too_large"
        assert isinstance(refusal("/api/nothing", b"{")["error"], str)
        assert refusal("/v1/completions", b"{")["error"]["type"] == "invalid_request_error"


def test_the_policy_of_the_web_ui_allows_its_own_files_alone(server: RunningServer) -> None:
    """No script in the page itself, no other origins, forms and frames; errors have it, too."""
    with server.client() as client:
        page = client.get("/")
        for response in (page, client.get("/page/main.js"), client.get("/nothing")):
            header = response.headers["content-security-policy"]
            policy = dict(part.split(maxsplit=1) for part in header.split("; "))
            assert policy.pop("default-src") == "'self'"
            assert set(policy) == {"object-src", "base-uri", "frame-ancestors", "form-action"}
            assert set(policy.values()) == {"'none'"}
            assert response.headers["x-content-type-options"] == "nosniff"
    scripts = re.findall(r"<script[^>]*>([^<]*)", page.text)
    assert scripts == [""], "the policy would stop script in the page"
    assert not re.search(r"<[^>]+\s(on\w+|style)=", page.text)


def test_browsers_check_the_files_of_the_web_ui_each_time(server: RunningServer) -> None:
    """A file of another version would not work with the others."""
    with server.client() as client:
        for path in ("/", "/page/main.js", "/page/vendor/marked.js"):
            response = client.get(path)
            assert response.headers["cache-control"] == "no-cache"
        again = client.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")


def test_files_of_the_web_ui_are_sent_compressed(server: RunningServer) -> None:
    with server.client() as client:
        whole, small = (
            client.get("/page/chat.js", headers={"Accept-Encoding": coding})
            for coding in ("identity", "gzip")
        )
        assert small.headers["content-encoding"] == "gzip"
        assert small.num_bytes_downloaded < whole.num_bytes_downloaded / 2
        assert small.content == whole.content
        unchanged = client.get("/page/chat.js", headers={"If-None-Match": small.headers["etag"]})
        assert unchanged.status_code == 304


def test_a_validation_error_names_the_field(server: RunningServer) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", json={"prompt": "a", "temperature": "warm"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "temperature"
        assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
        assert client.delete("/v1/completions").status_code == 405


def test_unknown_origins_are_refused_by_cors(server: RunningServer) -> None:
    with server.client() as client:
        response = client.get("/health", headers={"Origin": "http://evil.example"})
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("status", "headers", "content"),
    [
        (200, {"Authorization": f"Bearer {ONE}"}, b'{"content": "a"}'),
        (400, {"Authorization": f"Bearer {ONE}"}, b"{"),
        (401, {"Authorization": "Bearer wrong"}, b'{"content": "a"}'),
        (413, {"Content-Length": str(MAX_BODY_BYTES + 1)}, b"{}"),
        (413, {"Authorization": f"Bearer {ONE}"}, [b" " * 2**20] * (MAX_BODY_BYTES // 2**20 + 1)),
    ],
)
def test_a_page_of_an_allowed_origin_sees_errors(
    server: RunningServer, status: int, headers: dict[str, str], content: Any
) -> None:
    origin = "https://app.example"
    service = Service(server.service.engine, "smollm2", ApiKeys((ONE,)))
    app = application(service, origins=(origin,))
    with TestClient(app, base_url="http://localhost", headers={"Origin": origin}) as client:
        body = content if isinstance(content, bytes) else iter(content)
        response = client.post("/tokenize", content=body, headers=headers)
        asked = {"Access-Control-Request-Method": "POST"}
        preflight = client.options("/tokenize", headers=asked)
        foreign = client.post("/tokenize", headers={"Origin": "https://evil.example"})
    assert response.status_code == status, response.text
    assert response.headers["access-control-allow-origin"] == origin
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers
    for each in (response, preflight, foreign):
        assert each.headers.get_list("x-content-type-options") == ["nosniff"]
    assert service.status_counts == {**Counter([status, 200, 403])}


def test_requests_without_a_valid_key_are_refused(smollm2: Model, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of two users\n{ONE}\n\n{hash_key(TWO)}\n")
    with running_server(smollm2, tmp_path / "kept", ApiKeys.read(file, tmp_path)) as server:
        params = {"prompt": "a", "max_tokens": 1}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": ONE},
            {"X-Api-Key": f"{ONE} "[:-2]},
            {"X-Api-Key": hash_key(TWO)},
        ):
            response = httpx.post(f"{server.url}/v1/completions", json=params, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": f"Bearer {ONE}"}, {"X-Api-Key": TWO}):
            response = httpx.post(f"{server.url}/v1/completions", json=params, headers=headers)
            assert response.status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 200


def test_owners_are_stable_and_do_not_reveal_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{ONE}\n{TWO}\n")
    before, after = (ApiKeys.read(file, tmp_path / "secret") for _ in range(2))
    assert before.owner(ONE) == after.owner(ONE) != before.owner(TWO)
    assert ApiKeys.read(file, tmp_path / "other").owner(ONE) != before.owner(ONE)
    assert ((tmp_path / "secret" / "secret").stat().st_mode & 0o777) == 0o600


def test_servers_that_start_together_have_one_secret(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(ONE)
    start = threading.Barrier(8)

    def owner(folder: Path) -> str | None:
        start.wait()
        return ApiKeys.read(file, folder).owner(ONE)

    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            folders = [tmp_path / f"secret {number}"] * 8
            assert len(set(pool.map(owner, folders))) == 1


def test_a_server_that_was_killed_while_it_wrote_its_secret_starts_again(tmp_path: Path) -> None:
    file, secret = tmp_path / "keys", tmp_path / "secret"
    file.write_text(ONE)
    secret.touch(0o600)
    owner = ApiKeys.read(file, tmp_path).owner(ONE)
    assert ApiKeys.read(file, tmp_path).owner(ONE) == owner
    assert len(secret.read_bytes()) == 32


def test_owners_and_settings_are_the_same_for_a_key_and_its_hash(tmp_path: Path) -> None:
    """Sessions stay found when the keys in a file are replaced by hashes."""
    file, default = tmp_path / "keys", AlignmentOptions()
    file.write_text(f"# of two users\n {ONE} alignment=in_place reread=64\n\n{TWO}")
    before = ApiKeys.read(file, tmp_path / "secret")
    assert hash_keys_in_place(file) == 2
    three = add_key(file, "a third")
    lines = file.read_text().splitlines()
    assert (lines[0], lines[1].split()[1:]) == (
        "# of two users",
        ["alignment=in_place", "reread=64"],
    )
    assert lines[-2:] == ["# a third", hash_key(three)]
    assert not any(key in file.read_text() for key in (ONE, TWO, three))
    assert hash_keys_in_place(file) == 0
    after = pickle.loads(pickle.dumps(ApiKeys.read(file, tmp_path / "secret")))
    for key in (ONE, TWO):
        owner = after.owner(key)
        assert owner == before.owner(key) is not None
        assert after.alignment(owner, default) == before.alignment(owner, default)
    assert after.alignment(after.owner(ONE), default).reread == 64
    assert after.owner(three) not in (None, after.owner(ONE), after.owner(TWO))
    for unknown in (hash_key(ONE), hash_key(ONE).partition(":")[2], ONE[:-1], f"{ONE} ", "", None):
        assert after.owner(unknown) is None
    assert not any(key.encode() in pickle.dumps(after) for key in (ONE, TWO, three))


@pytest.mark.parametrize("text", ["", "# none\n", "short\n", "sha256:" + "0" * 63])
def test_a_file_without_a_usable_key_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InvalidArgument):
        ApiKeys.read(file, tmp_path)


def test_prompts_of_one_key_are_not_reused_by_another(smollm2: Model, tmp_path: Path) -> None:
    keys, prompt = ApiKeys((ONE, TWO)), "A secret of mine. " * 60
    with running_server(smollm2, tmp_path, keys) as server:

        def reused(key: str) -> int:
            with server.client(key) as client:
                response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
                details = response.json()["usage"]["prompt_tokens_details"]
                result: int = details["cached_tokens"]
                return result

        assert reused(ONE) == 0
        assert reused(ONE) > 0
        assert reused(TWO) == 0


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", "http://127.0.0.1:1"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_cross_origin_requests_are_refused(
    server: RunningServer, origin: str, kind: str | None
) -> None:
    """Browsers send these content types for any page, without a CORS preflight."""
    with server.client() as client:
        headers = {"Origin": origin} if kind is None else {"Origin": origin, "Content-Type": kind}
        response = client.post("/v1/sessions", content='{"name": "theirs"}', headers=headers)
        assert response.status_code == 403
        assert client.get("/v1/sessions/theirs").status_code == 404


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_foreign_pages_load_nothing_without_an_origin(server: RunningServer, site: str) -> None:
    """<img> and fetch in mode no-cors send none. Other ports of a host are of the same site."""
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    link = {**headers, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    with server.client() as client:
        for path in ("/v1/sessions", "/v1/sessions/slot-0/memory", "/v1/events", "/health", "/"):
            refused = client.get(path, headers=headers)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "origin"
        assert client.get("/v1/sessions", headers=link).status_code == 403
        assert client.get("/health", headers=link).status_code == 200
        for trusted in (link, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}):
            page = client.get("/", headers=trusted)
            assert page.status_code == 200
            assert page.headers["cross-origin-resource-policy"] == "same-origin"
    origin = "https://app.example"
    for allowed, sent in ((origin, {"Origin": origin}), ("*", {})):
        app = application(server.service, origins=[allowed])
        other = TestClient(app, base_url="http://localhost", headers={**headers, **sent})
        assert other.get("/health").status_code == 200


def test_the_web_ui_is_read_only_unless_it_may_edit(server: RunningServer) -> None:
    """Without `allow_edit`, requests with the server's own Origin may only read."""
    with server.client() as client:
        headers = {"Origin": server.url}
        assert client.get("/v1/sessions", headers=headers).status_code == 200
        refused = client.post("/v1/sessions", json={}, headers=headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "read_only"
        params = client.post("/v1/prefix/explain", json={"text": "A text"}, headers=headers)
        assert params.status_code == 200
