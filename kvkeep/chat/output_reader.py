"""Reading of generated tokens: reasoning, text and tool calls, as they come."""

from collections.abc import Callable, Collection, Generator, Sequence

from kvkeep.chat.call_form import BareForm, CallForm, bare_form_next, comes_next
from kvkeep.chat.channels import read_channels
from kvkeep.chat.json_calls import bare_call_beginning, read_json_calls
from kvkeep.chat.messages import Tool
from kvkeep.chat.output import Output, OutputBuilder, OutputEvent
from kvkeep.chat.output_format import BlockMarkers, OutputFormat
from kvkeep.chat.reading import AnswerReading, CallObserver, NotACall, Steps, TextLine, merged
from kvkeep.chat.scanner import SPACE, Scanner

_BRACKETS = ("{", "[")
_JSON_BEGINNINGS = (*'{["-0123456789', "true", "false", "null")


class OutputReader:
    """An incremental reader of an answer: `push` pieces of it, then `finish`.

    The joined events equal `output`, and do not depend on the division into pieces. What cannot be
    read as a call of one of the tools is text.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Sequence[Tool] = (),
        new_call_id: Callable[[], str] = lambda: "",
        starts_in_reasoning: bool = False,
        forced: bool = False,
        control_text: Callable[[int], str] = lambda token: "",
        schema_calls: Collection[str] | None = None,
        constrained: bool = False,
        observer: CallObserver | None = None,
    ):
        """tools: those that may be called. new_call_id: returns an id for each call.

        starts_in_reasoning: whether the prompt ends inside the reasoning. forced: whether the
        answer was constrained to calls, which are then JSON. control_text: the text of a control
        token's id. schema_calls: None if the answer follows no JSON schema. With one, it is text
        once its JSON has begun; these are the names of tools whose calls may be bare JSON even so.
        constrained: whether a grammar holds behind the reasoning, which then ends by its marker.
        observer: notified where calls become certain.
        """
        self._scanner = Scanner(
            output_format.markers,
            output_format.control_markers,
            control_text,
            output_format.silent_markers,
        )
        self._reading = AnswerReading(self._scanner, tools, new_call_id)
        self._reading.observer = observer
        self._format, self._forced, self._schema_calls = output_format, forced, schema_calls
        self._steps: Generator[OutputEvent | None, None, None] | None
        self._steps = self._read(starts_in_reasoning)
        self._builder = OutputBuilder()
        self._reads_calls_in_reasoning = bool(tools) and not constrained
        is_free = not constrained and schema_calls is None
        # Beside a schema and where a call is forced, the grammar has those that are not JSON.
        self._follows_gbnf = constrained and schema_calls is None and not forced
        bare_forms = output_format.bare_calls if tools and not self._follows_gbnf else ()
        self._bare_forms = [form for form in bare_forms if is_free or not form.is_json]
        self._bare_forms_in_text = [form for form in self._bare_forms if form.in_text]
        self._open_wrappers: list[BlockMarkers] = []
        self.left_reasoning = False  # by its end, or by a call
        self.on_finish: Callable[[], None] | None = None  # called when the answer has ended

    def push(self, pieces: Sequence[str | int]) -> list[OutputEvent]:
        """Append pieces: texts, and ids of control tokens. Returns what is now certain."""
        self._scanner.append(pieces)
        return self._advance()

    def finish(self) -> list[OutputEvent]:
        """Return the events of what was held back, at the end of the answer."""
        self._scanner.closed = True
        events = self._advance()
        if self.on_finish is not None:
            self.on_finish()
        return events

    @property
    def unread(self) -> str:
        """The text that is not read yet; control tokens that are markers are surrogates."""
        return self._scanner.rest

    @property
    def names_tool(self) -> bool:
        """Whether what is not read yet has a tool's name where a call may begin."""
        return self._reading.names_tool

    @property
    def output(self) -> Output:
        """The answer so far."""
        return self._builder.output

    def _advance(self) -> list[OutputEvent]:
        events = []
        while self._steps is not None:
            try:
                event = next(self._steps)
            except StopIteration:
                self._steps = None
                break
            if event is None:
                break
            events.append(event)
        result = merged(events)
        self._builder.push(result)
        return result

    # Reading

    def _read(self, in_reasoning: bool) -> Steps[None]:
        in_reasoning = in_reasoning and bool(self._format.reasoning)
        if self._format.channels:
            has_schema = self._schema_calls is not None
            yield from read_channels(self._reading, in_reasoning, self._forced, has_schema)
        else:
            at_start = not in_reasoning or (
                yield from self._read_reasoning(self._format.reasoning[0])
            )
            yield from self._read_blocks(at_start)
        yield from self._reading.finish_text()

    def _read_blocks(self, at_start: bool) -> Steps[None]:
        """Read blocks that begin with an opener, and text between them.

        at_start: no text since the start of the answer, a call or reasoning.
        """
        reading, scanner = self._reading, self._scanner
        while True:
            if at_start and (yield from self._begins_schema_answer()):
                yield from reading.rest_as_text()
                return
            if at_start and (self._may_be_bare_json or self._bare_forms):
                yield from reading.text(scanner.advance(_space_length(scanner.rest)))
                is_json = self._may_be_bare_json and scanner.rest[:1] in _BRACKETS
                forms = () if is_json and self._forced else self._bare_forms
                if form := (yield from bare_form_next(reading, forms)):
                    at_start = yield from self._read_bare_calls(form)
                    continue
                if is_json:
                    at_start = yield from self._read_bare_json()
                    continue
            markers = self._markers(at_start)
            found = scanner.find(markers)
            length = found[0] if found else scanner.certain_length(markers)
            if length:
                scanner.mark()
                text = scanner.advance(length)
                at_start = at_start and not text.strip(SPACE)
                yield from reading.text(text)
            elif found and found[1] in _BRACKETS:
                at_start = yield from self._read_bracket()
            elif found:
                scanner.mark()
                scanner.advance(found[2])
                at_start = yield from self._read_block(found[1], at_start)
            elif not (yield from reading.more()):
                return

    def _begins_schema_answer(self) -> Steps[bool]:
        """Read white space. Returns whether the JSON of a schema is next, and no call or block."""
        reading, names = self._reading, self._schema_calls
        if names is None or reading.call_count:
            return False
        self._scanner.mark()
        next_char = yield from reading.skip_space()
        yield from reading.written_text()
        calls = [bare_call_beginning(name) for name in names]
        markers = (*self._markers(at_start=True), *calls)
        if not next_char or (yield from reading.comes_next(*markers)):
            return False
        return bool((yield from reading.comes_next(*_JSON_BEGINNINGS)))

    def _markers(self, at_start: bool) -> list[str]:
        """Return the markers that are none of text here.

        In the midst of text, a reasoning marker that is no control token is text about it.
        """
        control_markers = self._format.control_markers
        blocks = (*self._format.reasoning, *self._format.wrappers)
        markers = [block.start for block in blocks if at_start or block.start in control_markers]
        markers += [block.end for block in self._open_wrappers]
        if self._bare_forms_in_text:
            markers += _BRACKETS
        return markers + [form.opener for form in self._format.calls if self._reading.tools]

    def _read_block(self, marker: str, at_start: bool) -> Steps[bool]:
        """Read what begins with a marker. Returns whether it was no text."""
        for block in self._format.reasoning:
            if block.start == marker:
                return (yield from self._read_reasoning(block))
        for block in self._format.wrappers:
            if marker == block.start:
                self._open_wrappers.append(block)
                if block.has_lines:
                    yield from self._reading.skip_space()
                    if at_start:
                        self._reading.end_part()
                return at_start
        for block in self._open_wrappers:
            if marker == block.end:
                self._open_wrappers.remove(block)
                if block.has_lines:
                    self._reading.end_part()
                return at_start
        form = next(form for form in self._format.calls if form.opener == marker)
        calls_before, line = self._reading.call_count, self._reading.line
        try:
            if form.begins_line and not (line.is_blank and not line.in_code):
                raise NotACall
            yield from form.read(self._reading)
        except NotACall:
            yield from self._reading.written_text()
        return self._reading.call_count > calls_before

    @property
    def _may_be_bare_json(self) -> bool:
        is_allowed = self._format.bare_json and not self._follows_gbnf
        return bool(self._reading.tools) and (self._forced or is_allowed)

    def _read_bracket(self) -> Steps[bool]:
        """Read a bracket in the midst of text, or what begins a line with it as calls do.

        Returns whether there were any calls. In a block of code there are none.
        """
        reading = self._reading
        if reading.line.is_blank and not reading.line.in_code:
            form = yield from bare_form_next(reading, self._bare_forms_in_text)
            if form is not None:
                return (yield from self._read_bare_calls(form))
        reading.scanner.mark()
        yield from reading.text(reading.scanner.advance(1))
        return False

    def _read_bare_calls(self, form: BareForm) -> Steps[bool]:
        """Read calls in a form that comes next. Returns whether there were any."""
        reading = self._reading
        calls_before = reading.call_count
        reading.scanner.mark()
        try:
            yield from form.read(reading)
        except NotACall:
            yield from reading.written_text()
        return reading.call_count > calls_before

    def _read_bare_json(self) -> Steps[bool]:
        """Read calls without markers. Returns whether there were any."""
        reading = self._reading
        calls_before = reading.call_count
        self._scanner.mark()
        yield from read_json_calls(reading, needs_arguments=True, forced=self._forced)
        yield from reading.written_text()
        return reading.call_count > calls_before

    def _read_reasoning(self, block: BlockMarkers) -> Steps[bool]:
        """Read reasoning, calls in it, and its end. Returns False if text ended it."""
        reading, scanner = self._reading, self._scanner
        forms = {form.opener: form for form in self._format.calls if self._may_end_reasoning(form)}
        ends = (block.end, *forms)
        reading.begin_reasoning()
        if block.label and (yield from reading.skip_space()):
            while (yield from reading.take(block.start)):  # written twice
                yield from reading.skip_space()
            yield from reading.take(block.label)
        line = TextLine()
        while True:
            found = scanner.find(ends)
            length = found[0] if found else scanner.certain_length(ends)
            if length:
                scanner.mark()
                yield from reading.reasoning_text(line.add(scanner.advance(length)))
            elif found:
                if found[1] == block.end:
                    scanner.advance(found[2])
                    wrappers = self._format.wrappers
                    self._open_wrappers += [pair for pair in wrappers if pair.start == block.end]
                    self.left_reasoning = True
                    return True
                if (yield from self._ends_reasoning(forms[found[1]], line)):
                    goes_on, is_text = yield from self._read_block_in_reasoning(found[1], found[2])
                    if not goes_on:
                        self._open_wrappers.append(block)
                        return not is_text
                    line = TextLine()
                    continue
                scanner.mark()
                yield from reading.reasoning_text(line.add(scanner.advance(found[2])))
            elif not (yield from reading.more()):
                return True

    def _may_end_reasoning(self, form: CallForm) -> bool:
        """Whether a form has a control token as its opener, or a tag."""
        is_control = form.opener in self._format.control_markers
        return is_control or (form.begin is not None and self._reads_calls_in_reasoning)

    def _ends_reasoning(self, form: CallForm, line: TextLine) -> Steps[bool]:
        """Return whether the opener that comes next begins a call and is no part of reasoning.

        A tag does if it begins a line outside code, and a call of a known tool follows.
        """
        if form.opener in self._format.control_markers:
            return True
        if form.begin is None or not line.is_blank or line.in_code:
            return False
        begin = form.begin

        def begin_block(reading: AnswerReading) -> Steps[None]:
            yield from reading.expect(form.opener)
            yield from begin(reading)

        return (yield from comes_next(self._reading, begin_block))

    def _read_block_in_reasoning(self, opener: str, length: int) -> Steps[tuple[bool, bool]]:
        """Read calls behind their opener.

        Returns whether reasoning goes on up to its end, which it does not if another block follows,
        and whether there were no calls, but text.
        """
        reading, scanner = self._reading, self._scanner
        self.left_reasoning = True
        if not reading.tools:
            return False, False
        scanner.mark()
        scanner.advance(length)
        if not (yield from self._read_block(opener, at_start=False)):
            return False, True
        scanner.mark()
        yield from reading.skip_space()
        starts = [block.start for block in (*self._format.reasoning, *self._format.wrappers)]
        if (yield from reading.comes_next(*starts)):
            return False, False
        reading.begin_reasoning()
        return True, False


def _space_length(text: str) -> int:
    return len(text) - len(text.lstrip(SPACE))
