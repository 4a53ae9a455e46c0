"""What cells are worth for saying their own text again: the scores of KVzip (arXiv:2505.23416).

The model is asked to repeat the text and is then handed it, chunk by chunk, behind what it had read
by the end of that chunk. What attention looks at meanwhile is what is needed to know the text; the
rest can go. (The paper asks behind all that there is. At 4,000 tokens that took a third longer, and
found no more needles, when it was tried.)

With chunks of four tokens, of which the last begins the next chunk, too, of a text a b c d e f:

    cells        a b c d e f
    first chunk  a b c d | Repeat ... exactly. a b c d           scores a b c d
    second       a b c d e f | ... starting with a b c  d e f    scores d e f

What counts of d is the larger score. Without that, a fact that lies across two chunks was lost: the
end of it is easily said when its beginning was, and looked for in vain from nowhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, KVCache, Segment
from kvkeep.cache.rope import Rotation
from kvkeep.cache.step import ChunkStep
from kvkeep.compression.methods.base import ReconstructionScore
from kvkeep.compression.methods.similarity import most_similar
from kvkeep.errors import InvalidArgument
from kvkeep.models.layers.primitives import require_finite
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.memory import Memory

STEP = 512  # tokens evaluated at a time: what asks for a chunk, and the chunk
AGAIN = 24  # tokens at a chunk's end that begin the next one, too: a fact is not cut in two
LEAD = 8  # tokens before a chunk that say where it begins
FIRST = "\n\nRepeat the previous context exactly.\n\n"
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@torch.inference_mode()
def reconstruction(
    memory: Memory,
    text: TextCodec,
    progress: Callable[[int], None] | None = None,
    oldest: int | None = None,
    by: ReconstructionScore = "attention",
) -> Tensor:
    """`[layers, kv_heads, n]` float32: the log of the most that any query gives to each cell.

    For all cells that the memory holds, or so many of the oldest; oldest first. The queries are
    those of the repeated chunk that a cell is of, and of all heads that share its KV head; what
    they give is a share of the softmax over all that they see; by "contribution" (KVzip+,
    arXiv:2601.07891) that times the norm of the projected value, through the norm of the residual
    stream of the query's token. The memory stays as it is.

    A memory that has no room left is asked all the same: the queries then stand up to a chunk
    beyond its budget, and beyond the positions that the model was trained for.

    text: of the model. progress: called after each chunk with the number of cells in it.
    Raises InvalidArgument, before anything is evaluated, where cells are of no one token.
    """
    held, done, scores = held_tokens(memory), 0, list[Tensor]()
    if held is None:
        serials = memory.cache.serials()
        raise InvalidArgument(
            "what is compressed by repeating it must hold a text as it was read: expected cells "
            f"of one token each, found {serials.count(NO_TOKEN)} compressed ones of {len(serials)}:"
            " read the text anew"
        )
    ids = held[:oldest]
    while done < len(ids):
        first = max(0, done - AGAIN)
        asked = _prompt(ids, first, text)
        part = ids[first : first + max(STEP - len(asked), STEP // 2)]
        found, again = _scores(memory, asked, part, first, by), done - first
        if again:
            twice = torch.maximum(scores[-1][..., -again:], found[..., :again])
            scores[-1] = torch.cat((scores[-1][..., :-again], twice), -1)
        scores.append(found[..., again:])
        done = first + len(part)
        if progress:
            progress(len(part) - again)
    return torch.cat(scores, -1)


def held_tokens(memory: Memory) -> list[int] | None:
    """The token of each cell, oldest first; None where there are none, or some are of no one."""
    serials = memory.cache.serials()
    if not serials or NO_TOKEN in serials:
        return None
    token = dict(zip(memory.serials, memory.tokens, strict=True))
    return [token[serial] for serial in serials]


def _prompt(ids: list[int], first: int, text: TextCodec) -> list[int]:
    """What asks for the chunk that begins with token `first`."""
    if not first:
        return text.encode(FIRST)
    return text.encode(LATER) + ids[max(0, first - LEAD) : first] + text.encode("\n\n")


def _scores(
    memory: Memory, asked: list[int], part: list[int], first: int, by: ReconstructionScore
) -> Tensor:
    """`[layers, kv_heads, m]`: of the m tokens `part`, whose cells begin with the `first`-oldest.

    asked: what is evaluated before they are repeated.
    """
    read = memory.cache.fork()
    read.drop_newest(read.cells - first - len(part))  # what came later was not read yet
    step, lengths = _repeated(memory, read, asked + part, by)
    # The last token of the prompt is where the first of the part is looked for.
    rows = slice(len(asked) - 1, None)
    assert step.queries is not None
    assert step.log_sums is not None
    queries, log_sums = step.queries[:, rows], step.log_sums[:, :, rows]
    if lengths is not None:
        log_sums = log_sums + lengths[:, None, rows].log()
    rotations = {
        id(segment): step.rotations[view.rotation]
        for segment, view in zip(read.segments, step.views, strict=True)
    }
    scores = []
    for segment, cells in read.read(first, len(part)):
        rotation = rotations[id(segment)]
        turn = Rotation(rotation.cosine[rows], rotation.sine[rows])
        turned = read.rope.rotate_layers(queries, turn)
        plain = cells.dequantised(turned.dtype)
        if lengths is None:
            scores.append(_largest(plain.keys, turned, log_sums, step.attention.scale))
            continue
        groups = log_sums.shape[1] // plain.keys.shape[1]
        keys = plain.keys.repeat_interleave(groups, 1)  # what it adds is each head's own
        of_heads = _largest(keys, turned, log_sums, step.attention.scale)
        of_heads += memory.decoder.value_norms(plain.values).log()
        scores.append(of_heads.view(len(keys), -1, groups, len(plain)).amax(2))
    return torch.cat(scores, -1)


def _repeated(
    memory: Memory, read: KVCache, ids: list[int], by: ReconstructionScore
) -> tuple[ChunkStep, Tensor | None]:
    """Evaluates tokens behind what was read; what attention saw is in the step.

    Beside it the norms of the residual stream, `[layers, n]`, if they are needed.
    """
    beside, n = read.fork(), len(ids)
    layout, heads = beside.layout.plain, beside.heads
    beside.segments.append(Segment(layout, n))
    with beside.step(n) as step:
        assert isinstance(step, ChunkStep)
        where = layout.device
        shape = (layout.layers, n, heads, layout.head_dim)
        step.queries = torch.empty(shape, dtype=layout.dtype, device=where)
        step.log_sums = torch.empty(layout.layers, heads, n, dtype=torch.float32, device=where)
        lengths = None
        if by == "contribution":
            layers = memory.decoder.spec.layers
            lengths = torch.empty(layers, n, dtype=torch.float32, device=where)
        tokens = torch.tensor(ids, dtype=torch.int64, device=where)
        require_finite(memory.decoder.chunk(tokens, step, lengths))
    spec = memory.decoder.spec
    return step, None if lengths is None else lengths[spec.layers_with_cells(spec.groups[0])]


def _largest(keys: Tensor, queries: Tensor, log_sums: Tensor, scale: float) -> Tensor:
    """`[layers, kv_heads, m]`: the log of the largest share that any query gives to each key.

    That is the largest `q k scale - log_sum`: one product, with the log-sum in two dimensions more.
    keys: `[layers, kv_heads, m, head_dim]`. queries: `[layers, n, heads, head_dim]`, rotated.
    log_sums: `[layers, heads, n]`.
    """
    layers, kv_heads, count, width = keys.shape
    ones = keys.new_ones(layers, kv_heads, count, 2)
    less = (-log_sums / scale).unsqueeze(-1)
    coarse = less.to(keys.dtype)
    fine = (less - coarse).to(keys.dtype)  # what the first lost by rounding to bfloat16
    rows = torch.cat((queries.transpose(1, 2), coarse, fine), -1)
    among = rows.reshape(layers, kv_heads, -1, width + 2)
    largest, _ = most_similar(torch.cat((keys, ones), -1), among)
    return largest * scale
