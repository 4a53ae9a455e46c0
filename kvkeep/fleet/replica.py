"""One server of a fleet: an engine whose sessions, snapshots and prompts are in a store."""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.engine import Engine, Limits
from kvkeep.errors import Conflict, StoreError
from kvkeep.fleet.leases import LEASE, Custody
from kvkeep.fleet.middleware import Keeper
from kvkeep.model import Model
from kvkeep.storage.objects import Objects, open_objects
from kvkeep.storage.prefixes.shared import SharedPrefixes
from kvkeep.storage.sessions.labels import SharedLabels
from kvkeep.storage.sessions.shared import SharedSessions


@dataclass(frozen=True)
class Replica:
    """engine: reads and writes. custody: of its sessions. writer: what others are told of it.
    keepers: of its applications."""

    engine: Engine
    custody: Custody
    writer: str
    keepers: list[Keeper] = field(default_factory=list)

    def around(self, app: Any) -> Keeper:
        """For `application`."""
        self.keepers.append(Keeper(app, self.custody, self.writer))
        return self.keepers[-1]

    async def drained(self) -> None:
        """Once all that was begun is in the store."""
        for keeper in self.keepers:
            await keeper.drained()


def replica(
    model: Model,
    store: str,
    secret: bytes,
    *,
    settings: Mapping[str, Any],
    limits: Limits,
    prefixes: bool,
    lease: float = LEASE,
) -> Replica:
    """store: URL. prefixes: whether evaluated beginnings of prompts are shared. lease: seconds.

    Raises InvalidArgument and StoreError for a store that cannot be used.
    """
    objects, writer = open_objects(store), writer_name()
    require_conditions(objects)
    shared = SharedPrefixes(objects, secret, model.arithmetic) if prefixes else None
    engine = Engine(
        model,
        settings=settings,
        limits=limits,
        stores=shared.of if shared else None,
        snapshots=lambda owner: SharedLabels(objects, owner),
    )

    def sessions_of(owner: str) -> SharedSessions:
        return SharedSessions(objects, owner, writer, lease)

    return Replica(engine, Custody(engine, sessions_of), writer)


def writer_name() -> str:
    """Of this process, and of no other, whatever containers call themselves."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def require_conditions(objects: Objects) -> None:
    """A store that takes no heed of conditions would let two write one session.

    Raises StoreError where it cannot be reached, or does not.
    """
    key = f"checks/{secrets.token_hex(8)}"
    tag = objects.put(key, b"first", if_absent=True)
    try:
        other = objects.put(key, b"second", if_tag=tag)
        refused = 0
        for conditions in ({"if_absent": True}, {"if_tag": tag}):
            try:
                objects.put(key, b"third", **conditions)
            except Conflict:
                refused += 1
        if refused < 2 or objects.get(key) != (b"second", other):
            raise StoreError(
                f"{objects.url} takes no heed of If-Match and If-None-Match, without which two "
                "servers could write one session: use a store that does"
            )
    finally:
        objects.delete(key)
