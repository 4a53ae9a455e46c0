"""The parts of a chat that commands refer to: a turn, its question or answer, quoted words."""

import re
from bisect import bisect_left
from dataclasses import dataclass

from kvkeep.errors import InvalidArgument
from kvkeep.session.conversation import Conversation

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')
_TURN = re.compile(r"(\d+|last)(?:\.(question|answer|q|a))?")


@dataclass(frozen=True)
class Passage:
    """A part of a conversation: its tokens `start ... end - 1`."""

    description: str
    start: int
    end: int
    text: str = ""  # of these tokens, if the passage was found by quoted words
    quote: str = ""  # these words; `text` may be longer, since its tokens are whole

    @property
    def token_count(self) -> int:
        return self.end - self.start

    def replaced_text(self, new_words: str) -> str:
        """Return the passage's new text, with new words for the quoted ones, or for all."""
        return self.text.replace(self.quote, new_words, 1) if self.quote else new_words


def split_reference(argument: str) -> tuple[str, str]:
    """Split a command's argument into the reference to a passage, and the rest."""
    quoted = _QUOTED.match(argument)
    reference = quoted[0] if quoted else "".join(argument.split(maxsplit=1)[:1])
    return reference, argument[len(reference) :].strip()


def find_passage(conversation: Conversation, reference: str, text_only: bool = False) -> Passage:
    """Find a passage by its reference: 3, 3.question, 3.answer, last, system, or "quoted words".

    text_only: without the chat template's tokens; a turn's number then means its question. Raises
    InvalidArgument if there is no such passage, or if it is not fully in the cache.
    """
    quoted = _QUOTED.fullmatch(reference)
    if quoted:
        passage = _find_words(conversation, quoted[1] or quoted[2])
    else:
        name = _span_name(conversation, reference, text_only)
        spans = conversation.session.span_ranges
        if name not in spans:
            problem = f"there is no {reference}" if reference else "name a passage"
            raise InvalidArgument(f"{problem}; available: {_known_passages(conversation)}")
        passage = Passage(_span_description(name), *spans[name])
    if conversation.session.remembered(passage.start, passage.end) < passage.token_count:
        raise InvalidArgument(f"{passage.description} is not completely in the cache")
    return passage


def _span_name(conversation: Conversation, reference: str, text_only: bool) -> str:
    """Return the name of the session's span for a reference; "" if it is not a valid one."""
    if reference == "system":
        return "system text" if text_only else "system"
    match = _TURN.fullmatch(reference)
    if not match:
        return ""
    turns = conversation.turns
    number = turns[-1] if match[1] == "last" and turns else match[1]
    part = {"q": "question", "a": "answer"}.get(match[2], match[2])
    part = part or ("question" if text_only else "")
    return f"turn {number} {part}" if part else f"turn {number}"


def _find_words(conversation: Conversation, words: str) -> Passage:
    """Find the fewest tokens with the words, in the newest question, answer or system prompt."""
    session, decode = conversation.session, conversation.codec.decode
    newest_first = sorted(session.span_ranges.items(), key=lambda item: -item[1][0])
    for name, (start, end) in newest_first:
        if not name.endswith((" text", "question", "answer")):
            continue
        ids = session.tokens[start:end]
        if words not in decode(ids):
            continue
        # The smallest end and then the largest start between which the words are complete.
        stop = bisect_left(range(len(ids) + 1), True, key=lambda n: words in decode(ids[:n]))
        first = bisect_left(range(stop), True, key=lambda n: words not in decode(ids[n:stop])) - 1
        description, text = f'"{words}" in {_span_description(name)}', decode(ids[first:stop])
        return Passage(description, start + first, start + stop, text, words)
    raise InvalidArgument(f'no question, answer or system prompt contains "{words}"')


def _span_description(span_name: str) -> str:
    if span_name.startswith("system"):
        return "the system prompt"
    _, number, *part = span_name.split(" ")
    return f"the {part[0]} of turn {number}" if part else f"turn {number}"


def _known_passages(conversation: Conversation) -> str:
    turns = [str(number) for number in conversation.turns]
    if not turns:
        return "none"
    if len(turns) > 8:
        turns = [*turns[:3], "...", *turns[-3:]]
    system = ["system"] if "system" in conversation.session.span_ranges else []
    return ", ".join([*system, *turns, "last", 'or "quoted words"'])
