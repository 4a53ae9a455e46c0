"""Sessions as slots, which clients of llama.cpp's server know by number."""

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import Field

from kvkeep.errors import NoSuchSession
from kvkeep.server.llamacpp.text import SLOTS, slot_name
from kvkeep.server.schemas import Body, Owner, Serving
from kvkeep.server.service import Service

router = APIRouter()


class Filename(Body):
    filename: Annotated[str, Field(max_length=200)] = ""


@router.post("/slots/{slot}")
async def slots(
    slot: Annotated[int, Path(ge=0, lt=SLOTS)],
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    service: Serving,
    owner: Owner,
    body: Filename | None = None,
) -> dict[str, Any]:
    """Saves a slot's session under a name, puts one in its place, or empties it."""
    engine, name, begun = service.engine, slot_name(slot), time.perf_counter()
    label = body.filename if body else ""
    if action == "save":
        size = await asyncio.wrap_future(engine.snapshot(name, label, owner))
        tokens = await _tokens(service, name, owner)
        spent = 1000 * (time.perf_counter() - begun)
        done = {"filename": label, "n_saved": tokens, "n_written": size}
        return {"id_slot": slot, **done, "timings": {"save_ms": spent}}
    if action == "erase":
        return {"id_slot": slot, "n_erased": await _erased(service, name, owner)}
    found = await asyncio.to_thread(engine.load_snapshot, label, owner)
    await asyncio.wrap_future(engine.restore(found, owner, name, replace=True))
    spent = 1000 * (time.perf_counter() - begun)
    size = await asyncio.to_thread(lambda: engine.snapshots(owner).path(label).stat().st_size)
    done = {"n_restored": await _tokens(service, name, owner), "n_read": size}
    return {"id_slot": slot, "filename": label, **done, "timings": {"restore_ms": spent}}


async def _erased(service: Service, name: str, owner: str) -> int:
    try:
        tokens = await _tokens(service, name, owner)
    except NoSuchSession:
        return 0
    await asyncio.wrap_future(service.engine.delete(name, owner))
    return tokens


async def _tokens(service: Service, name: str, owner: str) -> int:
    return await asyncio.wrap_future(
        service.engine.inspect(name, owner, lambda kept: len(kept.live.tokens))
    )
