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
_MAX_OPENER = 64  # tokens


class CallWatch(Protocol):
    """What follows the tokens of an answer up to a call of a strict tool."""

    def begun(self, token: int) -> Grammar | None:
        """Follow a token. Return the grammar that holds behind it, if such a call has begun."""


class ChannelWatch:
    """Finds messages to strict tools by their headers; their content is the arguments."""

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
    """Finds calls behind the markers that begin them, and bare ones at the start of an answer."""

    def __init__(
        self,
        codec: TextCodec,
        output_format: OutputFormat,
        grammar: StrictGrammar,
        at_start: bool,
    ):
        """at_start: whether the answer begins with the first token."""
        self._codec, self._format, self._grammar = codec, output_format, grammar
        self._begins = {
            form.opener: form.begin for form in output_format.calls if form.begin is not None
        }
        self._ids = {
            token.content: token_id
            for token_id, token in codec.tokenizer.get_added_tokens_decoder().items()
            if token.content in self._begins
        }
        self._recent = deque[bytes](maxlen=_MAX_OPENER)  # bytes of the last tokens
        self._call: _PossibleCall | None = None
        if at_start and grammar.bare_calls is not None:
            self._call = self._possible(grammar.bare_calls, begin_bare_json)

    def begun(self, token: int) -> Grammar | None:
        """Follow a token; see `CallWatch`."""
        self._recent.append(self._codec.token_bytes(token))
        if self._call is not None:
            self._call.push([token])
        if self._call is None or self._call.has_failed:
            self._call = self._behind_opener(token)
        call = self._call
        if call is None or call.tool is None:
            return None
        self._call = None
        self._recent.clear()
        return call.grammar if call.tool.strict else None

    def _behind_opener(self, token: int) -> "_PossibleCall | None":
        """Return what may be a call, if the token completes an opener."""
        if self._grammar.calls is None:
            return None
        text = b"".join(self._recent)
        for opener, begin in self._begins.items():
            rest = self._rest(opener, token, text)
            if rest is None:
                continue
            known = self._ids.get(opener)
            call = self._possible(self._grammar.calls, begin)
            call.push_marker(self._codec.encode(opener) if known is None else [known])
            if rest:
                call.push(self._codec.encode(rest))
            if not call.has_failed:
                return call
        return None

    def _rest(self, opener: str, token: int, text: bytes) -> str | None:
        """Return the text behind an opener that the last token completes; None if it does not."""
        if opener in self._format.control_markers:
            return "" if self._ids.get(opener) == token else None
        marker = opener.encode()
        start = len(text) - len(self._recent[-1]) - len(marker) + 1
        place = text.find(marker, max(start, 0))
        if place < 0:
            return None
        try:
            return text[place + len(marker) :].decode()
        except UnicodeDecodeError:
            return None

    def _possible(self, grammar: Grammar, begin: Begin) -> "_PossibleCall":
        return _PossibleCall(self._codec, self._format, self._grammar.tools, grammar, begin)


class _PossibleCall:
    """Text that may be a call: followed by the grammar, and read up to where that is certain.

    tool: the one that is called, as soon as that is certain. has_failed: whether it is no call, or
    one that the grammar does not have.
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
        self.has_failed = self._has_marker = False
        controls = output_format.control_markers
        self._scanner = Scanner(output_format.markers, controls, codec.control_text)
        self._reading = _NamedReading(self._scanner, tools, str)
        self._steps = begin(self._reading)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push_marker(self, tokens: Sequence[int]) -> None:
        """Append the marker's tokens, which are not read: a name behind it is certain."""
        self._has_marker = True
        self.has_failed = not self.grammar.follow(tokens)

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        codec = self._codec
        for token in tokens:
            is_control = codec.is_control(token)
            text = token if is_control else self._decoder.decode(codec.token_bytes(token))
            self._scanner.append([text])
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
            self.tool = self._reading.tool if self._has_marker else None


class _NamedReading(AnswerReading):
    """A reading that remembers the last tool that was named."""

    tool: Tool | None = None

    def require_tool(self, name: str) -> Tool:
        self.tool = super().require_tool(name)
        return self.tool
