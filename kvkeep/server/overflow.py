"""Prompts longer than the context: refused in words that clients act on, or reported.

Clients look for phrases. OpenAI's look for the code `context_length_exceeded` or for "maximum
context length", llama.cpp's for "exceeds the available context size", and Anthropic's, for which
`ApiError.anthropic_body` has other words, for "prompt is too long".

The server's context policy is "slide", by which the oldest tokens of such a prompt are evicted
where the sessions' policy does so, or "refuse", by which it is an error, upon which agents compact
their conversation.
"""

from typing import Any

from kvkeep.engine import Usage
from kvkeep.server.errors import CONTEXT_LENGTH_CODE, ApiError
from kvkeep.server.service import Service


def overflow_error(service: Service, num_prompt_tokens: int) -> ApiError:
    """Return the error for a prompt that does not fit."""
    limit = service.context_size
    message = (
        f"the request exceeds the available context size: the maximum context length is {limit} "
        f"tokens, and the prompt has {num_prompt_tokens} tokens; shorten the prompt"
    )
    extra = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": limit}
    error_type = "exceed_context_size_error"
    return ApiError(400, message, error_type, CONTEXT_LENGTH_CODE, extra=extra)


def require_prompt_fits(service: Service, num_prompt_tokens: int) -> None:
    """Raise ApiError if the server refuses a prompt of so many tokens, as its policy says."""
    if service.context_policy == "refuse" and num_prompt_tokens >= service.context_size:
        raise overflow_error(service, num_prompt_tokens)  # one token at least is generated


def overflow_warnings(service: Service, num_prompt_tokens: int) -> tuple[str, ...]:
    """Return a warning for a prompt that is longer than the context, if it is."""
    limit = service.context_size
    if num_prompt_tokens <= limit:
        return ()
    return (
        f"the prompt has {num_prompt_tokens} tokens and the context holds {limit}: the answer does "
        "not see all of it",
    )


def evicted_prompt_fields(usage: Usage) -> dict[str, Any]:
    """Return the field `x_kvkeep` of an answer that did not see all of its prompt; else {}."""
    if not usage.evicted:
        return {}
    return {"x_kvkeep": {"evicted_prompt_tokens": usage.evicted}}
