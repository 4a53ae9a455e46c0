"""llama.cpp's endpoints beside `/completion`: tokens, templates, properties, and slots."""

import time
from asyncio import to_thread, wrap_future
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import Field

from kvkeep import validation
from kvkeep.chat.openai_chat import parse_chat
from kvkeep.chat.renderer import RenderOptions
from kvkeep.errors import NoSuchSession, UnsupportedModel
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import chat_input
from kvkeep.server.limits import Data, LongText, Messages, ShortText, TokenIds, Tools
from kvkeep.server.schemas import RequestBody
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.version import __version__

router = body_router()
NUM_SLOTS = 4  # sessions that clients of llama.cpp address by number


class TokenizeRequest(RequestBody):
    content: LongText
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(RequestBody):
    tokens: TokenIds


class TemplateRequest(RequestBody):
    messages: Messages
    add_generation_prompt: bool = True
    tools: Tools | None = None
    tool_choice: ShortText | Data | None = None
    reasoning_effort: ShortText | None = None
    chat_template_kwargs: Data | None = None


class SlotFile(RequestBody):
    filename: Annotated[str, Field(max_length=200)] = ""


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, context: ContextDep) -> dict[str, Any]:
    """Encode a text. Control tokens are parsed unless `parse_special` is false, as in llama.cpp."""
    tokenizer = context.tokenizer
    ids = await to_thread(tokenizer.encode, body.content, body.parse_special)
    ids = [*tokenizer.opening_ids, *ids] if body.add_special else ids
    if not body.with_pieces:
        return {"tokens": ids}
    pieces = await to_thread(lambda: [_piece(tokenizer, token) for token in ids])
    return {"tokens": [{"id": i, "piece": piece} for i, piece in zip(ids, pieces, strict=True)]}


def _piece(tokenizer: TextCodec, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are not whole characters."""
    piece_bytes = tokenizer.token_bytes(token)
    try:
        return piece_bytes.decode()
    except UnicodeDecodeError:
        return list(piece_bytes)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: ContextDep) -> dict[str, str]:
    """Decode token ids. One outside the vocabulary is refused."""
    vocab_size = context.service.model.spec.vocab_size

    def decode() -> str:
        return context.tokenizer.decode(validation.token_ids("tokens", body.tokens, vocab_size))

    return {"content": await to_thread(decode)}


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, context: ContextDep) -> dict[str, str]:
    """Render messages and tools with the model's chat template, as for a chat completion."""
    options = RenderOptions(
        continue_final=None if body.add_generation_prompt else False,
        generation_prompt=body.add_generation_prompt,
        reasoning_effort=body.reasoning_effort,
        template_kwargs=body.chat_template_kwargs or {},
    )
    prompt = await chat_input(context, lambda: parse_chat(body.model_dump()), options)
    return {"prompt": str(prompt.prompt.text)}


@router.get("/props")
async def props(context: ContextDep) -> dict[str, Any]:
    """Return the server's properties, which clients read first."""
    service, tokenizer, sampling = context.service, context.tokenizer, context.default_sampling
    try:
        template = tokenizer.template_files.source()
    except UnsupportedModel:
        template = ""
    return {
        "default_generation_settings": {
            "n_ctx": service.context_size,
            "params": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repeat_penalty": sampling.repetition_penalty,
                "repeat_last_n": sampling.repetition_window,
                "n_predict": -1,
                "seed": 2**32 - 1,  # a random seed
            },
        },
        "total_slots": NUM_SLOTS,
        "model_alias": service.model_name,
        "model_path": service.model_name,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"kvkeep {__version__}",
        "chat_template": template,
        "bos_token": tokenizer.decode(tokenizer.opening_ids),
        "eos_token": tokenizer.decode(service.model.end_token_ids[:1]),
    }


@router.get("/slots")
async def list_slots(context: ContextDep) -> list[dict[str, Any]]:
    """List the slots; one without a session is idle."""
    records = await wrap_future(context.engine.sessions(context.owner))
    busy_names = {record.name for record in records if record.busy}
    n_ctx = context.service.context_size
    return [
        {"id": slot, "n_ctx": n_ctx, "is_processing": slot_session_name(slot) in busy_names}
        for slot in range(NUM_SLOTS)
    ]


@router.post("/slots/{slot}")
async def change_slot(
    slot: Annotated[int, Path(ge=0, lt=NUM_SLOTS)],
    action: Annotated[Literal["save", "restore", "erase"], Query()],
    context: ContextDep,
    body: SlotFile | None = None,
) -> dict[str, Any]:
    """Save a slot's session as a snapshot, restore one into the slot, or empty the slot."""
    engine, owner, session_name = context.engine, context.owner, slot_session_name(slot)
    label, start_time = body.filename if body else "", time.perf_counter()
    if action == "erase":
        try:
            num_tokens = await _token_count(context, session_name)
        except NoSuchSession:
            return {"id_slot": slot, "n_erased": 0}
        await wrap_future(engine.delete(session_name, owner))
        return {"id_slot": slot, "n_erased": num_tokens}
    if action == "save":
        num_bytes = await wrap_future(engine.snapshot(session_name, label, owner))
        counts = {"n_saved": await _token_count(context, session_name), "n_written": num_bytes}
        timings = {"save_ms": 1000 * (time.perf_counter() - start_time)}
    else:
        snapshot = await to_thread(engine.load_snapshot, label, owner)
        await wrap_future(engine.restore(snapshot, owner, session_name, replace=True))
        timings = {"restore_ms": 1000 * (time.perf_counter() - start_time)}
        num_bytes = await to_thread(lambda: engine.snapshots(owner).path(label).stat().st_size)
        counts = {"n_restored": len(snapshot.tokens), "n_read": num_bytes}
    return {"id_slot": slot, "filename": label, **counts, "timings": timings}


async def _token_count(context: RequestContext, session_name: str) -> int:
    return await context.inspect(session_name, lambda record: len(record.live.tokens))


def slot_session_name(slot: int) -> str:
    return f"slot-{slot}"
