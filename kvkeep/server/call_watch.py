"""Finding in the tokens of an answer where it is certain that a strict tool is called."""

import codecs
import re
from collections.abc import Mapping

from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.reading import tool_name
from kvkeep.chat.scanner import has_control_codes
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.grammar import Grammar
from kvkeep.server.strict_grammar import StrictGrammar

_MAX_NAME = 300  # characters, with modules before it
# Of names that may have space before them.
_PADDED_KINDS = ("function", "bare function", "seed", "invoke", "glm")
_NO_GRAMMARS: Mapping[str, Grammar] = {}
# Behind a name in text: there is a call where arguments begin, and else the text may end.
_BARE_KIND, _BARE_ARGUMENTS = "bare function", re.compile(r"[ \t\r]*>\s*[{<]")


class CallWatch:
    """Reads the tokens of an answer as its reader does, up to where calls of strict tools begin."""

    def __init__(
        self,
        codec: TextCodec,
        output_format: OutputFormat,
        grammar: StrictGrammar,
        at_start: bool,
        in_reasoning: bool,
    ):
        """at_start: whether the answer begins with the first token. in_reasoning: whether that
        token is one of reasoning.
        """
        self._codec, self._grammar = codec, grammar
        self._names = [tool.name for tool in grammar.tools]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._name, self._name_grammars = "", _NO_GRAMMARS  # of a call that may have begun
        self._kind = ""  # of `name_begins`
        self._bare_names = list[tuple[int, Grammar]]()  # by their end, for `_BARE_KIND`
        self._begun: Grammar | None = None
        self._reader = OutputReader(
            *(output_format, grammar.tools),
            starts_in_reasoning=in_reasoning,
            control_text=codec.control_text,
            observer=self,
        )
        if not (at_start or in_reasoning):
            self._reader.push(["-"])  # text has begun

    def begun(self, token: int) -> Grammar | None:
        """Follow a token. Return the grammar that holds behind it, if such a call has begun.

        It has followed the token, too.
        """
        self._begun = None
        is_control = self._codec.is_control(token)
        text = "" if is_control else self._decoder.decode(self._codec.token_bytes(token))
        if is_control:
            self._name_grammars = _NO_GRAMMARS
        if self._name_grammars:
            self._append_to_name(text)
        self._reader.push([token if is_control else text])
        return self._begun

    def name_begins(self, kind: str, text: str) -> None:
        """See `CallObserver`."""
        self._name_grammars, self._name = self._grammar.behind_names.get(kind, _NO_GRAMMARS), ""
        self._kind, self._bare_names = kind, []
        self._append_to_name(text)

    def arguments_begin(self, tool: Tool, text: str) -> None:
        """See `CallObserver`."""
        if tool.name in self._grammar.arguments:
            self._begin(self._grammar.arguments[tool.name], text)

    def _append_to_name(self, text: str) -> None:
        """Append text to what may be a name: behind each strict name in it a call may go on."""
        first = len(self._name) + 1
        self._name += text
        for length in range(first, min(len(self._name), _MAX_NAME) + 1):
            written = self._name[:length]
            tool = tool_name(
                written.lstrip() if self._kind in _PADDED_KINDS else written, self._names
            )
            if tool is None or tool not in self._name_grammars:
                continue
            if self._kind == _BARE_KIND:
                self._bare_names.append((length, self._name_grammars[tool]))
            else:
                self._begin(self._name_grammars[tool], self._name[length:])
        for length, grammar in self._bare_names:
            if _BARE_ARGUMENTS.match(self._name, length):
                self._begin(grammar, self._name[length:])
        if len(self._name) > _MAX_NAME:
            self._name_grammars = _NO_GRAMMARS

    def _begin(self, grammar: Grammar, text: str) -> None:
        """Have a grammar hold behind a text, if that goes on by it and is not whole."""
        if self._decoder.getstate()[0] or has_control_codes(text):
            return
        grammar = grammar.copy()
        if grammar.follow_text(text) and not grammar.is_whole:
            self._begun = grammar
