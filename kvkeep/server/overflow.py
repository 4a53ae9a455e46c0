"""Prompts longer than the context: refused in words that clients act on, or reported.

Clients look for phrases. OpenAI's look for the code `context_length_exceeded` or for "maximum
context length", llama.cpp's for "exceeds the available context size", and Anthropic's, for which
`ApiError.anthropic_body` has other words, for "prompt is too long".

The server's context policy is "refuse", by which such a prompt is an error, upon which agents
compact their conversation, or "slide", by which its oldest tokens are evicted where the sessions'
policy does so. An archive compresses them instead, and so takes them under both.
"""

from kvkeep.server.errors import CONTEXT_LENGTH_CODE, ApiError
from kvkeep.server.service import RequestContext, Service

_EVICTING_POLICIES = ("sliding", "shift")


def overflow_error(service: Service, num_prompt_tokens: int, limit: int | None = None) -> ApiError:
    """Return the error for a prompt that does not fit. limit: by default the context's size."""
    limit = service.context_size if limit is None else limit
    message = (
        f"This model's maximum context length is {limit} tokens. However, your messages resulted "
        f"in {num_prompt_tokens} tokens: the request exceeds the available context size. Shorten "
        "it, or start the server with a larger --max-kv-size or with --context-policy slide."
    )
    extra = {"n_prompt_tokens": num_prompt_tokens, "n_ctx": limit}
    error_type = "exceed_context_size_error"
    return ApiError(400, message, error_type, CONTEXT_LENGTH_CODE, extra=extra)


def require_prompt_fits(
    service: Service,
    num_prompt_tokens: int,
    num_new_tokens: int = 1,
    may_slide: bool | None = None,
) -> None:
    """Raise ApiError for a prompt that does not fit.

    num_new_tokens: that must fit behind the prompt. may_slide: whether a policy that evicts may
    forget a part of the prompt; None for the server's context policy.
    """
    policy, limit = service.engine.default_policy, service.context_size
    may_slide = service.context_policy == "slide" if may_slide is None else may_slide
    if policy == "archive" or (policy in _EVICTING_POLICIES and may_slide):
        limit = service.engine.limits.prompt_tokens
    if num_prompt_tokens + num_new_tokens > limit:
        raise overflow_error(service, num_prompt_tokens, limit)


def check_prompt_size(
    context: RequestContext,
    num_prompt_tokens: int,
    num_new_tokens: int = 1,
    may_slide: bool | None = None,
) -> None:
    """Raise as `require_prompt_fits`; warn of a prompt whose oldest tokens are evicted."""
    service = context.service
    require_prompt_fits(service, num_prompt_tokens, num_new_tokens, may_slide)
    is_evicting = service.engine.default_policy in _EVICTING_POLICIES
    if is_evicting and num_prompt_tokens > service.context_size:
        context.notices.warn(
            f"the prompt has {num_prompt_tokens} tokens and the context holds "
            f"{service.context_size}: the oldest tokens of the prompt are forgotten"
        )
