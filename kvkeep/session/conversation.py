"""A chat in a session: the model's own template, of which each turn feeds only what is new."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidArgument, KvkeepError

if TYPE_CHECKING:
    from kvkeep.models.text import TextCodec
    from kvkeep.session.session import Session
    from kvkeep.session.spans import Place

CHAT = "chat"  # note of a snapshot: what a chat needs beside its tokens; see Conversation.notes
_MARK = "kvkeepanswer"  # stands for an answer in a rendering; letters only, so nothing trims it


def system_tokens(codec: "TextCodec", system: str) -> int:
    """How many of a chat's first tokens are its system prompt, as the template writes it.

    Raises InvalidArgument if the template takes no system prompt, UnsupportedModel if there is no
    template.
    """
    prompt = {"role": "system", "content": system}
    whole = codec.chat([prompt, {"role": "user", "content": _MARK}]).sealed
    try:
        part = codec.chat([prompt], add_generation_prompt=False).sealed
    except KvkeepError:
        part = ""
    if not part or not whole.startswith(part):
        # Some templates put it inside the first user's turn: then up to the user's own words.
        part = whole.partition(_MARK)[0]
    # Where the part ends inside a word, its last token is another one than the whole's.
    return _common(codec.encode_sealed(whole), codec.encode_sealed(part))


class Conversation:
    """Says what to feed for a turn, and knows where each turn is.

    The text in the session is what the template would render of the whole conversation, but only
    its newest turn is ever rendered, so that an endless chat costs the same at each turn. Texts of
    the template are sealed (see `ControlTokens`): nothing that is said can be a control token.

    Where things are is kept in spans of the session, which follow every edit: "system" and
    "turn 3" with the template's tokens around them ("opening" where the template writes something
    before the first turn by itself), "system text", "turn 3 question" and "turn 3 answer" without.
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
        self.notes: dict[str, str | None] = {"system": system}  # tokens and spans say the rest
        self._last = max(self.turns, default=0)
        self._render_first("")

    def fork(self) -> "Conversation":
        """The same conversation in a session of its own."""
        return Conversation(self.session.fork(), self.codec, self._eos, self.system)

    @property
    def system(self) -> str | None:
        return self.notes["system"]

    @system.setter
    def system(self, text: str | None) -> None:
        self.notes["system"] = text

    @property
    def turns(self) -> list[int]:
        """The numbers of the turns; one that was taken out leaves a gap."""
        return turns_in(self.session.places)

    @property
    def last_turn(self) -> int:
        """The number of the newest turn; 0 where there is none. Asked at every turn."""
        while self._last and f"turn {self._last}" not in self.session.places:
            self._last -= 1
        return self._last

    def begin_turn(self, words: str) -> list[int]:
        """The tokens to feed so that the model answers `words`: those that memory lacks.

        An answer that was cut short is closed first; one that ended by itself has its end-of-turn
        token in memory already.
        """
        if not self.session.tokens:
            return self.codec.encode_sealed(self._render_first(words))
        head = self._head
        if head is not None and head[1] == len(self.session.tokens):
            return self.codec.encode_sealed(self._opening(words))
        closing = self.codec.encode_sealed(self._closing())
        ids = self.codec.encode_sealed(self._closing() + self._opening(words))
        last = self.session.tokens[-1]
        if last in self._eos and last != ids[0] and not self.session.cache.recurrent:
            # Another end token than the template's: after it the model never saw a next turn.
            self.session.rewind(1)
        return ids[_overlap(self.session.tokens, ids[: len(closing)]) :]

    def name_turn(self, words: str, fed: int, written: int = 0) -> None:
        """Names what `fed` tokens are, those that `begin_turn` said, `written` ones ago."""
        total, newest = len(self.session.tokens) - written, self.last_turn
        opening = self.codec.encode_sealed(self._opening(words))
        ids = self.session.tokens[total - fed : total]
        own = len(opening) if ids[-len(opening) :] == opening else fed
        first, turn = total - own, f"turn {newest + 1}"
        if newest:
            # What closes an answer belongs to it, so that a turn can be taken out whole.
            last = f"turn {newest}"
            self.session.name(last, self.session.places[last][0], first)
        elif fed == total and first:
            self._name_head(words, ids, first)
        self.session.name(turn, first, total)
        self._last = newest + 1
        odd = own == fed == total and ids != opening  # the first turn is written in its own way
        template = self._render_first(_MARK) if odd else self._opening(_MARK)
        before, _, after = template.partition(_MARK)
        start, end = self._inside(ids[fed - own :], before, after)
        if start < end:
            self.session.name(f"{turn} question", first + start, first + end)

    @property
    def is_open(self) -> bool:
        """Whether the newest turn has no answer yet."""
        last, places = f"turn {self.last_turn}", self.session.places
        return last in places and f"{last} answer" not in places

    def end_turn(self) -> None:
        """Names the answer, once all of it is there."""
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
        """Takes the last turn back, question and answer; how many tokens that were.

        Raises InvalidArgument if there is none, or if memory no longer holds all of it.
        """
        if not self.last_turn:
            raise InvalidArgument("there is no turn to take back")
        count = len(self.session.tokens) - self.session.places[f"turn {self.last_turn}"][0]
        self.session.rewind(count)
        return count

    @property
    def _head(self) -> "Place | None":
        """What comes before the first turn."""
        places = self.session.places
        return places.get("system", places.get("opening"))

    def _name_head(self, words: str, ids: list[int], end: int) -> None:
        self.session.name("opening" if self.system is None else "system", 0, end)
        if self.system is None:
            return
        marked = [{"role": "system", "content": _MARK}, {"role": "user", "content": words}]
        before, _, after = self.codec.chat(marked).sealed.partition(_MARK)
        start, end = self._inside(ids, before, after)
        if start < end:
            self.session.name("system text", start, end)

    def _inside(self, ids: list[int], before: str, after: str) -> tuple[int, int]:
        """Which of the tokens come wholly between two texts of the template."""
        start = _common(ids, self.codec.encode_sealed(before))
        rest = ids[start:][::-1]
        return start, len(ids) - _common(rest, self.codec.encode_sealed(after)[::-1])

    def _closing(self) -> str:
        """What the template writes after an answer."""
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
        closing = self.codec.chat(turn, add_generation_prompt=False).sealed.partition(_MARK)[2]
        return closing if self._after("-").startswith(closing) else ""

    def _opening(self, words: str) -> str:
        """A turn that is not the first, up to where its answer begins."""
        return self._after(words)[len(self._closing()) :]

    def _after(self, words: str) -> str:
        turns = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": words},
        ]
        return self.codec.chat(turns).sealed.partition(_MARK)[2]

    def _render_first(self, words: str) -> str:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.codec.chat([*opening, {"role": "user", "content": words}]).sealed


def turns_in(spans: Iterable[str]) -> list[int]:
    """The numbers of the turns that spans are named after."""
    names = [name.removeprefix("turn ") for name in spans if name.startswith("turn ")]
    return sorted(int(name) for name in names if name.isdecimal())


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first are the same."""
    pairs = zip(ids, others, strict=False)
    return next(
        (n for n, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others))
    )


def _overlap(tokens: Sequence[int], ids: list[int]) -> int:
    """How many of the first ids are there already, as the last tokens."""
    lengths = range(min(len(tokens), len(ids)), 0, -1)
    return next((n for n in lengths if tokens[-n:] == ids[:n]), 0)
