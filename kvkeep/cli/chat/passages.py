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

    what: a description for messages. words: the quoted words, "" if none. text: the text of these
    tokens, which may extend beyond the words at both ends.
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


def split(argument: str) -> tuple[str, str]:
    """Split a command's argument into the passage and the rest."""
    quoted = _QUOTED.match(argument)
    what = quoted[0] if quoted else argument.partition(" ")[0]
    return what, argument[len(what) :].strip()


def whole(conversation: Conversation, what: str) -> Passage:
    """Find a turn or the system prompt including its template text, or quoted words.

    Raises InvalidArgument if there is no such passage.
    """
    return _find(conversation, what, text_alone=False)


def content(conversation: Conversation, what: str) -> Passage:
    """Find the text alone of the system prompt, a question or an answer, or quoted words.

    A turn's number alone means its question. Raises InvalidArgument if there is no such passage.
    """
    return _find(conversation, what, text_alone=True)


def _find(conversation: Conversation, what: str, text_alone: bool) -> Passage:
    quoted = _QUOTED.fullmatch(what)
    named = _words(conversation, quoted[1] or quoted[2]) if quoted else None
    part = named or _named(conversation, what, text_alone)
    if conversation.session.remembered(part.start, part.end) < part.tokens:
        raise InvalidArgument(f"{part.what} is not remembered any more, or not whole")
    return part


def _named(conversation: Conversation, what: str, text_alone: bool) -> Passage:
    name = _span_name(conversation, what, text_alone)
    places = conversation.session.places
    if name not in places:
        missing = f"there is no {what} here" if what else "what is missing"
        raise InvalidArgument(f"{missing}; there is: {_known(conversation)}")
    return Passage(_shown(name), *places[name])


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


def _words(conversation: Conversation, words: str) -> Passage:
    """Find words in the newest question, answer or system prompt that contains them.

    The passage is the shortest run of tokens whose text contains the words.
    """
    session, codec = conversation.session, conversation.codec
    places = {
        name: place
        for name, place in session.places.items()
        if name.endswith((" text", "question", "answer"))
    }
    for name, (start, stop) in sorted(places.items(), key=lambda item: -item[1][0]):
        ids = session.tokens[start:stop]
        if words not in codec.decode(ids):
            continue
        end = bisect_left(range(len(ids) + 1), True, key=lambda n: words in codec.decode(ids[:n]))
        tail = bisect_left(range(end), True, key=lambda n: words not in codec.decode(ids[n:end]))
        first = tail - 1
        what, text = f'"{words}" in {_shown(name)}', codec.decode(ids[first:end])
        return Passage(what, start + first, start + end, text, words)
    raise InvalidArgument(f'no question, answer or system prompt has "{words}" in it')


def _shown(name: str) -> str:
    """Describe a span by its name, for messages."""
    if name.startswith("system"):
        return "the system prompt"
    _, number, *part = name.split(" ")
    return f"the {part[0]} of turn {number}" if part else f"turn {number}"


def _known(conversation: Conversation) -> str:
    """List the passages that exist, for messages."""
    turns = [str(number) for number in conversation.turns]
    if len(turns) > 8:
        turns = [*turns[:3], "...", *turns[-3:]]
    system = ["system"] if "system" in conversation.session.places else []
    last = ["last"] if turns else []
    return ", ".join([*system, *turns, *last, 'or "quoted words"']) if turns else "nothing yet"
