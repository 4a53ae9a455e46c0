"""One server of a fleet, as Ray Serve runs it: in a process of its own."""

import asyncio
import time
from typing import Any

from kvkeep.fleet.setup import Setup


class Server:
    """Loads the model, and answers until it is stopped."""

    def __init__(self, setup: Setup):
        import torch

        from kvkeep import load_model
        from kvkeep.engine import Limits
        from kvkeep.fleet.replica import replica
        from kvkeep.server.app import LOCAL_HOSTS, application
        from kvkeep.server.service import Service

        torch.set_num_threads(setup.threads)
        named = {"dtype": setup.dtype, "weights": setup.weights}
        given = {name: value for name, value in named.items() if value is not None}
        model = load_model(setup.model, **given)  # type: ignore[arg-type]
        self._replica = replica(
            model,
            setup.store,
            setup.secret,
            settings=setup.settings,
            limits=Limits(memory=setup.memory),
            prefixes=setup.prefixes,
            lease=setup.lease,
        )
        name = setup.alias or model.name.rpartition("/")[2]
        self._service = Service(self._replica.engine, name, setup.keys, int(time.time()))
        hosts = {*LOCAL_HOSTS, *setup.hosts}
        self._app = application(self._service, hosts, setup.origins, self._replica.around)

    def __serve_build_asgi_app__(self) -> Any:
        """Ray Serve's word for what answers."""
        return self._app

    async def check_health(self) -> None:
        """Raises where the engine computes no more: another server is started then."""
        await asyncio.wrap_future(self._replica.engine.totals())

    async def __del__(self) -> None:
        """Ray Serve's word for the end: by then requests have ended, or had their time."""
        self._service.closing = True
        await self._replica.drained()
        await asyncio.to_thread(self._replica.engine.close)
