"""Answers in which no call of a tool can begin, although the prompt describes the tools."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvkeep.chat.output_format import OutputFormat
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.sampling import Constraint


class CallsForbidden:
    """A constraint that masks every token which would complete a tool-call marker.

    It masks on top of `within`, if given.
    Markers that plain text may have, such as a fence before JSON, stay possible: what follows them
    is text then.
    """

    def __init__(self, codec: TextCodec, output_format: OutputFormat, within: Constraint | None):
        self._codec, self._within = codec, within
        openers = tuple(dict.fromkeys(form.opener for form in output_format.calls))
        controls = [opener for opener in openers if opener in output_format.control_markers]
        self._forbidden = [codec.encode(opener, special=True)[0] for opener in controls]
        tags = [opener for opener in openers if opener not in controls and opener[0] == "<"]
        self._endings = {tag: _endings(codec, tag) for tag in tags}
        for endings in self._endings.values():
            self._forbidden += endings[0]
        self._tail, self._tail_bytes = b"", max((len(tag.encode()) for tag in tags), default=1)

    @property
    def complete(self) -> bool:
        return bool(getattr(self._within, "complete", False))

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokens that may come next."""
        masked = logits if self._within is None else self._within.masked(logits)
        forbidden = [i for i in (*self._forbidden, *self._next_endings()) if i < len(masked)]
        if not forbidden:
            return masked
        masked = masked.clone()
        masked[forbidden] = -torch.inf
        return masked

    def _next_endings(self) -> list[int]:
        """Return the tokens that would complete a tag which the text has begun."""
        return [
            token
            for tag, endings in self._endings.items()
            for length, tokens in endings.items()
            if length and self._tail.endswith(tag.encode()[:length])
            for token in tokens
        ]

    def accept(self, token: int) -> None:
        """Follow a sampled token."""
        self._tail = (self._tail + self._codec.token_bytes(token))[-self._tail_bytes :]
        if self._within is not None:
            self._within.accept(token)


@lru_cache(maxsize=16)
def _endings(codec: TextCodec, tag: str) -> Mapping[int, Sequence[int]]:
    """Return the tokens that complete a tag, by how many of its characters came before.

    tag: of ASCII characters, which vocabularies have as they are. 0: tokens that contain the tag.
    """
    result: dict[int, list[int]] = {length: [] for length in range(len(tag))}
    for text, token in codec.tokenizer.get_vocab(with_added_tokens=True).items():
        if tag[-1] not in text:  # quick, and true of nearly all tokens
            continue
        if tag in text:
            result[0].append(token)
        for length in range(1, len(tag)):
            if text.startswith(tag[length:]):
                result[length].append(token)
    return result
