"""Finding in the tokens of an answer where it is certain that a strict tool is called."""

import codecs
import re
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvkeep.chat.call_beginnings import begin_bare_json
from kvkeep.chat.call_form import Begin
from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.reading import AnswerReading, NotACall, tool_name
from kvkeep.chat.scanner import Scanner
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.grammar import Grammar
from kvkeep.server.strict_grammar import StrictGrammar

_HEADER_START, _HEADER_END = "<|start|>", "<|message|>"
_RECIPIENT = re.compile(rb"\bto=([^\s<]+)")
_MAX_HEADER = 1000  # bytes
_MAX_MARKER = 64  # tokens


class CallWatch(Protocol):
    """A search for calls of strict tools in the tokens of an answer."""

    @property
    def is_certain(self) -> bool:
        """Whether the grammar that was returned last holds to the call's end."""

    def begun(self, token: int) -> Grammar | None:
        """Follow a token. Return the grammar that holds behind it, if such a call has begun.

        It has followed the token, too.
        """


class ChannelWatch:
    """Finds messages to strict tools by their headers; their content is the arguments."""

    is_certain = True

    def __init__(self, codec: TextCodec, grammar: StrictGrammar, at_start: bool):
        """at_start: whether the first token is one of a header."""
        self._codec, self._arguments = codec, grammar.arguments
        self._names = [tool.name for tool in grammar.tools]
        self._header: bytes | None = b"" if at_start else None

    def begun(self, token: int) -> Grammar | None:
        """Follow a token; see `CallWatch`."""
        text = self._codec.control_text(token)
        if text == _HEADER_START:
            self._header = b""
        elif self._header is not None:
            if text == _HEADER_END:
                header, self._header = self._header, None
                return self._grammar_behind(header)
            self._header += self._codec.token_bytes(token)
            if len(self._header) > _MAX_HEADER:
                self._header = None
        return None

    def _grammar_behind(self, header: bytes) -> Grammar | None:
        recipients = _RECIPIENT.findall(header)
        if not recipients:
            return None
        name = tool_name(recipients[-1].decode(errors="replace"), self._names)
        grammar = self._arguments.get(name or "")
        return grammar and grammar.copy()


class MarkerWatch:
    """Finds calls behind the markers that begin them, and bare ones at the start of an answer.

    Inside of reasoning markers that are no control tokens are text about them.
    """

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
        self._codec, self._format, self._grammar = codec, output_format, grammar
        self._begins = {
            form.opener: form.begin for form in output_format.calls if form.begin is not None
        }
        self._ids = grammar.marker_ids
        self._recent = deque[bytes](maxlen=_MAX_MARKER)  # bytes of the last tokens
        self._in_reasoning = in_reasoning
        self._call: _PossibleCall | None = None
        if at_start and grammar.bare_calls is not None:
            self._call = self._possible(grammar.bare_calls, begin_bare_json)

    @property
    def is_certain(self) -> bool:
        return self._call is None

    def begun(self, token: int) -> Grammar | None:
        """Follow a token; see `CallWatch`."""
        self._recent.append(self._codec.token_bytes(token))
        self._follow_reasoning(token)
        if self._call is not None:
            self._call.push([token], self._call.decoded(token))
        if self._call is None or self._call.has_failed:
            self._call = self._behind_opener(token)
        call = self._call
        if call is None or (call.tool is None and not call.has_strict_name):
            return None
        if call.tool is not None:
            self._call = None
            self._recent.clear()
        return call.grammar if call.tool is None or call.tool.strict else None

    def _follow_reasoning(self, token: int) -> None:
        ends = self._in_reasoning
        for block in self._format.reasoning:
            if self._rest(block.end if ends else block.start, token) is not None:
                self._in_reasoning = not ends
                return

    def _behind_opener(self, token: int) -> "_PossibleCall | None":
        """Return what may be a call, if the token completes an opener."""
        if self._grammar.calls is None:
            return None
        for opener, begin in self._begins.items():
            rest = self._rest(opener, token)
            if rest is None or (self._in_reasoning and not self._is_control(opener)):
                continue
            call = self._possible(self._grammar.calls, begin)
            known = self._ids.get(opener)
            # Some tokenizers write a space before a text: encoded with the marker, it is before it.
            ids = self._codec.encode(opener + rest if known is None else rest)
            call.push_marker(ids if known is None else [known, *ids], rest)
            if not call.has_failed:
                return call
        return None

    def _is_control(self, marker: str) -> bool:
        return marker in self._format.control_markers

    def _rest(self, marker: str, token: int) -> str | None:
        """Return the text behind a marker that the last token completes; None if it does not."""
        if self._is_control(marker):
            return "" if self._ids.get(marker) == token else None
        text, encoded = b"".join(self._recent), marker.encode()
        start = len(text) - len(self._recent[-1]) - len(encoded) + 1
        place = text.find(encoded, max(start, 0))
        if place < 0:
            return None
        try:
            return text[place + len(encoded) :].decode()
        except UnicodeDecodeError:
            return None

    def _possible(self, grammar: Grammar, begin: Begin) -> "_PossibleCall":
        return _PossibleCall(self._codec, self._format, self._grammar.tools, grammar, begin)


class _PossibleCall:
    """Text that may be a call: followed by the grammar, and read up to where that is certain.

    tool: the one that is called, as soon as that is certain. has_strict_name: whether the text ends
    with a strict tool's name, which may be the beginning of another name. has_failed: whether it is
    no call, one that the grammar does not have, or one that has ended.
    """

    def __init__(
        self,
        codec: TextCodec,
        output_format: OutputFormat,
        tools: Sequence[Tool],
        grammar: Grammar,
        begin: Begin,
    ):
        self.grammar, self._codec = grammar.copy(), codec
        self.tool: Tool | None = None
        self.has_failed = self.has_strict_name = self._has_marker = False
        self._strict_names = frozenset(tool.name for tool in tools if tool.strict)
        controls = output_format.control_markers
        self._scanner = Scanner(output_format.markers, controls, codec.control_text)
        self._reading = _NamedReading(self._scanner, tools, str)
        self._steps = begin(self._reading)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decoded(self, token: int) -> str | int:
        """Return the next token's text, or the id of a control token."""
        if self._codec.is_control(token):
            return token
        return self._decoder.decode(self._codec.token_bytes(token))

    def push_marker(self, tokens: Sequence[int], text: str) -> None:
        """Append the marker and the text behind it: `tokens` are those of both."""
        self._has_marker = True
        self.push(tokens, text)

    def push(self, tokens: Sequence[int], text: str | int) -> None:
        """Append tokens and their text."""
        self._scanner.append([text])
        self.has_strict_name = False
        if not self.grammar.follow(tokens) or self.grammar.is_whole:
            self.has_failed = True
            return
        try:
            next(self._steps)
        except NotACall:
            self.has_failed = True
        except StopIteration:
            self.tool = self._reading.tool
        else:
            if self._has_marker:  # a name is certain behind it
                self.tool = self._reading.tool
                self.has_strict_name = self._scanner.rest in self._strict_names


class _NamedReading(AnswerReading):
    """A reading that remembers the last tool that was named."""

    tool: Tool | None = None

    def require_tool(self, name: str) -> Tool:
        self.tool = super().require_tool(name)
        return self.tool
