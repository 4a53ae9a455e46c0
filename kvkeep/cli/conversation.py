"""A chat in a session: the model's own template, of which each turn feeds only what is new."""

from collections.abc import Sequence
from typing import Any

from kvkeep import Session
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.models.text import TextCodec

_MARK = "kvkeepanswer"  # stands for an answer in a rendering; letters only, so nothing trims it


def system_tokens(codec: TextCodec, system: str) -> int:
    """How many of a chat's first tokens are its system prompt, as the template writes it.

    Raises InvalidArgument if the template takes no system prompt, UnsupportedModel if there is no
    template.
    """
    prompt = {"role": "system", "content": system}
    whole = codec.chat([prompt, {"role": "user", "content": _MARK}])
    try:
        part = codec.chat([prompt], add_generation_prompt=False)
    except KvkeepError:
        part = ""
    if not part or not whole.startswith(part):
        # Some templates put it inside the first user's turn: then up to the user's own words.
        part = whole.partition(_MARK)[0]
    ids, wanted = codec.encode(whole), codec.encode(part)
    # Where the part ends inside a word, its last token is another one than the whole's.
    return next(
        (n for n, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), len(wanted)
    )


class Conversation:
    """Says what to feed for a turn, and takes turns back.

    The text in the session is what the template would render of the whole conversation, but only
    its newest turn is ever rendered, so that an endless chat costs the same at each turn.
    """

    def __init__(
        self,
        session: Session,
        codec: TextCodec,
        eos_token_ids: tuple[int, ...],
        system: str | None,
        turns: Sequence[int] = (),
    ):
        """turns: as `notes` had them, where the session goes on."""
        self._session = session
        self._codec = codec
        self._eos = eos_token_ids
        self._system = system
        self._marks = list(turns)  # session time before each turn
        self._render_first("")

    @property
    def notes(self) -> dict[str, Any]:
        """What must be kept beside the session to go on: JSON values. Its tokens say the rest."""
        return {"system": self._system, "turns": self._marks}

    @property
    def turns(self) -> int:
        return len(self._marks)

    def begin_turn(self, words: str) -> list[int]:
        """The tokens to feed so that the model answers `words`: those that memory lacks.

        An answer that was cut short is closed first; one that ended by itself has its end-of-turn
        token in memory already.
        """
        if not self._session.cache.time:
            self._marks.append(0)
            return self._codec.encode(self._render_first(words))
        after = self._codec.chat(
            [
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": _MARK},
                {"role": "user", "content": words},
            ]
        ).partition(_MARK)[2]
        ids = self._codec.encode(after)
        last = self._session.tokens[-1]
        if last == ids[0]:
            ids = ids[1:]
        elif last in self._eos:
            # Another end token than the template's: after it the model never saw a next turn.
            self._session.rewind(1)
        self._marks.append(self._session.cache.time)
        return ids

    def undo(self) -> int:
        """Takes the last turn back, question and answer; how many tokens that were.

        Raises InvalidArgument if there is none, or if memory no longer holds all of it.
        """
        if not self._marks:
            raise InvalidArgument("there is no turn to take back")
        count = max(0, self._session.cache.time - self._marks[-1])
        self._session.rewind(count)
        self._marks.pop()
        return count

    def _render_first(self, words: str) -> str:
        opening = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._codec.chat([*opening, {"role": "user", "content": words}])
