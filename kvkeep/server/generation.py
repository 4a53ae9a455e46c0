"""From an API request to generations: the prompt, constraints on the output, and submission."""

import itertools
from asyncio import to_thread
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvkeep.engine import GenerationRequest
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.server.grammar import Grammar
from kvkeep.server.overflow import check_prompt_size, overflow_error
from kvkeep.server.service import GenerationStream, RequestContext
from kvkeep.server.tools import Tools
from kvkeep.session.sampling import Sampling

# Seconds that a stream waits for admission before it begins, with keepalives; errors are then
# events of the stream.
STREAM_PATIENCE = 1.0


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with plain text and the roles of templates. Raises InvalidArgument."""
    if not messages:
        raise InvalidArgument("messages: needs at least one message")
    result = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if content is None and not message.get("tool_calls"):
            raise InvalidArgument(f"messages[{index}] has no content")
        if isinstance(content, list):
            content = "".join(_part_text(index, part) for part in content)
        if role == "developer":  # a role that templates do not know yet
            role = "system"
        result.append({**message, "role": role, "content": "" if content is None else content})
    return result


def _part_text(index: int, part: Any) -> str:
    fields = part if isinstance(part, Mapping) else {}
    part_type, text = fields.get("type"), fields.get("text")
    if part_type not in ("text", "input_text", "output_text") or not isinstance(text, str):
        message = f"messages[{index}]: content parts must be text; found {part_type or part!r}"
        raise InvalidArgument(message)
    return text


async def prompt_ids(
    context: RequestContext,
    messages: list[dict[str, Any]],
    tools: Tools,
    continue_final: bool | None = None,
) -> list[int]:
    """Render messages with the model's chat template and return the token ids.

    The prompt ends where the assistant's turn begins, or within the last message. continue_final:
    whether to continue the last message; None for "if it is the assistant's".
    """
    tokenizer = context.tokenizer

    def encode() -> list[int]:
        normalized_messages = normalize_messages(messages)
        template_messages, template_tools = tools.for_template(tokenizer, normalized_messages)
        from_assistant = [message["role"] == "assistant" for message in template_messages[-2:]]
        if not (from_assistant[-1] if continue_final is None else continue_final):
            return tokenizer.encode(tokenizer.chat(template_messages, tools=template_tools))
        if from_assistant == [True, True]:
            raise InvalidArgument(
                "the last message is the assistant's and is to be continued, but the one before it "
                "is the assistant's too: join them"
            )
        return tokenizer.encode_unfinished_chat(template_messages, template_tools)

    return await to_thread(encode)  # a long text would block the event loop


def constrain(
    context: RequestContext,
    samplings: list[Sampling],
    tools: Tools = Tools(),  # noqa: B008 (frozen)
    schema: Mapping[str, Any] | None = None,
    grammar: str | None = None,
) -> list[Sampling]:
    """Constrain samplings to a forced tool call, or to a JSON schema or GBNF grammar, if given."""
    model = context.service.model
    if tools.forced:
        schema = tools.forced_call_schema()
    if schema is not None and grammar:
        raise InvalidArgument("a grammar cannot be combined with a schema or a required tool call")
    if schema is not None:
        return [replace(s, constraint=Grammar.from_schema(model, schema)) for s in samplings]
    if grammar:
        return [replace(s, constraint=Grammar.from_gbnf(model, grammar)) for s in samplings]
    return samplings


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
