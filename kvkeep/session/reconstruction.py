"""Reconstruction scores: the attention that each cell gets when its own text is repeated.

KVzip, arXiv:2505.23416. The model is prompted to repeat the text and is then fed it, chunk by
chunk, after the cells that it had prefilled by the end of that chunk. Cells with attention
meanwhile are needed to know the text; the others can be evicted. (The paper appends each chunk to
all cells. At 4,000 tokens that took a third longer, and found no more needles. A model with states
does so here, too: its states are those after the whole text.)

With chunks of four tokens that overlap by one, for a text a b c d e f:

    cells        a b c d e f
    first chunk  a b c d | Repeat ... exactly. a b c d           scores a b c d
    second       a b c d e f | ... starting with a b c  d e f    scores d e f

The score of d is the larger one. Without the overlap a fact that lies across two chunks was lost:
its end is easy to predict after its beginning, but nothing leads to it from the chunk's start.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, AttentionConfig, KVCache, Queries, Segment, softcapped
from kvkeep.cache.rope import Rotation
from kvkeep.cache.step import ChunkStep
from kvkeep.compression.methods.base import ReconstructionScore
from kvkeep.compression.methods.similarity import most_similar
from kvkeep.errors import InvalidArgument
from kvkeep.models.layers.primitives import require_finite
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.memory import Memory

STEP_TOKENS = 512  # tokens evaluated at a time: the prompt and a chunk
OVERLAP_TOKENS = 24  # tokens of a chunk that begin the next one, too
MAX_SAMPLE = 48  # queries that a sample has
QUOTED_TOKENS = 8  # tokens before a chunk that the prompt quotes
FIRST_PROMPT = "\n\nRepeat the previous context exactly.\n\n"
LATER_PROMPT = "\n\nRepeat the part of the previous context exactly, starting with"


class QuerySample:
    """Queries of evenly spaced tokens of a repeated text, at most `MAX_SAMPLE`."""

    def __init__(self) -> None:
        self._seen, self._stride, self._parts = 0, 1, list[Tensor]()

    def start(self, total: int) -> None:
        """Say how many queries are going to be added."""
        self._stride = max(1, math.ceil(total / MAX_SAMPLE))

    def add(self, queries: Tensor) -> None:
        """Record every n-th of the queries `[layers, n, heads, head_dim]`."""
        first = -self._seen % self._stride
        self._parts.append(queries[:, first :: self._stride].clone())
        self._seen += queries.shape[1]

    def queries(self, first_time: int) -> Queries | None:
        """Return the recorded queries, as if of tokens from `first_time` on. None if none were."""
        if not self._parts:
            return None
        vectors = torch.cat(self._parts, 1).transpose(1, 2)
        count = vectors.shape[2]
        times = torch.arange(first_time, first_time + count, dtype=torch.int64, device="cpu")
        return Queries(vectors, times)


@torch.inference_mode()
def reconstruction_scores(
    memory: Memory,
    codec: TextCodec,
    progress: Callable[[int], None] | None = None,
    max_cells: int | None = None,
    kind: ReconstructionScore = "attention",
    sample: QuerySample | None = None,
) -> Tensor:
    """Return the log of the largest score of each cell, `[layers, kv_heads, n]` float32.

    The maximum is over the queries of the cell's repeated chunk, of all query heads of its KV head.
    The memory does not change. If it has no room left, the queries stand up to a chunk beyond its
    budget, and beyond the positions that the model was trained for.

    Args:
        codec: the model's tokenizer.
        progress: called after each chunk with the number of cells in it.
        max_cells: score this many of the oldest cells only; None for all.
        kind: "attention": the softmax weight; "contribution" (KVzip+, arXiv:2601.07891): that times
            the norm of the projected value, over that of the query's token in the residual stream.
        sample: records some of the queries of the text that is scored.

    Raises InvalidArgument, before anything is evaluated, if some cells were compressed before.
    """
    tokens, scored_count, scores = cell_tokens(memory), 0, list[Tensor]()
    if tokens is None:
        serials = memory.cache.serials()
        raise InvalidArgument(
            "methods that repeat the text need a text with uncompressed cells; found "
            f"{serials.count(NO_TOKEN)} compressed of {len(serials)}: evaluate it in a new session"
        )
    ids = tokens[:max_cells]
    if sample is not None:
        sample.start(len(ids))
    while scored_count < len(ids):
        start = max(0, scored_count - OVERLAP_TOKENS)
        prompt = _repeat_prompt(ids, start, codec)
        chunk = ids[start : start + max(STEP_TOKENS - len(prompt), STEP_TOKENS // 2)]
        overlap = scored_count - start
        chunk_scores, queries = _score_chunk(memory, prompt, chunk, start, kind)
        if sample is not None:
            sample.add(queries[:, overlap:])
        if overlap:
            maximum = torch.maximum(scores[-1][..., -overlap:], chunk_scores[..., :overlap])
            scores[-1] = torch.cat((scores[-1][..., :-overlap], maximum), -1)
        scores.append(chunk_scores[..., overlap:])
        scored_count = start + len(chunk)
        if progress:
            progress(len(chunk) - overlap)
    return torch.cat(scores, -1)


def cell_tokens(memory: Memory) -> list[int] | None:
    """Return each cell's token id, oldest first; None if there are none or compressed ones."""
    serials = memory.cache.serials()
    if not serials or NO_TOKEN in serials:
        return None
    token_by_serial = dict(zip(memory.serials, memory.tokens, strict=True))
    return [token_by_serial[serial] for serial in serials]


def _repeat_prompt(ids: list[int], start: int, codec: TextCodec) -> list[int]:
    """Return the tokens of the instruction to repeat the text `ids` from token `start` on."""
    if not start:
        return codec.encode(FIRST_PROMPT)
    quoted = ids[max(0, start - QUOTED_TOKENS) : start]
    return codec.encode(LATER_PROMPT) + quoted + codec.encode("\n\n")


def _score_chunk(
    memory: Memory, prompt: list[int], chunk: list[int], start: int, kind: ReconstructionScore
) -> tuple[Tensor, Tensor]:
    """Return the scores of the cells of a chunk that begins at `start`, `[layers, kv_heads, m]`.

    Also the queries of its tokens, `[layers, m, heads, head_dim]`, before rotation.
    """
    prefix = memory.cache.fork()
    if not memory.decoder.spec.keeps_states:
        prefix.drop_newest(prefix.cells - start - len(chunk))
    step, norms = _evaluate(memory, prefix, prompt + chunk, kind)
    # The last token of the prompt is the query that looks for the first token of the chunk.
    query_rows = slice(len(prompt) - 1, None)
    assert step.queries is not None
    assert step.log_sums is not None
    queries, log_sums = step.queries[:, query_rows], step.log_sums[:, :, query_rows]
    if norms is not None:
        log_sums = log_sums + norms[:, None, query_rows].log()
    rotations = {
        id(segment): step.rotations[view.rotation_index]
        for segment, view in zip(prefix.segments, step.views, strict=True)
    }
    scores = []
    for segment, cells in prefix.read(start, len(chunk)):
        rotation = rotations[id(segment)]
        query_rotation = Rotation(rotation.cosine[query_rows], rotation.sine[query_rows])
        rotated = prefix.rope.rotate_layers(queries, query_rotation)
        cells = cells.dequantise(rotated.dtype)
        if norms is None:
            scores.append(_largest_log_weights(cells.keys, rotated, log_sums, step.attention))
            continue
        group_size = log_sums.shape[1] // cells.keys.shape[1]
        keys = cells.keys.repeat_interleave(group_size, 1)  # each query head has its own projection
        head_scores = _largest_log_weights(keys, rotated, log_sums, step.attention)
        head_scores += memory.decoder.value_norms(cells.values).log()
        scores.append(head_scores.view(len(keys), -1, group_size, len(cells)).amax(2))
    return torch.cat(scores, -1), step.queries[:, len(prompt) :]


def _evaluate(
    memory: Memory, prefix: KVCache, ids: list[int], kind: ReconstructionScore
) -> tuple[ChunkStep, Tensor | None]:
    """Evaluate tokens after a prefix; return the step with its queries and log-sums of attention.

    Also the norms of the residual stream, `[layers, n]`, if the score needs them.
    """
    fork, n = prefix.fork(), len(ids)
    layout, heads, spec = fork.layout.plain, fork.attention.heads, memory.decoder.spec
    fork.segments.append(Segment(layout, n))
    with fork.step(n) as step:
        assert isinstance(step, ChunkStep)
        device = layout.device
        shape = (layout.layers, n, heads, layout.head_dim)
        step.queries = torch.empty(shape, dtype=layout.dtype, device=device)
        step.log_sums = torch.empty(layout.layers, heads, n, dtype=torch.float32, device=device)
        norms = None
        if kind == "contribution":
            norms = torch.empty(spec.layers, n, dtype=torch.float32, device=device)
        tokens = torch.tensor(ids, dtype=torch.int64, device=device)
        require_finite(memory.decoder.forward(tokens, step, norms))
    return step, None if norms is None else norms[spec.layers_with_cells(spec.groups[0])]


def _largest_log_weights(
    keys: Tensor, queries: Tensor, log_sums: Tensor, attention: AttentionConfig
) -> Tensor:
    """Return the log of each key's largest softmax weight of any query, `[layers, kv_heads, m]`.

    That is the largest `q k scale - log_sum`: one product, with the log-sum in two more dimensions.

    keys: `[layers, kv_heads, m, head_dim]`. queries: `[layers, n, heads, head_dim]`, rotated.
    log_sums: `[layers, heads, n]`, the logarithm of each query's softmax denominator.
    """
    layers, kv_heads, count, head_dim = keys.shape
    if attention.softcap:
        return _largest_softcapped(keys, queries, log_sums, attention)
    ones = keys.new_ones(layers, kv_heads, count, 2)
    offset = (-log_sums / attention.scale).unsqueeze(-1)
    rounded_offset = offset.to(keys.dtype)
    rounding_error = (offset - rounded_offset).to(keys.dtype)  # of bfloat16
    rows = torch.cat((queries.transpose(1, 2), rounded_offset, rounding_error), -1)
    rows = rows.reshape(layers, kv_heads, -1, head_dim + 2)
    largest, _ = most_similar(torch.cat((keys, ones), -1), rows)
    return largest * attention.scale


def _largest_softcapped(
    keys: Tensor, queries: Tensor, log_sums: Tensor, attention: AttentionConfig
) -> Tensor:
    """Return what `_largest_log_weights` does, for softcapped logits.

    A product is capped before the log-sum is subtracted from it, so the two are not one product.
    """
    kv_heads, largest = keys.shape[1], list[Tensor]()
    for layer_keys, layer_queries, sums in zip(keys, queries, log_sums, strict=True):
        rows = layer_queries.transpose(0, 1).float().reshape(kv_heads, -1, keys.shape[-1])
        products = layer_keys.float() @ rows.mT * attention.scale
        logits = softcapped(products, attention.softcap)
        largest.append((logits - sums.reshape(kv_heads, 1, -1)).amax(-1))
    return torch.stack(largest)
