"""A turn of a chat, in a session that holds the whole of it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from kvkeep.engine.generation import GenerationRequest
from kvkeep.engine.record import SessionRecord
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.session.conversation import CHAT, Conversation, system_tokens
from kvkeep.session.session import Session


def turn(
    model: Model, words: str, ask: GenerationRequest, system: str | None = None
) -> Callable[[SessionRecord], GenerationRequest]:
    """For `Engine.ask`: reads what a user says, as the model's template has it, and answers.

    Its tokens, and only what is new of them, are evaluated; spans name the question and the
    answer (see `Conversation`). ask: how the answer is written; without a prompt. system: what
    comes before all turns; None for what the session has begun with, also where all of that was
    taken back.

    A question that is cancelled before it is read is taken back. Raises InvalidArgument for a
    system prompt that is another than the session's.
    """

    def asked(kept: SessionRecord) -> GenerationRequest:
        chat = _conversation(model, kept, system)
        if chat.is_open:
            chat.end_turn()
        ids = chat.begin_turn(words)

        def after(session: Session, read: int, written: int) -> None:
            if read < len(ids):
                with suppress(InvalidArgument):  # it has pushed out what was before it
                    session.rewind(read)
                return
            chat.name_turn(words, len(ids), written)
            chat.end_turn()

        return replace(ask, prompt=tuple(ids), on_end=after)

    return asked


def _conversation(model: Model, kept: SessionRecord, system: str | None) -> Conversation:
    session, known = kept.live, kept.notes.get(CHAT, {}).get("system")
    if not session.tokens:
        if system is not None:
            known = system
            _keep(model, session, system)
    elif system not in (None, known):
        raise InvalidArgument(
            "the system prompt comes first in a chat, and this one has begun with another or "
            "without: leave it out, edit the span 'system text', or begin a new session"
        )
    chat = Conversation(session, model.text, model.end_token_ids, known)
    kept.notes = {**kept.notes, CHAT: chat.notes}
    return chat


def _keep(model: Model, session: Session, system: str) -> None:
    """A system prompt is never forgotten, where the policy keeps first tokens."""
    if session.policy not in ("sliding", "shift"):
        return
    needed, budget = system_tokens(model.text, system), session.max_kv_size
    if needed >= budget:
        raise InvalidArgument(
            f"the system prompt takes {needed} tokens and all of it is kept, which leaves no room "
            f"in a memory of {budget}: shorten it, or begin a session with a larger max_kv_size"
        )
    session.keep = max(session.keep, needed)
