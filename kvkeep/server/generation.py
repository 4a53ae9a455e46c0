"""From an API request to generations: the prompt, constraints on the output, and submission."""

import itertools
from asyncio import wrap_future
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvkeep.engine import GenerationRequest
from kvkeep.errors import ContextFull
from kvkeep.server.generation_stream import GenerationStream
from kvkeep.server.grammar import compile_grammar
from kvkeep.server.overflow import check_prompt_size, overflow_error
from kvkeep.server.service import RequestContext
from kvkeep.session.sampling import Sampling

# Seconds that a stream waits for admission before it begins, with keepalives; errors are then
# events of the stream.
STREAM_PATIENCE = 1.0


async def constrain(
    context: RequestContext,
    samplings: list[Sampling],
    schema: Mapping[str, Any] | None = None,
    gbnf: str | None = None,
) -> list[Sampling]:
    """Constrain samplings to a JSON schema or a GBNF grammar, if given."""
    if schema is None and not gbnf:
        return samplings
    model, compiler = context.service.model, context.service.compiler
    grammar = await wrap_future(compiler.submit(compile_grammar, model, schema, gbnf))
    if grammar is None:
        return samplings
    context.notices.warn(*grammar.warnings)
    return [replace(sampling, constraint=grammar.copy()) for sampling in samplings]


async def start_generations(
    context: RequestContext,
    request: GenerationRequest,
    samplings: list[Sampling],
    patience: float | None = None,
) -> GenerationStream:
    """Start a generation for each sampling. Raises ApiError if the prompt does not fit.

    patience: see `RequestContext.start`; for streams, `STREAM_PATIENCE`.
    """
    return await start_batch(context, [request], samplings, patience)


async def start_batch(
    context: RequestContext,
    requests: Sequence[GenerationRequest],
    samplings: list[Sampling],
    patience: float | None = None,
) -> GenerationStream:
    """Start a generation of each request for each sampling; those of the first request come first.

    Raises as `start_generations`, and then none of them goes on.
    """
    longest = max(len(request.prompt) for request in requests)
    max_tokens = requests[0].max_tokens
    check_prompt_size(context, longest, 1 if max_tokens is None else min(1, max_tokens))
    count, submit_many = len(samplings), context.engine.submit_many
    stream = GenerationStream(len(requests) * count)
    submissions = [
        partial(submit_many, request, samplings, context.owner, stream.listeners[first:][:count])
        for first, request in zip(itertools.count(0, count), requests, strict=False)
    ]
    try:
        await context.start(stream, submissions, patience)
    except ContextFull as error:
        raise overflow_error(context.service, longest) from error
    return stream
