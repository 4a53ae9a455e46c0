"""A turn of a chat in a session that holds the whole chat."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvkeep.engine.generation import GenerationRequest
from kvkeep.engine.record import SessionRecord
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.session.conversation import CHAT, Conversation, system_tokens
from kvkeep.session.session import Session


def chat_turn(
    model: Model, text: str, request: GenerationRequest, system: str | None = None
) -> Callable[[SessionRecord], GenerationRequest]:
    """Return a function for `Engine.submit` that prefills a user's text and answers it.

    Spans name the question and the answer (see `Conversation`). A question that is cancelled before
    its prefill is done is removed again. request: how to generate the answer, without a prompt.
    system: the system prompt; None for the session's. Raises InvalidArgument for another one.
    """

    def build_request(record: SessionRecord) -> GenerationRequest:
        chat = _conversation(model, record, system)
        if chat.is_open:
            chat.end_turn()
        ids = chat.begin_turn(text)

        def on_end(session: Session, prefilled: int, generated: int) -> None:
            if prefilled < len(ids):
                with suppress(InvalidArgument):  # evicted tokens cannot be rewound
                    session.rewind(prefilled)
                return
            chat.name_turn(text, len(ids), generated)
            chat.end_turn()

        return replace(request, prompt=tuple(ids), on_end=on_end)

    return build_request


def _conversation(model: Model, record: SessionRecord, system: str | None) -> Conversation:
    session, current_system = record.live, record.notes.get(CHAT, {}).get("system")
    if not session.tokens:
        if system is not None:
            current_system = system
            _keep_system_prompt(model, session, system)
    elif system not in (None, current_system):
        raise InvalidArgument(
            "the system prompt comes first in a chat, and this one has begun with another or "
            "without: leave it out, edit the span 'system text', or begin a new session"
        )
    chat = Conversation(session, model.text, model.end_token_ids, current_system)
    record.notes = {**record.notes, CHAT: chat.notes}
    return chat


def _keep_system_prompt(model: Model, session: Session, system: str) -> None:
    """Increase `keep` so that policies that keep first tokens never evict the system prompt."""
    if session.policy not in ("sliding", "shift"):
        return
    needed, budget = system_tokens(model.text, system), session.max_kv_size
    if needed >= budget:
        raise InvalidArgument(
            f"the system prompt takes {needed} tokens and all of it is kept, which leaves no room "
            f"in a memory of {budget}: shorten it, or begin a session with a larger max_kv_size"
        )
    session.keep = max(session.keep, needed)
