"""Sessions begin, are listed, forked, saved, snapshotted and deleted."""

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response

from kvkeep.engine import Engine
from kvkeep.errors import StoreError
from kvkeep.server.schemas import MOST_TOKENS, Body, Owner, Serving
from kvkeep.server.sessions.entry import Name, Revision, answer, entry_of
from kvkeep.storage.objects.place import Place

router = APIRouter()
_Named = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$")]
_Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
_Bits = Literal["8", "8/4", "4", 8, 4]


class Create(Body):
    """The settings are those of a session in Python; what is not given is as the server has it."""

    name: _Named | None = None
    from_snapshot: _Named | None = None
    policy: Literal["sliding", "shift", "archive", "self_extend", "full"] | None = None
    max_kv_size: _Count | None = None
    keep: Annotated[int | None, Field(ge=-1, le=MOST_TOKENS)] = None
    discard: _Count | None = None
    group: _Count | None = None
    window: _Count | None = None
    method: Annotated[str | None, Field(max_length=40)] = None
    ratio: Annotated[float | None, Field(ge=1, le=1000)] = None
    kv_bits: _Bits | None = None
    far_bits: _Bits | None = None

    def settings(self) -> dict[str, Any]:
        """With another policy than the server's its settings are not meant."""
        given = self.model_dump(exclude={"name", "from_snapshot", *(self.model_extra or {})})
        found = {key: value for key, value in given.items() if value is not None}
        return ({**_NO_SETTINGS, **found}) if self.policy else found


_NO_SETTINGS = dict.fromkeys(("keep", "discard", "group", "window", "method", "ratio"))


class Fork(Body):
    name: _Named | None = None
    at: Annotated[int | None, Field(ge=0, lt=2**40)] = None


class Label(Body):
    name: _Named


class Restore(Body):
    name: _Named | None = None


class Resident(Body):
    resident: bool


@router.post("/v1/sessions", status_code=201, response_model=None)
async def create(body: Create, service: Serving, owner: Owner) -> Response:
    """A new session, empty or where a snapshot stands."""
    engine = service.engine
    if body.from_snapshot is not None:
        found = await asyncio.to_thread(engine.load_snapshot, body.from_snapshot, owner)
        made = engine.restore(found, owner, body.name)
    else:
        made = engine.create(owner, body.name, **body.settings())
    return answer(await asyncio.wrap_future(made), 201)


@router.get("/v1/sessions")
async def sessions(service: Serving, owner: Owner, unnamed: bool = False) -> dict[str, Any]:
    """All of them, the one used last first; `unnamed`: with those made for a prompt."""
    found = await asyncio.wrap_future(service.engine.sessions(owner, unnamed))
    return {"object": "list", "data": [entry_of(kept) for kept in found]}


@router.get("/v1/sessions/{name}", response_model=None)
async def session(name: Name, service: Serving, owner: Owner, revision: Revision) -> Response:
    """One of them; it stays on disk if it is there."""
    kept = await asyncio.wrap_future(service.engine.find(name, owner))
    kept.require_revision(revision)
    return answer(kept)


@router.delete("/v1/sessions/{name}")
async def delete(name: Name, service: Serving, owner: Owner, revision: Revision) -> dict[str, Any]:
    """Forgets it, on disk too."""
    await asyncio.wrap_future(service.engine.delete(name, owner, revision))
    return {"name": name, "object": "session", "deleted": True}


@router.post("/v1/sessions/{name}/fork", status_code=201, response_model=None)
async def fork(
    name: Name, body: Fork, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """A session that goes on where this one stands, or stood after `at` tokens."""
    made = service.engine.fork(name, owner, body.at, body.name, revision)
    return answer(await asyncio.wrap_future(made), 201)


@router.post("/v1/sessions/{name}/save", response_model=None)
async def save(name: Name, service: Serving, owner: Owner, revision: Revision) -> Response:
    """Answers once what it is now is on disk: a kill does not undo it."""
    await asyncio.wrap_future(service.engine.save(name, owner, revision))
    return answer(await asyncio.wrap_future(service.engine.find(name, owner)))


@router.put("/v1/sessions/{name}/resident", response_model=None)
async def resident(
    name: Name, body: Resident, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Whether it stays in memory, whatever others need."""
    await asyncio.wrap_future(service.engine.pin(name, owner, body.resident, revision))
    return answer(await asyncio.wrap_future(service.engine.find(name, owner)))


@router.post("/v1/sessions/{name}/snapshot", status_code=201, response_model=None)
async def snapshot(
    name: Name, body: Label, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Writes what it is now under a name; answers once that is on disk."""
    size = await asyncio.wrap_future(service.engine.snapshot(name, body.name, owner, revision))
    return JSONResponse({"name": body.name, "object": "snapshot", "bytes": size}, 201)


@router.get("/v1/snapshots")
async def snapshots(service: Serving, owner: Owner) -> dict[str, Any]:
    """All of them, with the session that each was taken of."""
    found = await asyncio.to_thread(_snapshots, service.engine, owner)
    return {"object": "list", "data": found}


def _snapshots(engine: Engine, owner: str) -> list[dict[str, Any]]:
    folder, found = engine.snapshots(owner), list[dict[str, Any]]()
    for label in folder.names():
        file = folder.path(label)
        with suppress(FileNotFoundError):  # somebody deletes it meanwhile
            size, created = file.stat().st_size, int(file.stat().st_mtime)
            entry = {"name": label, "object": "snapshot", "bytes": size, "created": created}
            found.append({**entry, "session": _taken_of(engine, file)})
    return found


def _taken_of(engine: Engine, file: Place) -> str | None:
    try:
        return engine.snapshot_session_name(file)
    except StoreError:  # a file that is not sound says so when it is restored
        return None


@router.delete("/v1/snapshots/{name}")
async def delete_snapshot(name: Name, service: Serving, owner: Owner) -> dict[str, Any]:
    freed = await asyncio.to_thread(service.engine.snapshots(owner).remove, name)
    return {"name": name, "object": "snapshot", "deleted": True, "bytes": freed}


@router.post("/v1/snapshots/{name}/restore", status_code=201, response_model=None)
async def restore(name: Name, body: Restore, service: Serving, owner: Owner) -> Response:
    """A new session that goes on, to the bit, where the snapshot was taken."""
    found = await asyncio.to_thread(service.engine.load_snapshot, name, owner)
    made = service.engine.restore(found, owner, body.name)
    return answer(await asyncio.wrap_future(made), 201)
