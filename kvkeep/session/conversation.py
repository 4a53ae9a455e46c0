"""A chat in a session: each turn renders and prefills only what is new."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.session.rendering import common, cut, encode_pieces, mark_for

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.session import Session
    from kvkeep.session.spans import TokenRange

CHAT = "chat"  # note of a snapshot: what a chat needs beside its tokens; see Conversation.notes
_MARK = mark_for()  # placeholder for an answer in a rendering


def system_tokens(codec: "TextCodec", system: str) -> int:
    """Return how many of a chat's first tokens are its system prompt, as the template writes it.

    Raises InvalidArgument if the template takes no system prompt, UnsupportedModel if there is no
    template.
    """
    pieces = _first_pieces(codec, system, mark_for(system))
    before, text, between = pieces[:3]
    try:
        prompt = {"role": "system", "content": system}
        part = codec.chat([prompt], add_generation_prompt=False).sealed
    except KvkeepError:
        part = ""
    # Some templates put it inside the first user turn: then it ends where the user's text begins.
    after = between
    if part.startswith(before + text) and "".join(pieces).startswith(part):
        after = part[len(before + text) :]
    # If the part ends inside a word, its last token differs from that of the whole.
    ids, _ = encode_pieces(codec, [before, text, after])
    return common(encode_pieces(codec, pieces)[0], ids)


class Conversation:
    """A chat in a session: the tokens to prefill for each turn, and the spans of each turn.

    The text in the session is what the template would render of the whole conversation, but only
    its newest turn is ever rendered, so that each turn of an endless chat costs the same. Texts of
    the template are sealed (see `ControlTokens`): no text of a message can be a control token.

    Turns are spans of the session, which follow every edit: "system" and "turn 3" include the
    template's tokens around them ("opening" if the template writes something before the first turn
    without a system prompt); "system text", "turn 3 question" and "turn 3 answer" exclude them. No
    token of the latter reaches into the template, so that any can be replaced by its name (for the
    exceptions, see `encode_pieces`).
    """

    def __init__(
        self,
        session: "Session",
        codec: "TextCodec",
        eos_token_ids: tuple[int, ...],
        system: str | None,
    ):
        self.session = session
        self.codec = codec
        self._eos = eos_token_ids
        self.notes: dict[str, str | None] = {"system": system}  # the rest is in tokens and spans
        self._last = max(self.turns, default=0)
        _rendered_first(codec, system, "")  # raises if there is no template

    def fork(self) -> "Conversation":
        """Return the same conversation in a fork of the session."""
        return Conversation(self.session.fork(), self.codec, self._eos, self.system)

    @property
    def system(self) -> str | None:
        return self.notes["system"]

    @system.setter
    def system(self, text: str | None) -> None:
        self.notes["system"] = text

    @property
    def turns(self) -> list[int]:
        """The numbers of the turns; a deleted one leaves a gap."""
        return turns_in(self.session.places)

    @property
    def last_turn(self) -> int:
        """The number of the newest turn; 0 if there is none. Cheap at any length."""
        while self._last and f"turn {self._last}" not in self.session.places:
            self._last -= 1
        return self._last

    def begin_turn(self, words: str) -> list[int]:
        """Return the tokens to prefill so that the model answers `words`: those not in memory yet.

        An answer that was cut off is closed first; a complete one has its end-of-turn token in
        memory already. An end token that is not the template's is taken back.
        """
        if not self.session.tokens:
            return encode_pieces(self.codec, self._first(words))[0]
        head, (before, *rest) = self._head, self._opening(words)
        if head is not None and head[1] == len(self.session.tokens):
            return encode_pieces(self.codec, [before, *rest])[0]
        closing = self.codec.encode_sealed(self._closing)
        ids, _ = encode_pieces(self.codec, [self._closing + before, *rest])
        last = self.session.tokens[-1]
        if last in self._eos and last != ids[0] and not self.session.cache.recurrent:
            # An end token other than the template's: no turn followed it in training.
            self.session.rewind(1)
        return ids[_overlap(self.session.tokens, ids[: len(closing)]) :]

    def name_turn(self, words: str, fed: int, written: int = 0) -> None:
        """Name the spans of a turn whose tokens were prefilled.

        fed: count of tokens that `begin_turn` returned. written: count of tokens generated since.
        """
        total, newest = len(self.session.tokens) - written, self.last_turn
        opening, places = encode_pieces(self.codec, self._opening(words))
        ids = self.session.tokens[total - fed : total]
        own = len(opening) if ids[-len(opening) :] == opening else fed
        first, turn = total - own, f"turn {newest + 1}"
        if newest:
            # The end of an answer belongs to its turn, so that a turn can be deleted as a whole.
            last = f"turn {newest}"
            self.session.name(last, self.session.places[last][0], first)
        elif fed == total and first:
            self._name_head(words, first)
        self.session.name(turn, first, total)
        self._last = newest + 1
        if own == fed == total and ids != opening:  # the template writes the first turn differently
            opening, places = encode_pieces(self.codec, self._first(words))
        start, end = places[-2]
        if start < end:
            before = total - len(opening)
            self.session.name(f"{turn} question", before + start, before + end)

    @property
    def is_open(self) -> bool:
        """Whether the newest turn has no answer yet."""
        last, places = f"turn {self.last_turn}", self.session.places
        return last in places and f"{last} answer" not in places

    def end_turn(self) -> None:
        """Name the span of the answer, once it is complete."""
        if not self.last_turn:
            return
        turn, tokens = f"turn {self.last_turn}", self.session.tokens
        start, first = self.session.places[turn]
        end = len(tokens)
        self.session.name(turn, start, end)
        if end > first and tokens[-1] in self._eos:
            end -= 1
        if end > first:
            self.session.name(f"{turn} answer", first, end)

    def undo(self) -> int:
        """Rewind the last turn, question and answer; return the count of its tokens.

        Raises InvalidArgument if there is none, or if memory no longer holds all of it.
        """
        if not self.last_turn:
            raise InvalidArgument("there is no turn to take back")
        count = len(self.session.tokens) - self.session.places[f"turn {self.last_turn}"][0]
        self.session.rewind(count)
        return count

    @property
    def _head(self) -> "TokenRange | None":
        """The range before the first turn."""
        places = self.session.places
        return places.get("system", places.get("opening"))

    def _name_head(self, words: str, end: int) -> None:
        self.session.name("opening" if self.system is None else "system", 0, end)
        if self.system is None:
            return
        _, places = encode_pieces(self.codec, self._first(words))
        start, end = places[1]
        if start < end:
            self.session.name("system text", start, end)

    @cached_property
    def _closing(self) -> str:
        """The text that the template writes after an answer."""
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
        closing = self.codec.chat(turn, add_generation_prompt=False).sealed.partition(_MARK)[2]
        return closing if self._after("-").startswith(closing) else ""

    def _opening(self, words: str) -> tuple[str, str, str]:
        """A later turn up to where its answer begins, in pieces as `_first` returns them."""
        mark, closing = mark_for(words), len(self._closing)
        return cut(self._after(words)[closing:], self._after(mark)[closing:], mark)

    def _first(self, words: str) -> list[str]:
        return _first_pieces(self.codec, self.system, words)

    def _after(self, words: str) -> str:
        turns = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": words},
        ]
        return self.codec.chat(turns).sealed.partition(_MARK)[2]


def _first_pieces(codec: "TextCodec", system: str | None, words: str) -> list[str]:
    """The first turn and everything before it, in pieces.

    The user's words are the last piece but one, and the system prompt's text, if there is one, the
    second. Either is "" if the template does not write it as one piece.
    """
    whole, mark = _rendered_first(codec, system, words), mark_for(system, words)
    before, text, after = cut(whole, _rendered_first(codec, system, mark), mark)
    if system is None:
        return [before, text, after]
    head, own, rest = cut(whole, _rendered_first(codec, mark, words), mark)
    between = len(rest) - len(text) - len(after)
    if not own or between < 0:
        return ["", "", before, text, after]
    return [head, own, rest[:between], text, after]


def _rendered_first(codec: "TextCodec", system: str | None, words: str) -> str:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return codec.chat([*opening, {"role": "user", "content": words}]).sealed


def turns_in(spans: Iterable[str]) -> list[int]:
    """Return the numbers of the turns among the names of spans, ascending."""
    names = [name.removeprefix("turn ") for name in spans if name.startswith("turn ")]
    return sorted(int(name) for name in names if name.isdecimal())


def _overlap(tokens: Sequence[int], ids: list[int]) -> int:
    """The largest n so that the last n tokens are the first n ids."""
    lengths = range(min(len(tokens), len(ids)), 0, -1)
    return next((n for n in lengths if tokens[-n:] == ids[:n]), 0)
