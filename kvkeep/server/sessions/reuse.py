"""The reuse of prompts: how much would be reused, and why recent prompts missed the cache."""

from asyncio import to_thread, wrap_future
from typing import Any

from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_chat import parse_chat
from kvkeep.chat.renderer import RenderOptions
from kvkeep.engine import ReuseReport
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.alignment import AlignmentFields
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import chat_input
from kvkeep.server.errors import ApiError
from kvkeep.server.limits import Tools
from kvkeep.server.service import ContextDep
from kvkeep.server.sessions.generate import FeedRequest

router = body_router()


class ExplainRequest(FeedRequest, AlignmentFields):
    """A prompt, and how it may be reused. tools: those that `messages` are sent with."""

    tools: Tools | None = None

    def chat(self) -> Chat:
        """Return the conversation of `messages` with its tools."""
        return parse_chat({"messages": self.messages, "tools": self.tools})


@router.post("/v1/prefix/explain")
async def explain(body: ExplainRequest, context: ContextDep) -> dict[str, Any]:
    """Report how much of a prompt would be reused, and why not more, without evaluating it.

    `messages` (with `tools`) are rendered as in chats: prompt rules are applied, and earlier
    answers of this server are replaced by their sampled tokens. `prompt_rules` names the rules that
    changed the prompt; `written` counts those sampled tokens.
    With `alignment` "in_place" it names each seam, with the texts that would be removed and
    inserted there, or why the prompt would not be aligned.
    """
    model, notices, written = context.service.model, context.notices, 0
    body.require_one_input()
    if body.messages is None:
        ids = await to_thread(body.encode, model, notices, True)
    else:
        prompt = await chat_input(context, body.chat, RenderOptions(continue_final=False))
        ids, written = tuple(prompt.ids), prompt.written_tokens
    if not ids:
        raise ApiError(400, "send text, tokens or messages")
    alignment = body.alignment_options(context)
    report = await wrap_future(context.engine.explain(ids, context.owner, alignment))
    entry = _reuse_entry(report, context.tokenizer)
    return {**entry, "written": written, "prompt_rules": context.notices.rules}


@router.get("/v1/prefix/misses")
async def misses(context: ContextDep) -> dict[str, Any]:
    """List recent prompts that were reused in part or not at all, in the form of `explain`."""
    recent_misses = await wrap_future(context.engine.cache_misses(context.owner))
    data = [
        {"number": miss.number, "created": int(miss.when), **_reuse_entry(miss, context.tokenizer)}
        for miss in recent_misses
    ]
    return {"object": "list", "data": data}


def _reuse_entry(report: ReuseReport, tokenizer: TextCodec) -> dict[str, Any]:
    """Return how much of a prompt is reused, and the texts around the first difference."""
    reuse, difference = report.reuse, report.difference
    entry: dict[str, Any] = {
        **reuse.as_json(report.prompt_tokens),
        "session": reuse.session,
        "reason": "written" if reuse.reason == "sampled" else reuse.reason,
        "differs_at": reuse.differs_at,
    }
    if difference is not None:
        num_shared = difference.at - difference.start  # tokens before the difference
        decode = tokenizer.decode if difference.start == 0 else tokenizer.decode_continuation
        entry["common_text"] = decode(difference.prompt[:num_shared])
        entry["prompt_text"] = tokenizer.decode_continuation(difference.prompt[num_shared:])
        entry["nearest_text"] = tokenizer.decode_continuation(difference.nearest[num_shared:])
    if report.reuse.mode == "in_place":
        entry["seams"] = _seam_entries(report, tokenizer)
    return entry


def _seam_entries(report: ReuseReport, tokenizer: TextCodec) -> list[dict[str, Any]]:
    """Return the seams of a prompt that is aligned in place, with the texts that differ."""
    decode = tokenizer.decode_continuation
    return [
        {
            "at": seam.at,
            "removed_text": decode(seam.removed),
            "inserted_text": decode(seam.inserted),
            "reread": seam.reread,
        }
        for seam in report.seams
    ]
