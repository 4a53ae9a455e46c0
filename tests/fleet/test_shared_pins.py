"""Pins of prefixes on a fleet: listed and released at any of its servers."""

import time
from collections.abc import Callable

import httpx
from fleet.conftest import Replica


def listed(client: httpx.Client) -> list[str]:
    return [pin["id"] for pin in client.get("/v1/prefix/pins").json()["data"]]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_pins_are_listed_and_released_at_each_server(replicas: Callable[..., Replica]) -> None:
    one, two = replicas("one"), replicas("two")
    messages = [{"role": "user", "content": "Name a colour."}]
    with one.client() as first, two.client() as second:
        for client, key in ((first, "a"), (first, "b"), (second, "c")):
            body = {"messages": messages, "max_tokens": 1, "prompt_cache_key": key}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        wait_for(lambda: len(listed(first)) == len(listed(second)) == 3)
        pins = first.get("/v1/prefix/pins").json()["data"]
        assert {pin["prompt_cache_key"] for pin in pins} == {"a", "b", "c"}
        assert all(0 < pin["expires_in"] <= pin["ttl"] for pin in pins)
        ids = {pin["prompt_cache_key"]: pin["id"] for pin in pins}
        for key in "ac":  # one of its own, and one of the other server
            assert second.delete(f"/v1/prefix/pins/{ids[key]}").status_code == 200
            assert ids[key] not in listed(second)
            assert second.delete(f"/v1/prefix/pins/{ids[key]}").status_code == 404
        wait_for(lambda: [pin.key for pin in one.engine.pins().result()] == ["b"])
        wait_for(lambda: listed(first) == [ids["b"]])
