"""Pins of prefixes: which prompts are protected from eviction, for how long, and their release."""

import time
from asyncio import wrap_future
from typing import Annotated, Any

from fastapi import Path

from kvkeep.engine import PrefixPin
from kvkeep.server.body_route import body_router
from kvkeep.server.limits import MAX_CHARACTERS
from kvkeep.server.service import ContextDep

router = body_router()
_PinId = Annotated[str, Path(alias="pin", max_length=MAX_CHARACTERS)]


@router.get("/v1/prefix/pins")
async def pins(context: ContextDep) -> dict[str, Any]:
    """List the prefixes that requests have protected from eviction, the next to expire first.

    `tokens` is the length of a prefix, `session` holds it, and `prompt_cache_key` is the client's.
    It expires in `expires_in` seconds; each prompt that begins with it restarts its `ttl`.
    """
    data = [pin_entry(pin) for pin in await wrap_future(context.engine.pins(context.owner))]
    return {"object": "list", "data": data}


@router.delete("/v1/prefix/pins/{pin}")
async def release(pin_id: _PinId, context: ContextDep) -> dict[str, Any]:
    """Release a pin. The session stays in memory until its turn to be evicted."""
    await wrap_future(context.engine.release_pin(pin_id, context.owner))
    return {"id": pin_id, "object": "prefix_pin", "deleted": True}


def pin_entry(pin: PrefixPin) -> dict[str, Any]:
    """Return a pin as it is listed."""
    return {
        "id": pin.id,
        "object": "prefix_pin",
        "session": pin.record.name,
        "tokens": pin.tokens,
        "prompt_cache_key": pin.key or None,
        "ttl": pin.seconds,
        "expires_in": max(0.0, pin.expires - time.monotonic()),
        "hits": pin.hits,
    }
