"""Views of a session: its tokens, their texts, and the cells that each KV head holds."""

from itertools import groupby
from typing import Annotated, Any

import torch
from fastapi import Query

from kvkeep.cache.ragged import RaggedCells
from kvkeep.engine import Engine, LastAnswer, SessionRecord
from kvkeep.errors import InvalidArgument
from kvkeep.server.body_route import body_router
from kvkeep.server.service import ContextDep
from kvkeep.server.sessions.entry import SessionName, session_entry
from kvkeep.session.session import Session
from kvkeep.session.streaming import CONTEXT_TOKENS, token_texts

router = body_router()
_MAX_PIECES = 4096  # tokens of one response
_SESSION_FIELDS = (
    *("name", "title", "revision", "tokens", "cells", "max_kv_size", "bytes", "parent", "busy"),
    *("resident", "saved_revision", "policy", "checkpoints", "created"),
)
_Index = Annotated[int, Query(ge=0, lt=2**16)]
_TokenIndex = Annotated[int, Query(ge=0, lt=2**40)]


@router.get("/v1/sessions/{name}/memory")
async def memory(name: SessionName, context: ContextDep) -> dict[str, Any]:
    """Return runs of tokens: kept, pinned, window, grouped, compressed or forgotten.

    `cell_bytes` is what one cell takes, and `bytes` what all take, with those that are reserved for
    the next ones. `bytes_by_part` says what cells, windows of local layers, states and checkpoints
    take, `checkpoints` after how many tokens the last are, and `rewind_evaluates` how many tokens a
    rewind by one token evaluates again. `pin_room` says how many more cells can be pinned, null for
    no limit, `rewind_room` how many of the newest tokens a rewind or a fork can leave out,
    `removable` tokens of which status can be deleted where others follow, and `highest_ratio` the
    highest ratio that `compress` takes by default, null for none. `residual_cells` are the cells,
    over all layers and KV heads, that stand for evicted ones; they belong to no token. `heads` is
    the number of KV heads of all layers, each of which holds `cells`. `last_prompt` reports how
    much of the session's last prompt was reused, moved or evaluated again. `last_answer` has the
    cells held before the last generation (`held`), the prompt tokens evaluated (`read`), the tokens
    generated, their rate (`per_second`) and the end reason (`ended`): "eos", "stop", "length",
    "full", "cancelled" or "failed".
    """
    return await context.inspect(name, lambda record: _memory_view(record, context.engine))


@router.get("/v1/sessions/{name}/text")
async def text(
    name: SessionName, context: ContextDep, start: _TokenIndex = 0, end: _TokenIndex | None = None
) -> dict[str, Any]:
    """Return tokens `start ... end - 1` with their texts; at most 4,096.

    Joined, the texts are the text of these tokens. A character of several tokens is in the text
    of the last one; the others have "".
    """

    def text_view(record: SessionRecord) -> dict[str, Any]:
        tokens = record.live.tokens
        stop = min(len(tokens) if end is None else end, start + _MAX_PIECES, len(tokens))
        if start > len(tokens):
            raise InvalidArgument(f"start must be at most {len(tokens)}, the length; found {start}")
        if end is not None and end < start:
            raise InvalidArgument(f"end must be at least start, {start}; found {end}")
        ids = tokens[start:stop]
        texts = token_texts(context.tokenizer, tokens[max(0, start - CONTEXT_TOKENS) : start], ids)
        return {
            "start": start,
            "total": len(tokens),
            "revision": record.revision,
            "pieces": [{"id": token, "text": text} for token, text in zip(ids, texts, strict=True)],
        }

    return await context.inspect(name, text_view)


@router.get("/v1/sessions/{name}/heads")
async def heads(
    name: SessionName, context: ContextDep, layer: _Index | None = None, head: _Index | None = None
) -> dict[str, Any]:
    """Return how many cells each layer and KV head holds; they differ after compression.

    `residual` says how many of them are residual: each stands for a cluster of evicted cells.
    With `layer` and `head`: the positions, of `0 ... end - 1`, of that head's cells, and in
    `residual` those of the residual ones, which are the mean positions of their clusters.
    """
    if (layer is None) != (head is None):
        raise InvalidArgument("use both layer and head, or neither")
    if layer is None or head is None:
        return await context.inspect(name, lambda record: _cell_counts(record.live))
    return await context.inspect(name, lambda record: _head_positions(record.live, layer, head))


def _memory_view(record: SessionRecord, engine: Engine) -> dict[str, Any]:
    session, entry, use = record.live, session_entry(record), record.live.memory_use
    layout = session.cache.layout
    runs, start = list[dict[str, Any]](), 0
    for status, run in groupby(session.token_status):
        count = len(list(run))
        runs.append({"standing": status, "start": start, "count": count})
        start += count
    spans = {
        span.name: {"start": span.start, "end": span.end, "remembered": span.remembered}
        for span in session.spans.values()
    }
    return {
        **{field: entry[field] for field in _SESSION_FIELDS},
        "cell_bytes": layout.cell_bytes,
        "bytes_shared": engine.shared_bytes(record),
        "bytes_by_part": {
            "cells": use.cells,
            "windows": use.windows,
            "states": use.states,
            "checkpoints": use.checkpoints,
        },
        "residual_cells": use.residual_cells,
        "heads": layout.layers * layout.kv_heads,
        "rewind_evaluates": use.rewind_evaluates,
        "pin_room": use.pin_room,
        "rewind_room": use.rewind_room,
        "removable": use.removable,
        "highest_ratio": use.highest_ratio,
        "last_prompt": record.last_prompt,
        "last_answer": _answer_entry(record.last_answer),
        "runs": runs,
        "spans": spans,
    }


def _answer_entry(answer: LastAnswer | None) -> dict[str, Any] | None:
    """Return an answer's counts, speed and end as JSON. `held`: cells of the session before it."""
    if answer is None:
        return None
    usage = answer.usage
    return {
        "held": usage.held,
        "read": usage.evaluated,
        "generated": usage.generated,
        "per_second": usage.generated / usage.decode_seconds if usage.decode_seconds else 0.0,
        "ended": answer.ended,
    }


def _cell_counts(session: Session) -> dict[str, Any]:
    """Return the number of cells by layer and KV head."""
    layout = session.cache.layout
    counts = torch.zeros(layout.layers, layout.kv_heads, dtype=torch.int64, device="cpu")
    residual = torch.zeros_like(counts)
    for segment in session.cache.segments:
        cells = segment.block.slots
        counts += cells.counts if isinstance(cells, RaggedCells) else segment.length
        if isinstance(cells, RaggedCells):
            residual += cells.residual_counts
    return {
        "layers": layout.layers,
        "kv_heads": layout.kv_heads,
        "cells": counts.tolist(),
        "residual": residual.tolist(),
    }


def _head_positions(session: Session, layer: int, head: int) -> dict[str, Any]:
    """Return the positions, in the text, of the tokens whose cells a KV head holds."""
    layout = session.cache.layout
    if layer >= layout.layers or head >= layout.kv_heads:
        raise InvalidArgument(
            f"layer and head must be below {layout.layers} and {layout.kv_heads}; found {layer} "
            f"and {head}"
        )
    cell_positions, residual = list[int](), list[int]()
    for segment in session.cache.segments:
        cells = segment.view(0, segment.length)
        if isinstance(cells, RaggedCells):
            row_slice = cells.head_slice(layer, head)
            positions = cells.positions[row_slice]
            residual += positions[cells.residual_mask[row_slice]].tolist()
        else:  # `[n]` for all heads alike, or `[layers, kv_heads, n]`
            positions = cells.positions
            positions = positions[layer, head] if positions.ndim == 3 else positions
        cell_positions += positions.tolist()
    end = max([len(session.tokens), *(position + 1 for position in cell_positions)])
    return {
        "layer": layer,
        "head": head,
        "positions": sorted(cell_positions),
        "residual": sorted(residual),
        "end": end,
    }
