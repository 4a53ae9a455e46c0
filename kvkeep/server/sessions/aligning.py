"""Alignment of a session: another prompt becomes its text, with the cells that it has of it."""

import dataclasses
from asyncio import to_thread
from typing import Any

from starlette.responses import Response

from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_chat import parse_messages
from kvkeep.chat.renderer import RenderOptions
from kvkeep.errors import InvalidArgument
from kvkeep.server.alignment import AlignmentParams
from kvkeep.server.body_route import body_router
from kvkeep.server.limits import LongText, Messages, TokenIds
from kvkeep.server.sessions.entry import SessionDep
from kvkeep.session.alignment import AlignmentReport
from kvkeep.session.conversation import CHAT_NOTES_KEY, Conversation
from kvkeep.session.session import Session
from kvkeep.types import AlignmentMode

router = body_router()


class AlignRequest(AlignmentParams):
    """The session's new text: a text, token ids, or the messages of a chat.

    mode: "in_place" by default, whatever the server's default is for prompts. Counts that are
    missing are those of the API key or the server. special: whether the text of control tokens is
    parsed.
    """

    mode: AlignmentMode = "in_place"
    text: LongText | None = None
    tokens: TokenIds | None = None
    messages: Messages | None = None
    special: bool = False

    def require_one_input(self) -> None:
        """Raise InvalidArgument unless there is one of text, tokens and messages, not empty."""
        inputs = [value for value in (self.text, self.tokens, self.messages) if value is not None]
        if len(inputs) != 1 or not inputs[0]:
            raise InvalidArgument("use exactly one of text, tokens and messages, and not empty")


@router.post("/v1/sessions/{name}/align", response_model=None)
async def align(body: AlignRequest, context: SessionDep) -> Response:
    """Replace the session's text by a prompt, reusing its cells in place or exactly.

    Other requests continue between its steps. With `messages`, spans name the new turns.
    """
    body.require_one_input()
    model, engine = context.service.model, context.engine
    counts = body.model_dump(exclude_none=True, include={"min_saved", "reread", "reread_share"})
    defaults = dataclasses.asdict(context.default_alignment)
    options: dict[str, Any] = {**defaults, **counts, "mode": body.mode}
    ids, notes, length = body.tokens or [], dict[str, Any](), 0
    if body.text is not None:  # a long text would block the event loop
        ids = await to_thread(model.text.encode, body.text, body.special)
    if body.messages is not None:
        chat = Chat(parse_messages(body.messages))
        systems = [message.text for message in chat.messages if message.role == "system"]
        notes = {CHAT_NOTES_KEY: {"system": systems[0] if systems else None}}
        whole = RenderOptions(continue_final=False)
        prompt = await to_thread(model.renderer.render, chat, whole)
        context.notices.warn(*prompt.warnings)
        length = len(prompt.ids)

    def apply(session: Session) -> dict[str, Any]:
        report: AlignmentReport
        if body.messages is None:
            report = session.align(ids, progress=engine.yield_turn, **options)
        else:
            conversation = Conversation(session, model.text, model.end_token_ids, None)
            report = conversation.align(body.messages, progress=engine.yield_turn, **options)
        return dataclasses.asdict(report)

    return await context.change("align", apply, length or len(ids), notes, in_steps=True)
