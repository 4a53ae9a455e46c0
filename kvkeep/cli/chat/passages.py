"""Passages that chat commands refer to: a turn or part of one, the system prompt, or words."""

import re
from bisect import bisect_left
from dataclasses import dataclass

from kvkeep.errors import InvalidArgument
from kvkeep.session.conversation import Conversation

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')
_TURN = re.compile(r"(\d+|last)(?:\.(question|answer|q|a))?")


@dataclass(frozen=True)
class Passage:
    """Tokens `start ... end - 1` of a conversation.

    what: a description. words: the quoted words, "" if none. text: of these tokens, words included.
    """

    what: str
    start: int
    end: int
    text: str = ""
    words: str = ""

    @property
    def tokens(self) -> int:
        return self.end - self.start

    def with_words(self, words: str) -> str:
        """Return the passage's text with the quoted words replaced."""
        return self.text.replace(self.words, words, 1) if self.words else words


def split_passage(argument: str) -> tuple[str, str]:
    """Split an argument into the passage and the rest."""
    quoted = _QUOTED.match(argument)
    what = quoted[0] if quoted else argument.partition(" ")[0]
    return what, argument[len(what) :].strip()


def find_passage(conversation: Conversation, what: str, text_alone: bool = False) -> Passage:
    """Find a turn, a question or answer, the system prompt, or quoted words.

    text_alone: without the template's tokens around it; a turn's number then means its question.
    Raises InvalidArgument if there is no such passage, or if it is not remembered.
    """
    quoted = _QUOTED.fullmatch(what)
    if quoted:
        passage = _find_words(conversation, quoted[1] or quoted[2])
    else:
        name, places = _span_name(conversation, what, text_alone), conversation.session.places
        if name not in places:
            missing = f"there is no {what} here" if what else "what is missing"
            raise InvalidArgument(f"{missing}; there is: {_known_passages(conversation)}")
        passage = Passage(_description(name), *places[name])
    if conversation.session.remembered(passage.start, passage.end) < passage.tokens:
        raise InvalidArgument(f"{passage.what} is not remembered any more, or not whole")
    return passage


def _span_name(conversation: Conversation, what: str, text_alone: bool) -> str:
    """Return the name of the session's span for a passage; "" if it is not a valid passage."""
    if what == "system":
        return "system text" if text_alone else "system"
    match = _TURN.fullmatch(what)
    if not match:
        return ""
    turns = conversation.turns
    number = turns[-1] if match[1] == "last" and turns else match[1]
    part = {"q": "question", "a": "answer"}.get(match[2], match[2])
    part = part or ("question" if text_alone else "")
    return f"turn {number} {part}" if part else f"turn {number}"


def _find_words(conversation: Conversation, words: str) -> Passage:
    """Find the fewest tokens with the words, in the newest question, answer or system prompt."""
    session, decode = conversation.session, conversation.codec.decode
    places = [
        (name, start, end)
        for name, (start, end) in session.places.items()
        if name.endswith((" text", "question", "answer"))
    ]
    for name, start, end in sorted(places, key=lambda place: -place[1]):
        ids = session.tokens[start:end]
        if words not in decode(ids):
            continue
        stop = bisect_left(range(len(ids) + 1), True, key=lambda n: words in decode(ids[:n]))
        # The first position from which the words are cut off is one behind their first token.
        first = bisect_left(range(stop), True, key=lambda n: words not in decode(ids[n:stop])) - 1
        description, text = f'"{words}" in {_description(name)}', decode(ids[first:stop])
        return Passage(description, start + first, start + stop, text, words)
    raise InvalidArgument(f'no question, answer or system prompt has "{words}" in it')


def _description(span_name: str) -> str:
    if span_name.startswith("system"):
        return "the system prompt"
    _, number, *part = span_name.split(" ")
    return f"the {part[0]} of turn {number}" if part else f"turn {number}"


def _known_passages(conversation: Conversation) -> str:
    turns = [str(number) for number in conversation.turns]
    if not turns:
        return "nothing yet"
    if len(turns) > 8:
        turns = [*turns[:3], "...", *turns[-3:]]
    system = ["system"] if "system" in conversation.session.places else []
    return ", ".join([*system, *turns, "last", 'or "quoted words"'])
