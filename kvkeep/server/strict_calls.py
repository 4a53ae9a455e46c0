"""Arguments by the schema in calls of strict tools that a model makes of its own accord."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, isneginf

from kvkeep.chat.channels import CHANNEL
from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import OutputFormat
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.grammar import Grammar
from kvkeep.server.lark_rules import LarkRules
from kvkeep.session.sampling import Constraint

_MAX_OPENER = 64  # tokens


def call_openers(output_format: OutputFormat) -> tuple[str, ...]:
    """Return the texts that begin calls; in channels, the recipient may come first."""
    if output_format.channels:
        return (CHANNEL, " to=functions.")
    return tuple(dict.fromkeys(form.opener for form in output_format.calls))


class RulesBehindText(LarkRules):
    """Rules of calls in which any text may stand before the first opener that is a text itself.

    A token may have the end of that text and the beginning of the opener.
    """

    def __init__(
        self, marker_ids: Mapping[str, int], end_ids: Sequence[int], openers: Collection[str]
    ):
        super().__init__(marker_ids, end_ids)
        self._openers = frozenset(openers)

    def marker(self, text: str) -> str:
        is_text_opener = text in self._openers and not self.is_token(text)
        return self.text_up_to(text) if is_text_opener else super().marker(text)


@dataclass(frozen=True)
class StrictGrammar:
    """The grammar of calls of some tools, of which some are strict.

    behind_opener: of calls from the marker on that begins them. at_start: of calls without one, at
    the start of the answer; None if the model's format has none.
    """

    tools: Sequence[Tool]
    behind_opener: Grammar
    at_start: Grammar | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The parts of the schemas that are not followed, in words."""
        return self.behind_opener.warnings


class StrictCalls:
    """A constraint of calls of strict tools, on top of `within`, if given; other text is free.

    It follows each text behind an opener with the grammar of calls. As soon as it has the name of a
    strict tool, the grammar holds, up to the end of the call. Text that the grammar cannot write is
    no call, or one in another form, and stays free.
    """

    def __init__(
        self,
        codec: TextCodec,
        output_format: OutputFormat,
        grammar: StrictGrammar,
        within: Constraint | None,
    ):
        self._codec, self._within = codec, within
        self._grammar = grammar.behind_opener
        openers = call_openers(output_format)
        controls = [opener for opener in openers if opener in output_format.control_markers]
        self._control_ids = {codec.encode(text, special=True)[0] for text in controls}
        self._text_openers = [text.encode() for text in openers if text not in controls]
        self._names = [tool.name.encode() for tool in grammar.tools if tool.strict]
        self._recent = deque[tuple[int, bytes]](maxlen=_MAX_OPENER)  # tokens and their bytes
        self._call = grammar.at_start and grammar.at_start.copy()  # follows what may be a call
        self._text = b""  # of that call
        self._holds = False  # whether the grammar does

    @property
    def complete(self) -> bool:
        return bool(getattr(self._within, "complete", False))

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokens that may come next."""
        masked = logits if self._within is None else self._within.masked(logits)
        if self._call is None or not self._holds:
            return masked
        result = self._call.masked(masked)
        if isneginf(result).all():  # the other constraint ends the call, as a budget may
            self._call = None
            return masked
        return result

    def accept(self, token: int) -> None:
        """Follow a sampled token."""
        if self._within is not None:
            self._within.accept(token)
        text = self._codec.token_bytes(token)
        self._recent.append((token, text))
        if self._call is not None:
            self._follow([token], text)
        if self._call is None:
            self._find_opener()

    def _find_opener(self) -> None:
        """Begin to follow a call if the last token completes an opener."""
        token, last_text = self._recent[-1]
        if token in self._control_ids:
            self._begin([token], b"")
            return
        text = b"".join(text for _, text in self._recent)
        for opener in self._text_openers:
            place = text.find(opener, max(len(text) - len(last_text) - len(opener) + 1, 0))
            if place >= 0:
                self._begin(self._tokens_from(len(text) - place), text[place + len(opener) :])

    def _tokens_from(self, length: int) -> list[int]:
        """Return the last tokens that have some of the last bytes."""
        tokens = list[int]()
        for token, text in reversed(self._recent):
            if length <= 0:
                break
            tokens.insert(0, token)
            length -= len(text)
        return tokens

    def _begin(self, tokens: Sequence[int], text: bytes) -> None:
        """Begin to follow a call. text: that behind the opener in these tokens."""
        self._call, self._text, self._holds = self._grammar.copy(), b"", False
        self._follow(tokens, text)

    def _follow(self, tokens: Sequence[int], text: bytes) -> None:
        assert self._call is not None
        self._text += text
        if not self._call.follow(tokens) or self._call.is_whole:
            self._call = None
        elif not self._holds:
            self._holds = any(name in self._text for name in self._names)
