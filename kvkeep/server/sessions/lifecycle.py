"""Creating, listing, forking, saving and deleting sessions; and their snapshots."""

from asyncio import to_thread, wrap_future
from concurrent.futures import Future
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse, Response

from kvkeep.chat.compaction_items import is_handle
from kvkeep.engine import Engine, SessionOperations
from kvkeep.engine.session_files import ENGINE_NOTES_KEY
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.server.body_route import body_router
from kvkeep.server.limits import MAX_TOKENS
from kvkeep.server.schemas import StrictBody
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sessions.entry import (
    SessionDep,
    SessionName,
    TokenIndex,
    entry_response,
    require_unreserved,
    session_entry,
    session_response,
)
from kvkeep.storage.snapshots.header import read_summary

router = body_router()
_Title = Annotated[str, Field(min_length=1, max_length=200)]
_PositiveCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
_Bits = Literal["8", "8/4", "4", 8, 4]


class CreateSessionRequest(StrictBody):
    """Settings of a new session, as in Python; the server's settings are the defaults."""

    name: SessionName | None = None
    title: _Title | None = None
    from_snapshot: SessionName | None = None
    policy: Literal["sliding", "shift", "archive", "self_extend", "full"] | None = None
    max_kv_size: _PositiveCount | None = None
    keep: Annotated[int | None, Field(ge=-1, le=MAX_TOKENS)] = None
    discard: _PositiveCount | None = None
    group: _PositiveCount | None = None
    window: _PositiveCount | None = None
    method: Annotated[str | None, Field(max_length=40)] = None
    ratio: Annotated[float | None, Field(ge=1, le=1000)] = None
    kv_bits: _Bits | None = None
    far_bits: _Bits | None = None

    def settings(self) -> dict[str, Any]:
        """Return the given settings. With a policy, the server's policy settings do not apply."""
        not_settings = {"name", "title", "from_snapshot"}
        settings = self.model_dump(exclude=not_settings, exclude_none=True)
        if settings and self.from_snapshot is not None:
            raise InvalidArgument(
                f"a session from a snapshot has the snapshot's settings: leave out {[*settings]}"
            )
        if self.policy is None:
            return settings
        others = {} if self.policy == "archive" else {"calibration": None}
        return {**_UNSET_POLICY_SETTINGS, **others, **settings}


_UNSET_POLICY_SETTINGS = dict.fromkeys(("keep", "discard", "group", "window", "method", "ratio"))


class ForkRequest(StrictBody):
    name: SessionName | None = None
    title: _Title | None = None
    at: TokenIndex | None = None


class RevertRequest(StrictBody):
    to: SessionName


class SnapshotRequest(StrictBody):
    name: SessionName


class RestoreRequest(StrictBody):
    name: SessionName | None = None


class ResidentRequest(StrictBody):
    resident: bool


class TitleRequest(StrictBody):
    title: _Title | None = None


@router.post("/v1/sessions", status_code=201, response_model=None)
async def create(body: CreateSessionRequest, context: ContextDep) -> Response:
    """Create a session, empty or from a snapshot."""
    require_unreserved(body.name)
    owner, settings = context.owner, body.settings()
    if body.from_snapshot is not None:
        return await _restore(body.from_snapshot, body.name, body.title, context)

    def apply(operations: SessionOperations) -> Response:
        record = operations.create(owner, body.name, title=body.title, **settings)
        return session_response(record, 201)

    return await wrap_future(context.engine.run(apply))


@router.get("/v1/sessions")
async def sessions(context: ContextDep, unnamed: bool = False) -> dict[str, Any]:
    """List sessions, most recently used first; `unnamed` includes cached prompts."""

    def entries(operations: SessionOperations) -> list[dict[str, Any]]:
        return [session_entry(record) for record in operations.sessions(context.owner, unnamed)]

    return {"object": "list", "data": await wrap_future(context.engine.run(entries))}


@router.get("/v1/sessions/{name}", response_model=None)
async def retrieve(context: SessionDep) -> Response:
    """Return one session, without loading it from disk."""

    def view(operations: SessionOperations) -> Response:
        return session_response(context.find(operations))

    return await wrap_future(context.engine.run(view))


@router.delete("/v1/sessions/{name}")
async def delete(context: SessionDep) -> dict[str, Any]:
    """Delete a session, in memory and on disk."""
    await wrap_future(context.engine.delete(context.name, context.owner, context.revision))
    return {"name": context.name, "object": "session", "deleted": True}


@router.post("/v1/sessions/{name}/fork", status_code=201, response_model=None)
async def fork(body: ForkRequest, context: SessionDep) -> Response:
    """Fork a session at its end, or after `at` tokens."""
    engine, at = context.engine, body.at
    in_steps = at is not None and await context.rewinds_in_steps(lambda total: total - at)

    def apply(operations: SessionOperations) -> Response:
        progress = engine.yield_turn if in_steps else None
        if context.find(operations).parent != body.name:  # whose place it may take, as an undo does
            require_unreserved(body.name)
        source = (context.name, context.owner, at, body.name, context.revision)
        record = operations.fork(*source, title=body.title, progress=progress)
        return session_response(record, 201)

    return await (context.run_in_steps(apply) if in_steps else wrap_future(engine.run(apply)))


@router.post("/v1/sessions/{name}/revert", response_model=None)
async def revert(body: RevertRequest, context: SessionDep) -> Response:
    """Replace a session's text and title by those of another session, such as a fork of it.

    Its name, its time of creation and whether it is resident stay, and its revision goes on.
    """
    arguments = (context.name, context.owner, body.to, context.revision)

    def apply(operations: SessionOperations) -> Response:
        return session_response(operations.revert(*arguments))

    return await wrap_future(context.engine.run(apply))


@router.post("/v1/sessions/{name}/save", response_model=None)
async def save(context: SessionDep) -> Response:
    """Save a session to disk.

    Responds once the file is written, with the session's fields as of the start of the save, and
    with `saved_revision`.
    """
    begin_save = context.engine.begin_save

    def begin(operations: SessionOperations) -> tuple[dict[str, Any], Future[int]]:
        record = context.find(operations)
        saving = begin_save(record)
        return session_entry(record), saving

    entry, saving = await wrap_future(context.engine.run(begin))
    return entry_response({**entry, "saved_revision": await wrap_future(saving)})


@router.put("/v1/sessions/{name}/resident", response_model=None)
async def resident(body: ResidentRequest, context: SessionDep) -> Response:
    """Set whether a session is resident: kept in memory when others need room."""
    arguments = (context.name, context.owner, body.resident, context.revision)

    def apply(operations: SessionOperations) -> Response:
        return session_response(operations.set_resident(*arguments))

    return await wrap_future(context.engine.run(apply))


@router.put("/v1/sessions/{name}/title", response_model=None)
async def title(body: TitleRequest, context: SessionDep) -> Response:
    """Set a session's display title, as listed in the web UI; null for its name."""
    arguments = (context.name, context.owner, body.title, context.revision)

    def apply(operations: SessionOperations) -> Response:
        return session_response(operations.set_title(*arguments))

    return await wrap_future(context.engine.run(apply))


@router.post("/v1/sessions/{name}/snapshot", status_code=201, response_model=None)
async def snapshot(body: SnapshotRequest, context: SessionDep) -> Response:
    """Save a named snapshot; responds when it is on disk."""
    future = context.engine.snapshot(context.name, body.name, context.owner, context.revision)
    file_bytes = await wrap_future(future)
    return JSONResponse({"name": body.name, "object": "snapshot", "bytes": file_bytes}, 201)


@router.get("/v1/snapshots")
async def snapshots(context: ContextDep) -> dict[str, Any]:
    """List snapshots, each with its session; without those of compacted conversations."""
    data = await to_thread(_snapshot_entries, context.engine, context.owner)
    return {"object": "list", "data": data}


def _snapshot_entries(engine: Engine, owner: str) -> list[dict[str, Any]]:
    folder, entries = engine.snapshots(owner), list[dict[str, Any]]()
    for label in folder.names():
        if engine.shares_snapshots and is_handle(label):  # of a compacted conversation
            continue
        file = folder.path(label)
        with suppress(FileNotFoundError):  # deleted meanwhile
            size, created = file.stat().st_size, int(file.stat().st_mtime)
            entry = {"name": label, "object": "snapshot", "bytes": size, "created": created}
            session, rounded = None, None
            with suppress(StoreError):  # restoring it reports that it is damaged
                summary = read_summary(file)
                notes, rounded = summary.notes, summary.rounded or None
                session_name = notes.get(ENGINE_NOTES_KEY, {}).get("name")
                session = session_name if isinstance(session_name, str) else None
            entries.append({**entry, "session": session, "rounded": rounded})
    return entries


@router.delete("/v1/snapshots/{name}")
async def delete_snapshot(name: SessionName, context: ContextDep) -> dict[str, Any]:
    """Delete a snapshot, and report the bytes freed."""
    freed_bytes = await to_thread(context.engine.snapshots(context.owner).remove, name)
    return {"name": name, "object": "snapshot", "deleted": True, "bytes": freed_bytes}


@router.post("/v1/snapshots/{name}/restore", status_code=201, response_model=None)
async def restore(name: SessionName, body: RestoreRequest, context: ContextDep) -> Response:
    """Create a session from a snapshot; it continues bit-exactly."""
    require_unreserved(body.name)
    return await _restore(name, body.name, None, context)


async def _restore(
    label: str, name: str | None, title: str | None, context: RequestContext
) -> Response:
    snapshot = await to_thread(context.engine.load_snapshot, label, context.owner)

    def apply(operations: SessionOperations) -> Response:
        record = operations.restore(snapshot, context.owner, name)
        if title is not None:
            operations.set_title(record.name, context.owner, title)
        return session_response(record, 201)

    return await wrap_future(context.engine.run(apply))
