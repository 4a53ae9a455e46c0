"""The turns of a conversation as a chat template writes them, in pieces around users' texts."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.session.rendering import (
    common_prefix_length,
    encode_pieces,
    placeholder_for,
    split_at_text,
)

if TYPE_CHECKING:
    from kvkeep.models.text.codec import TextCodec
    from kvkeep.session.spans import TokenRange

_ANSWER_PLACEHOLDER = placeholder_for()  # stands for any answer
_QUESTION_PLACEHOLDER = placeholder_for("")  # of all questions that do not contain it
_ANSWERED_TURN = (("user", "-"), ("assistant", _ANSWER_PLACEHOLDER))


class TurnTemplate:
    """Renders the first turn of a chat, and later ones as they follow an answer.

    Raises UnsupportedModel if the model has no template.
    """

    def __init__(self, codec: "TextCodec"):
        self._codec = codec

    def encode_first_turn(
        self, system: str | None, question: str
    ) -> "tuple[list[int], list[TokenRange]]":
        """Return the tokens of the first turn, and the range of each of its pieces."""
        return encode_pieces(self._codec, self.first_turn_pieces(system, question))

    def encode_later_turn(self, question: str) -> "tuple[list[int], list[TokenRange]]":
        """Return the tokens of a later turn, and the range of each of its pieces."""
        return encode_pieces(self._codec, self.later_turn_pieces(question))

    @cached_property
    def answer_end(self) -> str:
        """The text that the template writes after an answer."""
        rendered = _render(self._codec, *_ANSWERED_TURN)
        end = rendered.partition(_ANSWER_PLACEHOLDER)[2]
        return end if self._render_after_answer("-").startswith(end) else ""

    def later_turn_pieces(self, question: str) -> tuple[str, str, str]:
        """Return a later turn up to where its answer begins: before, of and after the question."""
        placeholder, skipped_length = placeholder_for(question), len(self.answer_end)
        rendered = self._render_after_answer(question)
        with_placeholder = self._placeholder_turn
        if placeholder != _QUESTION_PLACEHOLDER:
            with_placeholder = self._render_after_answer(placeholder)
        return split_at_text(
            rendered[skipped_length:], with_placeholder[skipped_length:], placeholder
        )

    def first_turn_pieces(self, system: str | None, question: str) -> list[str]:
        """Return the first turn and everything before it, in pieces.

        The question is the last piece but one, and the system prompt's text, if there is one, the
        second. Either is "" if the template does not write it as one piece.
        """
        placeholder = placeholder_for(system, question)
        rendered = _render_first_turn(self._codec, system, question)
        with_placeholder = _render_first_turn(self._codec, system, placeholder)
        before_question, text, after_question = split_at_text(
            rendered, with_placeholder, placeholder
        )
        if system is None:
            return [before_question, text, after_question]
        before_system, system_text, rest = split_at_text(
            rendered, _render_first_turn(self._codec, placeholder, question), placeholder
        )
        between_length = len(rest) - len(text) - len(after_question)
        if not system_text or between_length < 0:
            return ["", "", before_question, text, after_question]
        return [before_system, system_text, rest[:between_length], text, after_question]

    def is_question_end(self, tokens: Sequence[int], end: int) -> bool:
        """Whether an answer begins after `end` tokens of a chat: not so in a cut-off message."""
        *_, after_question = self.later_turn_pieces("-")
        ids = self._codec.encode_sealed(after_question)
        # Compared as text, and with a few tokens more, as tokens may differ beside other text.
        text = self._codec.decode(tokens[max(0, end - len(ids) - 4) : end])
        return text.endswith(self._codec.decode(ids))

    @cached_property
    def _placeholder_turn(self) -> str:
        """The text between an answer and the next one, with a placeholder as the question."""
        return self._render_after_answer(_QUESTION_PLACEHOLDER)

    def _render_after_answer(self, question: str) -> str:
        """Return what the template writes after an answer, up to the next question's answer."""
        rendered = _render(self._codec, *_ANSWERED_TURN, ("user", question))
        return rendered.partition(_ANSWER_PLACEHOLDER)[2]


def count_system_tokens(codec: "TextCodec", system: str) -> int:
    """Return how many of a chat's first tokens are its system prompt, with the template around it.

    Raises InvalidArgument if the template takes none, UnsupportedModel if there is none.
    """
    pieces = TurnTemplate(codec).first_turn_pieces(system, placeholder_for(system))
    before_system, text, after_system = pieces[:3]
    try:
        system_only = _render(codec, ("system", system))
    except KvkeepError:
        system_only = ""
    # Some templates put it inside the first user turn: then it ends where the user's text begins.
    system_end = after_system
    if system_only.startswith(before_system + text) and "".join(pieces).startswith(system_only):
        system_end = system_only[len(before_system + text) :]
    # If it ends inside a word, its last token differs from that of the whole rendering.
    ids, _ = encode_pieces(codec, [before_system, text, system_end])
    return common_prefix_length(encode_pieces(codec, pieces)[0], ids)


def _render_first_turn(codec: "TextCodec", system: str | None, question: str) -> str:
    system_messages = [] if system is None else [("system", system)]
    return _render(codec, *system_messages, ("user", question))


def _render(codec: "TextCodec", *messages: tuple[str, str]) -> str:
    """Render (role, content) pairs, up to where the answer begins if the last is of the user.

    A template that refuses system messages, such as Gemma 2's, gets the system prompt before the
    first user's text.
    """
    template_messages = [{"role": role, "content": content} for role, content in messages]
    add_generation_prompt = messages[-1][0] == "user"
    try:
        return codec.chat(template_messages, add_generation_prompt).sealed
    except InvalidArgument:
        if len(messages) < 2 or messages[0][0] != "system":
            raise
    (_, system), (role, text), *others = messages
    return _render(codec, (role, f"{system}\n\n{text}"), *others)
