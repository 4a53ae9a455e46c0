"""The contents of a session that a change explains: exact tokens, the status of each, and cells.

No user's session is so long that tokens are evicted. All contents are known before a change but two
kinds: an answer, unless a response has it, and where an alignment leaves pins.
"""

import math
from dataclasses import replace
from typing import Any

from benchmarks.soak_faults.records import Change, Content, Tokens
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.rendering import encode_pieces, overlap_length
from kvkeep.session.turn_template import TurnTemplate

ALIGNMENT: dict[str, Any] = {"mode": "in_place", "min_saved": 16, "reread": 4}
COMPRESSION: dict[str, Any] = {"ratio": 1.5, "method": "knorm", "recent": 8}
_FIRST = 4  # tokens, which no compression removes


def is_effect(change: Change, old: Content, new: Content) -> bool:
    """Whether a change, made once and whole, explains what a session holds after it."""
    start, end, tokens = change.start, change.end, change.tokens
    match change.kind:
        case "feed" | "generate" | "turn":
            answer = new.tokens[start + len(tokens) :]
            expected = _spliced(old, start, len(old.tokens), (*tokens, *answer))
            return new == expected and _is_answer(change, answer)
        case "insert" | "delete" | "rewind":
            return new == _spliced(old, start, end, tokens)
        case "pin":
            pins = ("pinned",) * (end - start)
            return new == replace(old, status=(*old.status[:start], *pins, *old.status[end:]))
        case "align":
            return _is_aligned(change, old, new)
        case "compress":
            return new == _compressed(old)
    return False


def first_content(tokens: Tokens, policy: str) -> Content:
    """Return what a new session holds after its first text."""
    num_kept = _FIRST if policy == "sliding" else 0
    status = ("kept",) * num_kept + ("window",) * (len(tokens) - num_kept)
    return Content(tokens, status, len(tokens))


def message_tokens(
    codec: TextCodec, end_ids: Tokens, tokens: Tokens, question: str
) -> tuple[int, Tokens]:
    """Return after how many tokens of a session a user's message is put, and its token ids.

    The template's end of an answer is put before it, as far as the session does not end with it;
    another end token at the session's end is removed.
    """
    template = TurnTemplate(codec)
    opening, *rest = template.later_turn_pieces(question)
    ids = tuple(encode_pieces(codec, [template.answer_end + opening, *rest])[0])
    removes_end = tokens[-1] in end_ids and tokens[-1] != ids[0]
    kept = tokens[: len(tokens) - removes_end]
    num_closing = len(codec.encode_sealed(template.answer_end))
    return len(kept), ids[overlap_length(kept, ids[:num_closing]) :]


def _spliced(old: Content, start: int, end: int, tokens: Tokens = ()) -> Content:
    """Return a content after tokens took the place of a range.

    Those between pinned ones are pinned.
    """
    is_inside = start > 0 and end < len(old.status)
    is_pinned = is_inside and old.status[start - 1] == old.status[end] == "pinned"
    status = ("pinned" if is_pinned else "window",) * len(tokens)
    return Content(
        (*old.tokens[:start], *tokens, *old.tokens[end:]),
        (*old.status[:start], *status, *old.status[end:]),
        old.cells - len(old.tokens[start:end]) + len(tokens),
    )


def _is_aligned(change: Change, old: Content, new: Content) -> bool:
    """Whether a text was replaced whole, up to which of several equal tokens keep their pins."""
    start, count = change.start, len(change.tokens)
    if (new.tokens, new.cells, len(new.status)) != (change.tokens, count, count):
        return False
    is_same_before = new.status[:start] == old.status[:start]
    has_cells = set(new.status[start:]) <= {"window", "pinned"}
    return is_same_before and has_cells and new.status.count("pinned") <= old.status.count("pinned")


def _is_answer(change: Change, answer: Tokens) -> bool:
    """Whether these tokens are the whole answer to a change: its only one, if that is known."""
    if not change.max_answer:
        return not answer
    if not answer:
        return False
    *body, last = answer
    is_ended = last in change.end_ids
    is_whole = is_ended or len(answer) == change.max_answer
    if not is_whole or len(answer) > change.max_answer or set(body) & set(change.end_ids):
        return False
    return change.answer is None or change.answer == (tuple(body) if is_ended else answer)


def _compressed(old: Content) -> Content:
    """Return a content after a compression, which leaves first, newest and pinned tokens alone."""
    last = len(old.tokens) - COMPRESSION["recent"]
    status = tuple(
        status if status == "pinned" or not _FIRST <= index < last else "compressed"
        for index, status in enumerate(old.status)
    )
    return Content(old.tokens, status, math.ceil(old.cells / COMPRESSION["ratio"]))
