"""One server of a fleet: an engine whose sessions, snapshots and prompts are in a store."""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvkeep.engine import Engine, Limits
from kvkeep.errors import Conflict, StoreError
from kvkeep.fleet.config import ReplicaConfig
from kvkeep.fleet.leases import LEASE_SECONDS, SessionLeases
from kvkeep.fleet.middleware import SessionMiddleware
from kvkeep.fleet.pins import SharedPins
from kvkeep.model import Model
from kvkeep.server.idempotency import COMPACTION_PATHS, IdempotencyMiddleware
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.drafts import SpeculationOptions
from kvkeep.storage.lossy.shared import share_bases
from kvkeep.storage.objects import ObjectStore, open_object_store
from kvkeep.storage.prefixes.coding import block_codec
from kvkeep.storage.prefixes.shared import SharedPrefixCache
from kvkeep.storage.sessions.shared import SharedLabels, SharedSessions
from kvkeep.storage.snapshots.codec import Codec


class Replica:
    """An engine whose sessions are leased from a store. writer: its name in leases."""

    def __init__(
        self,
        model: Model,
        store_url: str,
        secret: bytes,
        *,
        settings: Mapping[str, Any],
        limits: Limits,
        share_prefixes: bool,
        alignment: AlignmentOptions | None = None,
        speculation: SpeculationOptions | None = None,
        codec: Codec = "exact",
        lease_seconds: float = LEASE_SECONDS,
    ):
        """Open a store and start an engine over it.

        secret: authenticates shared prefixes. settings: defaults of new sessions. share_prefixes:
        whether to share prefilled prefixes of prompts. alignment, speculation, codec: see `Engine`.
        Raises InvalidArgument and StoreError for an unusable store.
        """
        objects = open_object_store(store_url)
        # Unique to this process, even if containers share host names.
        self.writer = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        require_conditional_writes(objects)
        share_bases(objects, model.fingerprint.to_dict())
        prefixes = None
        if share_prefixes:
            block_settings = (secret, model.arithmetic)
            prefixes = SharedPrefixCache(objects, *block_settings, codec=block_codec(codec))
        self._prefixes = prefixes
        self.engine = Engine(
            model,
            settings=settings,
            limits=limits,
            stores=prefixes.for_owner if prefixes else None,
            snapshots=partial(SharedLabels, objects),
            alignment=alignment,
            speculation=speculation,
            codec=codec,
        )
        sessions_of = partial(
            SharedSessions, objects, writer=self.writer, lease_seconds=lease_seconds
        )
        self.leases = SessionLeases(self.engine, sessions_of, codec)
        self.pins = SharedPins(self.engine, objects, self.writer)
        self.pins.start()

    async def close(self) -> None:
        """Finish requests in progress, and write what others can continue from to the store."""
        await self.leases.drain()
        await asyncio.to_thread(self.pins.close)
        await asyncio.to_thread(self.engine.close)
        if self._prefixes is not None:
            await asyncio.to_thread(self._prefixes.flush)

    def middleware(self, app: Any) -> SessionMiddleware:
        return shared_session_middleware(app, self.leases, self.pins, self.writer)


def shared_session_middleware(
    app: Any, leases: SessionLeases, pins: SharedPins, name: str
) -> SessionMiddleware:
    """Return an application in which requests lease their sessions. name: the server's.

    With an `Idempotency-Key`, a repeated `/v1/responses/compact` runs once at this server, and so
    does a repeated deletion of a snapshot.
    """
    app = IdempotencyMiddleware(app, COMPACTION_PATHS)
    app = IdempotencyMiddleware(app, ("/v1/snapshots/",), {"DELETE"})
    return SessionMiddleware(app, leases, pins, name)


def require_conditional_writes(objects: ObjectStore) -> None:
    """Raise StoreError for a store that ignores If-Match and If-None-Match, or is unreachable."""
    key = f"checks/{secrets.token_hex(8)}"
    etag = objects.put(key, b"first", if_absent=True)
    try:
        new_etag = objects.put(key, b"second", if_match=etag)
        refusals = 0
        for conditions in ({"if_absent": True}, {"if_match": etag}):
            try:
                objects.put(key, b"third", **conditions)
            except Conflict:
                refusals += 1
        if refusals < 2 or objects.get(key) != (b"second", new_etag):
            raise StoreError(
                f"{objects.url} ignores If-Match and If-None-Match, so two servers could write the "
                "same session: use a store that supports conditional writes"
            )
    finally:
        objects.delete(key)


class ReplicaServer:
    """A replica as Ray Serve runs it, in a process of its own: loads the model and serves."""

    def __init__(self, config: ReplicaConfig):
        import torch

        from kvkeep.chat.prompt_rules import select_rules
        from kvkeep.server.app import LOCAL_HOSTS, application
        from kvkeep.server.service import Service

        torch.set_num_threads(config.threads)
        model = config.load()
        self._replica = Replica(
            model,
            config.store_url,
            config.secret,
            settings=config.session_settings,
            limits=Limits(memory=config.memory_bytes),
            share_prefixes=config.share_prefixes,
            alignment=config.alignment,
            speculation=config.speculation,
            codec=config.codec,
            lease_seconds=config.lease_seconds,
        )
        model_name = config.alias or model.name.rpartition("/")[2]
        self._service = Service(self._replica.engine, model_name, config.api_keys, int(time.time()))
        self._service.context_policy = config.context_policy
        self._service.compact_at = config.compact_at
        self._service.prompt_rules = select_rules(config.prompt_rules)
        hosts = {*LOCAL_HOSTS, *config.hosts}
        self._app = application(self._service, hosts, config.origins, self._replica.middleware)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application; called by Ray Serve."""
        return self._app

    async def check_health(self) -> None:
        """Raise if the engine is dead; Ray Serve then replaces this server."""
        await asyncio.wrap_future(self._replica.engine.totals())

    async def __del__(self) -> None:
        """Shut down; called by Ray Serve once requests have ended or had their grace period."""
        self._service.closing = True
        await self._replica.close()
