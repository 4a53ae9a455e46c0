"""The pins of a fleet's servers, listed and released at each of them.

A pin is of the server whose memory it protects. Each server publishes its pins in the store, when
they have changed and at least every half minute; those of a server that was killed are dropped
after a minute and a half, and their objects are deleted after an hour. A release at another server
is a marker there, which the pin's server follows within some seconds.
"""

import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from kvkeep.engine import Engine, PrefixPin
from kvkeep.errors import KvkeepError, NoObject, NoSuchPin
from kvkeep.server.sessions.pins import pin_entry
from kvkeep.storage.objects import ObjectStore
from kvkeep.storage.objects.interface import ObjectInfo

_INTERVAL = 1.0  # seconds between looks for changes and releases
_REPUBLISH_SECONDS, _DROPPED_AFTER = 30.0, 90.0
_LEFTOVER_SECONDS = 3600.0  # the age of an object that no server will change, and between sweeps
_log = logging.getLogger("kvkeep.server")


class SharedPins:
    """The pins of one server in the store, and what the store says of the others'."""

    def __init__(self, engine: Engine, objects: ObjectStore, server: str):
        """server: its name, unique in the fleet."""
        self._engine, self._objects = engine, objects
        self._name = blake2b(server.encode(), digest_size=16).hexdigest()
        self._published = dict[str, tuple[float, object]]()  # by owner: when, and which pins
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-pins", daemon=True)

    def start(self) -> None:
        """Publish from now on, in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Withdraw this server's pins. Called before the engine is closed."""
        self._closing.set()
        self._thread.join()
        for owner in self._published:
            with suppress(KvkeepError):
                self._objects.delete(self._server_key(owner))

    def others(self, owner: str) -> list[dict[str, Any]]:
        """Return the pins of other servers, as they are listed. Raises StoreError."""
        released = {info.key.rpartition("/")[2] for info in self._releases(owner)}
        entries = list[dict[str, Any]]()
        for info in self._objects.list_objects(f"pins/{owner}/servers/"):
            if info.key == self._server_key(owner):
                continue
            with suppress(NoObject, ValueError, LookupError, TypeError):
                document = json.loads(self._objects.get(info.key)[0])
                age = time.time() - document["written"]
                if age < _DROPPED_AFTER:
                    entries += (_aged(entry, age) for entry in document["pins"])
        return [e for e in entries if e["expires_in"] > 0 and e["id"] not in released]

    def release(self, pin_id: str, owner: str) -> None:
        """Have another server release a pin. Raises NoSuchPin, StoreError."""
        if not any(entry["id"] == pin_id for entry in self.others(owner)):
            raise NoSuchPin(f"there is no pin {pin_id!r}; it may have expired")
        self._objects.put(f"pins/{owner}/released/{pin_id}", b"")

    def _run(self) -> None:
        next_sweep = time.monotonic()
        while not self._closing.wait(_INTERVAL):
            try:
                self._exchange()
                if time.monotonic() >= next_sweep:
                    next_sweep = time.monotonic() + _LEFTOVER_SECONDS
                    self._delete_leftovers()
            except KvkeepError as error:
                _log.warning("pins are not shared now: %s", error)

    def _exchange(self) -> None:
        """Follow releases at other servers, and publish the pins that have changed."""
        pins = defaultdict[str, list[PrefixPin]](list)
        for pin in self._engine.all_pins().result():
            pins[pin.owner].append(pin)
        for owner in {*pins, *self._published}:
            markers = self._follow_releases(owner, {pin.id for pin in pins[owner]})
            released = {key.rpartition("/")[2] for key in markers}
            self._publish(owner, [pin for pin in pins[owner] if pin.id not in released])
            for key in markers:  # until now they hid what was published before
                self._objects.delete(key)

    def _delete_leftovers(self) -> None:
        """Delete what servers have left that were killed, of all owners."""
        for info in self._objects.list_objects("pins/"):
            if time.time() - info.st_mtime > _LEFTOVER_SECONDS:
                self._objects.delete(info.key)

    def _publish(self, owner: str, pins: Sequence[PrefixPin]) -> None:
        now, content = time.monotonic(), [(pin.id, pin.tokens, pin.expires) for pin in pins]
        published_at, published = self._published.get(owner, (0.0, []))
        if not content:
            if self._published.pop(owner, None):
                self._objects.delete(self._server_key(owner))
        elif content != published or now - published_at > _REPUBLISH_SECONDS:
            document = {"written": time.time(), "pins": list(map(pin_entry, pins))}
            self._objects.put(self._server_key(owner), json.dumps(document).encode())
            self._published[owner] = now, content

    def _follow_releases(self, owner: str, own: Set[str]) -> list[str]:
        """Release the server's own pins that have markers; return the markers to delete."""
        followed = list[str]()
        for info in self._releases(owner):
            pin_id = info.key.rpartition("/")[2]
            if pin_id in own:
                with suppress(NoSuchPin):
                    self._engine.release_pin(pin_id, owner).result()
            if pin_id in own or time.time() - info.st_mtime > _DROPPED_AFTER:
                followed.append(info.key)
        return followed

    def _releases(self, owner: str) -> Iterator[ObjectInfo]:
        return self._objects.list_objects(f"pins/{owner}/released/")

    def _server_key(self, owner: str) -> str:
        return f"pins/{owner}/servers/{self._name}"


def _aged(entry: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {**entry, "expires_in": entry["expires_in"] - seconds}
