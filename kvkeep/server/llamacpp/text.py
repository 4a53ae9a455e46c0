"""Text to tokens and back, and what the server is."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from kvkeep.errors import UnsupportedModel
from kvkeep.models.text.template import template_source
from kvkeep.server.messages import template_messages
from kvkeep.server.schemas import Body, Owner, Serving
from kvkeep.server.service import Service
from kvkeep.version import __version__

router = APIRouter()
_Id = Annotated[int, Field(ge=0, lt=2**31)]
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
SLOTS = 4  # names for sessions that clients of llama.cpp know by number


class Tokenize(Body):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(Body):
    tokens: list[_Id]


class Template(Body):
    messages: Annotated[list[dict[str, Any]], Field(max_length=10_000)]
    add_generation_prompt: bool = True


@router.post("/tokenize")
async def tokenize(body: Tokenize, service: Serving) -> dict[str, Any]:
    """Token ids of a text; control tokens are parsed unless that is refused, as in llama.cpp."""
    codec = service.model.text
    ids = await asyncio.to_thread(codec.encode, body.content, body.parse_special)
    ids = [*codec.opening_ids, *ids] if body.add_special else ids
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": token, "piece": piece_of(service, token)} for token in ids]}


@router.post("/detokenize")
async def detokenize(body: Detokenize, service: Serving) -> dict[str, str]:
    return {"content": service.model.text.decode(body.tokens)}


@router.post("/apply-template")
async def apply_template(body: Template, service: Serving) -> dict[str, str]:
    """The prompt that messages become."""
    messages = template_messages(body.messages)
    return {"prompt": str(service.model.text.chat(messages, body.add_generation_prompt))}


@router.get("/props")
async def props(service: Serving) -> dict[str, Any]:
    """What clients ask before they begin."""
    return {
        "default_generation_settings": {
            "n_ctx": context(service),
            "params": {**DEFAULTS, "n_predict": -1, "seed": 2**32 - 1},  # one that is drawn
        },
        "total_slots": SLOTS,
        "model_alias": service.name,
        "model_path": service.name,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"kvkeep {__version__}",
        "chat_template": _template(service),
        "bos_token": service.model.text.decode(service.model.text.opening_ids),
        "eos_token": service.model.text.decode(service.model.end_token_ids[:1]),
    }


@router.get("/slots")
async def slots(service: Serving, owner: Owner) -> list[dict[str, Any]]:
    """The sessions that clients of llama.cpp know by number, as far as there are any."""
    known = {kept.name: kept for kept in await asyncio.wrap_future(service.engine.sessions(owner))}
    found = [known.get(slot_name(index)) for index in range(SLOTS)]
    return [
        {
            "id": index,
            "n_ctx": context(service),
            "is_processing": kept is not None and kept.busy,
        }
        for index, kept in enumerate(found)
    ]


def _template(service: Service) -> str:
    try:
        return template_source(service.model.text.folder)
    except UnsupportedModel:
        return ""


def slot_name(index: int) -> str:
    return f"slot-{index}"


def context(service: Service) -> int:
    """How many tokens a session holds at most."""
    return service.engine.settings.get("max_kv_size") or service.model.spec.max_positions


def piece_of(service: Service, token: int) -> str | list[int]:
    """The text of a token inside a text; its bytes where they are no whole characters."""
    raw = service.model.text.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)
