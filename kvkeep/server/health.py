"""Whether the server is well, and which model it has."""

import time
from typing import Any

from fastapi import APIRouter

from kvkeep.server.errors import Problem
from kvkeep.server.schemas import Serving

router = APIRouter()


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health() -> dict[str, str]:
    """Answers as soon as the model is loaded: before that nothing does."""
    return {"status": "ok"}


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def models(service: Serving) -> dict[str, Any]:
    """The one model that is served."""
    spec = service.model.spec
    meta = {
        "vocab_size": spec.vocab_size,
        "n_ctx_train": spec.max_positions,
        "n_embd": spec.hidden_size,
        "weights": service.model.weights,
        "path": str(service.model.path),
    }
    entry = {"id": service.name, "object": "model", "created": service.created}
    return {"object": "list", "data": [{**entry, "owned_by": "kvkeep", "meta": meta}]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Serving) -> dict[str, Any]:
    """The model by its name."""
    found = await models(service)
    entry: dict[str, Any] = found["data"][0]
    if entry["id"] != name:
        raise Problem(
            404, f"there is no model {name!r}; there is {entry['id']!r}", "not_found_error"
        )
    return entry


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
