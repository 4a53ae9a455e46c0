"""Checkpoints before the tokens with which a sampled answer may end.

Clients send an answer back without its end: an end token, a stop string, white space. The cells of
attention are dropped then, but layers with states have gone past that place, and would have to
evaluate the whole answer again. So their states before such tokens are kept; of one answer, those
before the last two places alone.
"""

from kvkeep.models.text.codec import TextCodec
from kvkeep.session.checkpoints import take_checkpoint
from kvkeep.session.memory import Memory
from kvkeep.session.rendering import overlap_length


def keep_answer_end(
    memory: Memory, codec: TextCodec, token: int, end_ids: tuple[int, ...], stop: tuple[str, ...]
) -> None:
    """Take a checkpoint if a sampled token, which is appended next, may begin an answer's end.

    White space that follows white space does not begin one. Without states there is nothing to do.
    """
    if not memory.decoder.spec.keeps_states or not memory.tokens:
        return
    if may_end_answer(codec, token, end_ids, stop):
        ends_text = token in end_ids or codec.is_control(token)
        is_longer_run = not ends_text and _may_be_cut_off(codec, memory.tokens[-1], ())
        if not (is_longer_run and memory.checkpoints.answer_ends):
            take_checkpoint(memory, at_answer_end=True)


def may_end_answer(
    codec: TextCodec, token: int, end_ids: tuple[int, ...], stop: tuple[str, ...]
) -> bool:
    """Whether a token may begin the end of an answer, which clients do not send back."""
    return token in end_ids or codec.is_control(token) or _may_be_cut_off(codec, token, stop)


def _may_be_cut_off(codec: TextCodec, token: int, stop: tuple[str, ...]) -> bool:
    """Whether a token is white space, or a stop string may begin in it."""
    text = codec.token_bytes(token)
    stops = [each.encode() for each in stop]
    return not text.strip() or any(s in text or overlap_length(text, s) for s in stops)
