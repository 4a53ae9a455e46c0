"""Ollama's routes about models: `/api/tags`, `/api/show`, `/api/ps` and `/api/version`.

The server has one model, which no request can replace.
"""

import hashlib
from contextlib import suppress
from datetime import UTC, datetime
from math import prod
from typing import Any

from starlette.requests import Request as HttpRequest

from kvkeep.errors import UnsupportedModel
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.text.fill_in_middle import FillInMiddle
from kvkeep.server.body_route import body_router
from kvkeep.server.errors import ApiError
from kvkeep.server.limits import ShortText
from kvkeep.server.schemas import RequestBody
from kvkeep.server.service import ContextDep, Service

router = body_router()
# The version of Ollama whose API this is. Clients refuse older servers than they were made for: VS
# Code those before 0.6.4, Codex those before 0.13.4.
_API_VERSION = "0.17.4"
_TAG = ":latest"  # the tag that clients add to a name without one
_NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded


class ShowRequest(RequestBody):
    model: ShortText = ""
    name: ShortText = ""  # an older name of the field


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Return the version of Ollama whose API this is."""
    return {"version": _API_VERSION}


@router.get("/api/tags")
async def tags(context: ContextDep) -> dict[str, Any]:
    """List the model of this server."""
    return {"models": [_entry(context.service)]}


@router.get("/api/ps")
async def running_models(context: ContextDep) -> dict[str, Any]:
    """List the model as loaded."""
    service = context.service
    loaded = {"expires_at": _NEVER, "size_vram": 0, "context_length": service.context_size}
    return {"models": [{**_entry(service), **loaded}]}


@router.post("/api/show")
async def show(body: ShowRequest, context: ContextDep) -> dict[str, Any]:
    """Describe the model."""
    service = context.service
    spec, name = service.model.spec, body.name or body.model
    if name.removesuffix(_TAG) != service.model_name.removesuffix(_TAG):
        raise _no_model_error(name, service)
    try:
        template = context.tokenizer.template_files.source()
    except UnsupportedModel:
        template = ""
    family = _family(service)
    info = {
        "general.architecture": family,
        "general.basename": service.model_name,
        "general.parameter_count": _parameter_count(service),
        f"{family}.context_length": service.context_size,
        f"{family}.embedding_length": spec.hidden_size,
        f"{family}.block_count": spec.layers,
        f"{family}.attention.head_count": spec.heads,
        f"{family}.attention.head_count_kv": spec.kv_heads,
        f"{family}.vocab_size": spec.vocab_size,
    }
    return {
        "modelfile": f"FROM {service.model_name}\n",
        "parameters": "\n".join(f'stop "{text}"' for text in _end_texts(service)),
        "template": template,
        "license": "",
        "details": _details(service),
        "model_info": info,
        "capabilities": _capabilities(service, template),
        "modified_at": _start_time(service),
    }


@router.post("/api/pull")
@router.post("/api/push")
@router.post("/api/create")
@router.post("/api/copy")
@router.delete("/api/delete")
async def change_models(request: HttpRequest, context: ContextDep) -> None:
    """Not supported: the server serves only the model that it was started with."""
    operation = request.url.path.removeprefix("/api/")
    raise ApiError(
        400,  # not 501, after which clients try again
        f"{operation} is not supported: this server has one model, {context.service.model_name!r}; "
        "fetch others with `kvkeep pull` and start a server for each",
        "not_supported_error",
    )


def _capabilities(service: Service, template: str) -> list[str]:
    """Return what the model can do, in Ollama's words."""
    capabilities = ["completion"]
    if template:
        capabilities.append("tools")
        markers = service.model.renderer.output_format.reasoning
        if any(marker.start in template for marker in markers):
            capabilities.append("thinking")
    with suppress(UnsupportedModel):
        FillInMiddle.of(service.model.text)
        capabilities.append("insert")
    return capabilities


def _no_model_error(name: str, service: Service) -> ApiError:
    message = f"model {name!r} not found; this server has {service.model_name!r}"
    return ApiError(404, message, "not_found_error")


def _entry(service: Service) -> dict[str, Any]:
    name = service.model_name
    return {
        "name": name,
        "model": name,
        "modified_at": _start_time(service),
        "size": _weight_bytes(service),
        "digest": hashlib.sha256(f"{name} {service.model.weights}".encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    model = service.model
    return {
        "parent_model": "",
        "format": "gguf" if model.decoder.packed else "safetensors",
        "family": _family(service),
        "families": [_family(service)],
        "parameter_size": _rounded(_parameter_count(service)),
        "quantization_level": model.weights,
    }


def _family(service: Service) -> str:
    """Return the architecture as Ollama writes it, such as "llama" for "LlamaForCausalLM"."""
    return service.model.spec.architecture.partition("For")[0].lower()


def _rounded(count: int) -> str:
    """Return a number of parameters as Ollama writes it, such as "134.5M" or "7.2B"."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _parameter_count(service: Service) -> int:
    return sum(map(prod, tensor_shapes(service.model.spec).values()))


def _weight_bytes(service: Service) -> int:
    decoder = service.model.decoder
    weights = (*decoder.tensors.values(), *decoder.packed.values())
    return sum({id(weight): weight.nbytes for weight in weights}.values())  # tied ones once


def _end_texts(service: Service) -> list[str]:
    return [service.model.text.decode([token]) for token in service.model.end_token_ids]


def _start_time(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat()
