"""A change that is sent twice is made once."""

from collections.abc import Iterator
from itertools import count

import httpx
import pytest
from server.conftest import Running, running

from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys

names = (f"once-{number}" for number in count())


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def begun(client: httpx.Client) -> str:
    name = next(names)
    assert client.post("/v1/sessions", json={"name": name}).status_code == 201
    return name


def fed(client: httpx.Client, name: str, key: str, **body: object) -> httpx.Response:
    headers = {"Idempotency-Key": key and f"{name} {key}"}
    return client.post(f"/v1/sessions/{name}/feed", json=body, headers=headers)


def test_the_first_answer_is_given_again(client: httpx.Client) -> None:
    name = begun(client)
    first, second = (fed(client, name, "a", tokens=[5, 6, 7]) for _ in range(2))
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 3
    assert fed(client, name, "b", tokens=[5, 6, 7]).json()["total_tokens"] == 6


def test_so_is_a_stream(client: httpx.Client) -> None:
    name = begun(client)
    body = {"tokens": [5, 6, 7], "stream": True}
    first, second = (fed(client, name, "a", **body) for _ in range(2))
    assert "event: done" in first.text
    assert first.text == second.text
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 3


def test_a_key_is_of_one_request(client: httpx.Client) -> None:
    name = begun(client)
    fed(client, name, "a", tokens=[5])
    answer = fed(client, name, "a", tokens=[6])
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "key_reused"
    assert fed(client, name, "", tokens=[6]).status_code == 400
    assert fed(client, name, "a" * 201, tokens=[6]).status_code == 400
    assert client.get(f"/v1/sessions/{name}").json()["tokens"] == 1


def test_what_may_end_otherwise_is_tried_again(client: httpx.Client) -> None:
    """A change that was meant for another revision is no answer to keep."""
    name = begun(client)
    headers = {"Idempotency-Key": f"{name} a", "If-Match": '"1"'}
    path, body = f"/v1/sessions/{name}/feed", {"tokens": [5]}
    assert client.post(path, json=body, headers=headers).status_code == 412
    fed(client, name, "b", tokens=[7])
    assert client.post(path, json=body, headers=headers).status_code == 200


def test_keys_are_each_owners_own(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("server")
    file = folder / "keys"
    file.write_text("the-first-of-the-keys\nthe-second-of-the-keys\n")
    with running(smollm2, folder, ApiKeys.read(file, folder)) as server:
        for key in file.read_text().split():
            with server.client(key) as client:
                client.post("/v1/sessions", json={"name": "same"})
                answer = fed(client, "same", "a", tokens=[5, 6])
                assert answer.json()["total_tokens"] == 2
                assert client.get("/v1/sessions/same").json()["tokens"] == 2
