"""Probabilities of tokens, as OpenAI's clients read them."""

from typing import Any

from kvkeep.engine import Likely, Written
from kvkeep.models.text import TextCodec


def chat_entry(codec: TextCodec, event: Written) -> dict[str, Any] | None:
    """Of one token, in the form of chats; None where none was asked for."""
    if event.likely is None:
        return None
    top = [_entry(codec, each) for each in event.top]
    return {**_entry(codec, event.likely), "top_logprobs": top}


def old_entry(codec: TextCodec, events: list[Written]) -> dict[str, Any] | None:
    """Of all tokens, in the form of completions."""
    known = [event for event in events if event.likely is not None]
    if not known:
        return None
    texts = [codec.decode([event.token]) for event in known]
    starts = [sum(map(len, texts[:index])) for index in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [event.likely.log_probability for event in known if event.likely],
        "top_logprobs": [
            {codec.decode([each.token]): each.log_probability for each in event.top}
            for event in known
        ],
        "text_offset": starts,
    }


def _entry(codec: TextCodec, likely: Likely) -> dict[str, Any]:
    text = codec.decode([likely.token])
    return {
        "id": likely.token,
        "token": text,
        "logprob": likely.log_probability,
        "bytes": list(text.encode()),
    }
