"""Pins of prefixes on a fleet: listed and released at any of its servers."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from fleet.conftest import Replica

from kvkeep.engine import Engine
from kvkeep.fleet.pins import SharedPins
from kvkeep.model import Model
from kvkeep.storage.objects import open_object_store


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


def test_what_killed_servers_have_left_is_deleted(smollm2: Model, tmp_path: Path) -> None:
    """Lists of pins and markers of releases that are old; those of servers that run stay."""
    objects = open_object_store(tmp_path.as_uri())
    keys = [f"pins/{owner}/{kind}" for owner in "ab" for kind in ("servers/x", "released/pin-1")]
    for key in keys:
        objects.put(key, b"{}")
        if key.startswith("pins/a"):
            two_hours_ago = time.time() - 7200
            os.utime(tmp_path / key, (two_hours_ago, two_hours_ago))
    with Engine(smollm2, settings={"max_kv_size": 512}) as engine:
        pins = SharedPins(engine, objects, "one")
        pins.start()
        wait_for(lambda: {info.key for info in objects.list_objects("pins/")} == set(keys[2:]))
        pins.close()
