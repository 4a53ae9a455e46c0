"""Views of a session's memory: token runs by status, text, and cells of each KV head."""

from itertools import groupby
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Query

from kvkeep.cache.ragged import Ragged
from kvkeep.engine import Engine, SessionRecord
from kvkeep.errors import InvalidArgument
from kvkeep.server.service import ContextDep
from kvkeep.server.sessions.entry import SessionName, session_entry
from kvkeep.session.session import Session
from kvkeep.session.streaming import SEAM, pieces_of

router = APIRouter()
_MAX_PIECES = 4096
_SESSION_FIELDS = (
    *("name", "revision", "tokens", "cells", "max_kv_size", "bytes", "parent", "busy"),
    *("resident", "saved_revision", "policy"),
)
_Index = Annotated[int, Query(ge=0, lt=2**16)]
_Position = Annotated[int, Query(ge=0, lt=2**40)]


@router.get("/v1/sessions/{name}/memory")
async def memory(name: SessionName, context: ContextDep) -> dict[str, Any]:
    """Return runs of tokens: kept, pinned, window, grouped, compressed or forgotten."""
    return await context.inspect(name, lambda record: _memory(record, context.engine))


@router.get("/v1/sessions/{name}/text")
async def text(
    name: SessionName,
    context: ContextDep,
    start: _Position = 0,
    end: Annotated[int | None, Query(ge=0, lt=2**40)] = None,
) -> dict[str, Any]:
    """Return tokens `start ... end - 1` with the text of each; at most 4,096.

    The texts joined are the text of these tokens: a character of several tokens comes with the
    last of them, and the others have "".
    """

    def pieces(record: SessionRecord) -> dict[str, Any]:
        tokens = record.live.tokens
        last = min(len(tokens) if end is None else end, start + _MAX_PIECES, len(tokens))
        if start > len(tokens):
            raise InvalidArgument(f"there are {len(tokens)} tokens; found start {start}")
        ids = tokens[start:last]
        texts = pieces_of(context.codec, tokens[max(0, start - SEAM) : start], ids)
        return {
            "start": start,
            "total": len(tokens),
            "revision": record.revision,
            "pieces": [{"id": token, "text": text} for token, text in zip(ids, texts, strict=True)],
        }

    return await context.inspect(name, pieces)


@router.get("/v1/sessions/{name}/heads")
async def heads(
    name: SessionName,
    context: ContextDep,
    layer: _Index | None = None,
    head: _Index | None = None,
) -> dict[str, Any]:
    """Return how many cells each layer and KV head holds; they differ after compression.

    With `layer` and `head`: the positions, of `0 ... end - 1`, of that head's cells.
    """
    if (layer is None) != (head is None):
        raise InvalidArgument("give both layer and head, or neither")
    if layer is None or head is None:
        return await context.inspect(name, lambda record: _cell_counts(record.live))
    return await context.inspect(name, lambda record: _head_positions(record.live, layer, head))


def _memory(record: SessionRecord, engine: Engine) -> dict[str, Any]:
    session, entry = record.live, session_entry(record)
    runs, start = list[dict[str, Any]](), 0
    for status, tokens in groupby(session.token_status):
        count = sum(1 for _ in tokens)
        runs.append({"standing": status, "start": start, "count": count})
        start += count
    spans = {
        span.name: {"start": span.start, "end": span.end, "remembered": span.remembered}
        for span in session.spans.values()
    }
    return {
        **{field: entry[field] for field in _SESSION_FIELDS},
        "bytes_shared": engine.shared_bytes(record),
        "runs": runs,
        "spans": spans,
    }


def _cell_counts(session: Session) -> dict[str, Any]:
    layout = session.cache.layout
    counts = torch.zeros(layout.layers, layout.kv_heads, dtype=torch.int64, device="cpu")
    for segment in session.cache.segments:
        cells = segment.block.slots
        counts += cells.counts if isinstance(cells, Ragged) else segment.length
    return {"layers": layout.layers, "kv_heads": layout.kv_heads, "cells": counts.tolist()}


def _head_positions(session: Session, layer: int, head: int) -> dict[str, Any]:
    layout = session.cache.layout
    if layer >= layout.layers or head >= layout.kv_heads:
        raise InvalidArgument(
            f"there are {layout.layers} layers with {layout.kv_heads} KV heads; found layer "
            f"{layer}, head {head}"
        )
    cell_positions = list[int]()
    for segment in session.cache.segments:
        cells = segment.view(0, segment.length)
        if isinstance(cells, Ragged):
            positions = cells.positions[cells.head_slice(layer, head)]
        else:  # `[n]` for all heads alike, or `[layers, kv_heads, n]`
            positions = cells.positions
            positions = positions[layer, head] if positions.ndim == 3 else positions
        cell_positions += positions.tolist()
    end = max([len(session.tokens), *(position + 1 for position in cell_positions)])
    return {"layer": layer, "head": head, "positions": sorted(cell_positions), "end": end}
