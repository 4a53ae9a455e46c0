"""What a session holds, to look at: tokens by standing, cells by head, bytes, and the text."""

from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Query

from kvkeep.cache.ragged import Ragged
from kvkeep.engine import Engine, SessionRecord
from kvkeep.errors import InvalidArgument
from kvkeep.server.schemas import Owner, Serving
from kvkeep.server.sessions.entry import Name, look
from kvkeep.session.session import Session
from kvkeep.session.streaming import SEAM, pieces_of

router = APIRouter()
_MOST_PIECES = 4096
_Index = Annotated[int, Query(ge=0, lt=2**16)]
_Place = Annotated[int, Query(ge=0, lt=2**40)]


@router.get("/v1/sessions/{name}/memory")
async def memory(name: Name, service: Serving, owner: Owner) -> dict[str, Any]:
    """Which tokens are kept, pinned, in the window, compressed, forgotten; run by run."""
    engine = service.engine
    return await look(service, name, owner, lambda kept: _memory(kept, engine))


@router.get("/v1/sessions/{name}/text")
async def text(
    name: Name,
    service: Serving,
    owner: Owner,
    start: _Place = 0,
    end: Annotated[int | None, Query(ge=0, lt=2**40)] = None,
) -> dict[str, Any]:
    """Tokens `start ... end - 1` with what each of them says; at most 4,096.

    The texts joined are the text of these tokens: a character of several tokens comes with the
    last of them, and the others have "".
    """
    codec = service.model.text

    def pieces(kept: SessionRecord) -> dict[str, Any]:
        tokens = kept.live.tokens
        last = min(len(tokens) if end is None else end, start + _MOST_PIECES, len(tokens))
        if start > len(tokens):
            raise InvalidArgument(f"there are {len(tokens)} tokens; found start {start}")
        ids = tokens[start:last]
        texts = pieces_of(codec, tokens[max(0, start - SEAM) : start], ids)
        return {
            "start": start,
            "total": len(tokens),
            "revision": kept.revision,
            "pieces": [{"id": token, "text": text} for token, text in zip(ids, texts, strict=True)],
        }

    return await look(service, name, owner, pieces)


@router.get("/v1/sessions/{name}/heads")
async def heads(
    name: Name,
    service: Serving,
    owner: Owner,
    layer: _Index | None = None,
    head: _Index | None = None,
) -> dict[str, Any]:
    """How many cells each layer and KV head holds, which differs after compression.

    With `layer` and `head`: at which positions of `0 ... end - 1` those of one head stand.
    """
    if (layer is None) != (head is None):
        raise InvalidArgument("give both layer and head, or neither")
    if layer is None or head is None:
        return await look(service, name, owner, lambda kept: _heads(kept.live))
    return await look(service, name, owner, lambda kept: _of_head(kept.live, layer, head))


def _memory(kept: SessionRecord, engine: Engine) -> dict[str, Any]:
    session = kept.live
    runs, start = list[dict[str, Any]](), 0
    for standing, each in groupby(session.standing):
        count = sum(1 for _ in each)
        runs.append({"standing": standing, "start": start, "count": count})
        start += count
    spans = {
        span.name: {"start": span.start, "end": span.end, "remembered": span.remembered}
        for span in session.spans.values()
    }
    shared = engine.shared_bytes(kept)
    return {
        "name": kept.name,
        "revision": kept.revision,
        "tokens": len(session.tokens),
        "cells": session.cache.cells,
        "max_kv_size": session.max_kv_size,
        "bytes": session.cache.nbytes,
        "bytes_shared": shared,
        "parent": kept.parent,
        "busy": kept.busy,
        "resident": kept.pinned,
        "saved_revision": kept.saved,
        "policy": session.policy,
        "runs": runs,
        "spans": spans,
    }


def _heads(session: Session) -> dict[str, Any]:
    layout = session.cache.layout
    counts = [[0] * layout.kv_heads for _ in range(layout.layers)]
    for segment in session.cache.segments:
        cells = segment.block.slots
        ragged = cells.counts if isinstance(cells, Ragged) else None
        for layer, row in enumerate(counts):
            for head in range(layout.kv_heads):
                row[head] += segment.length if ragged is None else int(ragged[layer][head])
    return {"layers": layout.layers, "kv_heads": layout.kv_heads, "cells": counts}


def _of_head(session: Session, layer: int, head: int) -> dict[str, Any]:
    layout = session.cache.layout
    if layer >= layout.layers or head >= layout.kv_heads:
        raise InvalidArgument(
            f"there are {layout.layers} layers with {layout.kv_heads} KV heads; found layer "
            f"{layer}, head {head}"
        )
    found = list[int]()
    for segment in session.cache.segments:
        cells = segment.view(0, segment.length)
        if isinstance(cells, Ragged):
            positions = cells.positions[cells.head_slice(layer, head)]
        else:
            every = cells.positions
            positions = every[layer, head] if every.ndim == 3 else every
        found += positions.tolist()
    end = max(len(session.tokens), *(at + 1 for at in found)) if found else len(session.tokens)
    return {"layer": layer, "head": head, "positions": sorted(found), "end": end}
