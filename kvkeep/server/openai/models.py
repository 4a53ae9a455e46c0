"""`/v1/models`: the model of this server, with the fields of OpenAI's and Anthropic's API.

The length of the context has the names by which clients of llama.cpp (`n_ctx`), vLLM
(`max_model_len`), Open Router (`context_length`) and Anthropic (`max_input_tokens`) know it.
"""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Path

from kvkeep.server.body_route import body_router
from kvkeep.server.errors import ApiError
from kvkeep.server.limits import ShortText
from kvkeep.server.service import ContextDep, Service

router = body_router()


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(context: ContextDep) -> dict[str, Any]:
    """List the model of this server."""
    entry = _entry(context.service)
    page = {"has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    return {"object": "list", "data": [entry], **page}


@router.get("/v1/models/{name:path}")
@router.get("/models/{name:path}", include_in_schema=False)
async def model(name: Annotated[ShortText, Path()], context: ContextDep) -> dict[str, Any]:
    """Return the model with that name."""
    entry = _entry(context.service)
    if entry["id"] != name:
        message = f"there is no model {name!r}; this server has {entry['id']!r}"
        raise ApiError(404, message, "not_found_error", "model_not_found")
    return entry


def _entry(service: Service) -> dict[str, Any]:
    spec, context_size = service.model.spec, service.context_size
    length_names = ("n_ctx", "context_length", "max_model_len", "max_input_tokens", "max_tokens")
    return {
        "id": service.model_name,
        "object": "model",
        "type": "model",
        "display_name": service.model_name,
        "created": service.created,
        "created_at": datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": "kvkeep",
        "lifecycle": "active",
        **dict.fromkeys(length_names, context_size),
        "meta": {
            "vocab_size": spec.vocab_size,
            "n_ctx": context_size,
            "n_ctx_train": spec.max_positions,
            "n_embd": spec.hidden_size,
            "weights": service.model.weights,  # their format, such as "Q4_K"
        },
    }
