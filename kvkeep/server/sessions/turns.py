"""Chat turns in a session: a user's message and its reply, or more of the newest reply."""

from asyncio import to_thread, wrap_future
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.responses import Response

from kvkeep.chat.continuation import ContinuedReader
from kvkeep.engine import GenerationRequest, SessionRecord, SessionRequest
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import title_for
from kvkeep.server.ignored_fields import SESSION_RULES
from kvkeep.server.limits import MAX_TOKENS, LongText
from kvkeep.server.schemas import SamplingParams
from kvkeep.server.sessions.compaction import compact_before_turn, report_fields
from kvkeep.server.sessions.entry import SessionDep, session_response
from kvkeep.server.sessions.generate import respond
from kvkeep.server.sse import JSON_OR_EVENTS
from kvkeep.session.conversation import CHAT_NOTES_KEY, Conversation
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session
from kvkeep.session.stop_gate import ReasoningMarkers
from kvkeep.session.streaming import markers_behind
from kvkeep.session.turn_template import count_system_tokens

router = body_router()
_TEMPLATE_TOKENS = 64  # that a chat template writes around a message, at most


class TurnRequest(SamplingParams):
    """A user's turn. Without content, the newest answer is continued, or given if there is none.

    system: the system prompt, before the first turn only. speculate: as of `/generate`.
    detached: whether the answer goes on when the client is gone, until it is complete or stopped.
    """

    content: Annotated[LongText | None, Field(min_length=1)] = None
    system: LongText | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1024
    stream: bool = False
    speculate: bool | None = None
    detached: bool = False


@router.post("/v1/sessions/{name}/turns", response_model=None, responses=JSON_OR_EVENTS)
async def say(body: TurnRequest, context: SessionDep) -> Response | dict[str, Any]:
    """Prefill a user's turn, as the chat template renders it, and generate the reply.

    Without `content`, continue the newest reply, or start it if the newest turn has none (after a
    rewind to its start, or an alignment that ends with a question).
    Spans name the parts: "turn 2", "turn 2 question", "turn 2 answer", "system".
    """
    SESSION_RULES.check(body, context.notices)
    (sampling,) = body.samplings(context.default_sampling)
    model = context.service.model
    await to_thread(model.renderer.new_reader)  # the first one renders with the template
    new_tokens = 0  # of the message, in a chat that has begun
    if body.content is not None:
        ids = await to_thread(model.text.encode, body.content)
        new_tokens = len(ids) + _TEMPLATE_TOKENS

    def most_tokens(record: SessionRecord) -> int:
        return new_tokens + body.max_tokens if record.has_tokens else 0

    def require_fit(record: SessionRecord) -> None:
        sampling.require_vocabulary(model.spec.vocab_size)
        _require_system(record, body.system)

    turn = _Turn(model, body, sampling)
    request = SessionRequest(turn.request, most_tokens)
    report, revision = await compact_before_turn(context, new_tokens, require_fit)
    context = replace(context, revision=revision)
    extra = {} if report is None else {"compaction": report_fields(report)}
    stream = await context.generate(request, context.name, context.revision, body.detached)
    reader = await to_thread(turn.new_reader)
    return await respond(stream, context, body.stream, reader, extra)


@router.post("/v1/sessions/{name}/stop", response_model=None)
async def stop(context: SessionDep) -> Response:
    """Stop the session's running generation, if any, whichever client started it."""
    arguments = (context.name, context.owner, session_response, context.revision)
    return await wrap_future(context.engine.stop(*arguments))


class _Turn:
    """A turn in a session: the request for its reply, and the reader of it."""

    def __init__(self, model: Model, body: TurnRequest, sampling: Sampling):
        self._model, self._body, self._sampling = model, body, sampling
        # Returns a reader for the reply, once `request` was called; it may take long.
        self.new_reader: Callable[[], ContinuedReader]

    def request(self, record: SessionRecord) -> GenerationRequest:
        """Begin the turn in a session, and return the request for its reply, or for more of it."""
        self._sampling.require_vocabulary(self._model.spec.vocab_size)
        restore = _restorer(record)
        try:
            chat = _conversation(self._model, record, self._body.system)
            if self._body.content is None:
                return self._continuation(chat)
            return self._next_turn(chat, self._body.content, restore)
        except BaseException:
            restore()
            raise

    def _continuation(self, chat: Conversation) -> GenerationRequest:
        chat.reopen_turn()
        self._set_markers(chat.answer_tokens() if self._sampling.stop else ())
        self.new_reader = chat.answer_reader()
        return self._generation((), on_end=lambda *_: chat.end_turn())

    def _next_turn(
        self, chat: Conversation, question: str, restore: Callable[[], None]
    ) -> GenerationRequest:
        """restore: called once a cancelled message was removed."""
        chat.require_room(question)
        if chat.is_open:
            chat.end_turn()
        is_first, ids = not chat.last_turn, chat.begin_turn(question)
        self._set_markers(())
        self.new_reader = partial(ContinuedReader, self._model.renderer.new_reader)

        def on_end(session: Session, num_prefilled: int, num_generated: int) -> None:
            if num_prefilled < len(ids):  # cancelled during prefill
                chat.cancel_turn(question, ids, num_prefilled)
                restore()
                return
            chat.name_turn(question, len(ids), num_generated)
            chat.end_turn()

        title = title_for(question) if is_first else ""
        return self._generation(tuple(ids), title=title, on_end=on_end)

    def _set_markers(self, beginning: Sequence[int]) -> None:
        """Have stop strings count behind the reasoning. beginning: the answer's tokens so far."""
        renderer = self._model.renderer
        markers = ReasoningMarkers.of(renderer.output_format, renderer.starts_in_reasoning)
        markers = markers_behind(self._model.text, markers, beginning)
        self._sampling = replace(self._sampling, reasoning=markers)

    def _generation(self, prompt: tuple[int, ...], **fields: Any) -> GenerationRequest:
        body = self._body
        return GenerationRequest(
            *(prompt, body.max_tokens, self._sampling), speculate=body.speculate, **fields
        )


def _restorer(record: SessionRecord) -> Callable[[], None]:
    """Return a function that forgets the chat which a turn begins, if its session is still empty.

    It restores the chat in the session's notes, not those that were added meanwhile, and the number
    of tokens that are never evicted.
    """
    keep = record.live.keep
    chat = {key: value for key, value in record.notes.items() if key == CHAT_NOTES_KEY}

    def restore() -> None:
        if not record.live.tokens:
            others = {key: value for key, value in record.notes.items() if key != CHAT_NOTES_KEY}
            record.notes = {**others, **chat}
            if record.live.keep != keep:
                record.live.keep = keep

    return restore


def _conversation(model: Model, record: SessionRecord, system: str | None) -> Conversation:
    """Return the session's chat, which its notes describe. system: of a new chat."""
    _require_system(record, system)
    session, current_system = record.live, _system_prompt(record)
    if not session.tokens and system is not None:
        current_system = system
        _keep_system_prompt(model, session, system)
    chat = Conversation(session, model.text, model.end_token_ids, current_system)
    record.notes = {**record.notes, CHAT_NOTES_KEY: chat.notes}
    return chat


def _require_system(record: SessionRecord, system: str | None) -> None:
    """Raise InvalidArgument if a chat has begun with another system prompt. system: of a turn."""
    if record.live.tokens and system not in (None, _system_prompt(record)):
        raise InvalidArgument(
            "this chat already started with another system prompt, or without one: leave system "
            "out, edit the span 'system text', or create a new session"
        )


def _system_prompt(record: SessionRecord) -> str | None:
    prompt: str | None = record.notes.get(CHAT_NOTES_KEY, {}).get("system")
    return prompt


def _keep_system_prompt(model: Model, session: Session, system: str) -> None:
    """Increase `keep` so that policies that keep first tokens never evict the system prompt."""
    if session.policy not in ("sliding", "shift"):
        return
    count, budget = count_system_tokens(model.text, system), session.max_kv_size
    if count >= budget:
        raise InvalidArgument(
            f"the system prompt takes {count} tokens and is never evicted, which leaves no room in "
            f"a budget of {budget}: shorten it, or create a session with a larger max_kv_size"
        )
    session.keep = max(session.keep, count)
