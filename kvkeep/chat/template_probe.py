"""Probes of a model's chat template: small conversations that show what it can render."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from kvkeep.chat.inserted_texts import call_mark
from kvkeep.chat.messages import Tool
from kvkeep.chat.template_traits import (
    TemplateTraits,
    metadata_call,
    reasoning_part_list,
    text_part_list,
)
from kvkeep.chat.tool_schemas import tool_function, tools_text
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.control_tokens import ChatText

# Letters only, so that no template trims, splits or escapes them.
_SYSTEM, _LATER_SYSTEM, _FOLLOWING, _TOOL = "kvkeepsys", "kvkeeplater", "kvkeepnext", "kvkeeptool"
_TEXT = "kvkeeptext"
_KEY, _VALUE, _OTHER_VALUE, _RESULT, _OTHER_RESULT, _REASONING = (
    *("kvkeepkey", "kvkeepvalue", "kvkeepother", "kvkeepresult", "kvkeeplast", "kvkeepthought"),
)
_LONG_ID, _SHORT_ID = "call_kvkeep0000000000000000", "kvkeep000"
_RESULT_ROLES = ("tool", "tool_response", "observation", "environment")
_CALL_PARTS = (_KEY, _VALUE, _LONG_ID, _SHORT_ID, _TOOL)
_Messages = Sequence[Mapping[str, Any]]
_USER: Mapping[str, Any] = {"role": "user", "content": "a"}
_ANSWER: Mapping[str, Any] = {"role": "assistant", "content": "b"}


def probe_template(codec: TextCodec) -> TemplateTraits:
    """Return the traits of a model's template. Raises UnsupportedModel if there is none."""
    probe = _Probe(codec)
    try:
        codec.chat([_USER])
    except InvalidArgument:
        probe.no_tools = []
    if not probe.renders([{**_USER, "content": _FOLLOWING}], _FOLLOWING):
        probe.text_parts = probe.renders([{**_USER, "content": _FOLLOWING}], _FOLLOWING, parts=True)
    probe.full_schemas = not probe.renders([_USER], _TOOL, tools=True)
    probe.full_schemas = probe.full_schemas and probe.renders([_USER], _TOOL, tools=True)
    probe.system_tools = probe.takes_system_tools()
    calls = probe.calls()
    call_first = calls.pop("call_first", True)
    system: Mapping[str, Any]
    system, later = ({"role": "system", "content": text} for text in (_SYSTEM, _LATER_SYSTEM))
    return TemplateTraits(
        # Some templates write it only before a user's message that is the last one.
        system=probe.renders([system, _USER], _SYSTEM)
        and probe.renders([system, _USER, _ANSWER, _USER, _ANSWER], _SYSTEM),
        system_midway=probe.renders([system, _USER, _ANSWER, later, _USER], _SYSTEM, _LATER_SYSTEM),
        system_alone=probe.renders([system], _SYSTEM),
        assistant_first=probe.renders([{**_ANSWER, "content": _FOLLOWING}, _USER], _FOLLOWING)
        and call_first,
        empty_answer=probe.renders(
            [_USER, {**_ANSWER, "content": ""}, {**_USER, "content": _FOLLOWING}], _FOLLOWING
        ),
        tools=bool(probe.system_tools) or probe.renders([_USER], _TOOL, tools=True),
        result_roles=tuple(filter(probe.writes_results_of, _RESULT_ROLES)),
        reasoning=probe.reasoning(),
        text_parts=probe.text_parts,
        empty_tools=probe.no_tools is not None,
        system_tools=probe.system_tools,
        full_schemas=probe.full_schemas,
        **calls,
    )


# Forms of arguments and ids, the best first. Templates that write arguments as JSON take a mapping.
_CALL_FORMS: Sequence[tuple[Literal["mapping", "text"], bool]] = (
    *(("mapping", False), ("mapping", True), ("text", False), ("text", True)),
)


class _Probe:
    """Renders probes with a template."""

    def __init__(self, codec: TextCodec):
        self._codec = codec
        self.text_parts = False
        self.no_tools: list[dict[str, Any]] | None = None
        self.full_schemas, self.system_tools = False, ""

    def renders(
        self, messages: _Messages, *marks: str, tools: bool = False, parts: bool | None = None
    ) -> bool:
        """Whether the template takes the messages and writes all the marks, in this order."""
        rendered = self._render(messages, tools, self.text_parts if parts is None else parts)
        position = 0
        for mark in marks:
            position = rendered.find(mark, position)
            if position < 0:
                return False
            position += len(mark)
        return bool(rendered)

    def writes_results_of(self, role: str) -> bool:
        """Whether the template writes results, as messages of a role, without their calls."""
        result = {**_result(_RESULT, {"id": _LONG_ID}), "role": role}
        messages = [_USER, _ANSWER, result, {**_USER, "content": _FOLLOWING}]
        return self.renders(messages, _RESULT, _FOLLOWING)

    def reasoning(self) -> Literal["field", "part", "dropped"]:
        """Return where the template takes the reasoning of the last message."""
        if self.renders([_USER, {**_ANSWER, "reasoning_content": _REASONING}], _REASONING):
            return "field"
        parts = [_USER, {**_ANSWER, "content": reasoning_part_list(_REASONING, _TEXT)}]
        before, _, after = self._render(parts, False, self.text_parts).partition(_REASONING)
        is_written = _TEXT in after and not before.endswith(("'", '"'))  # not as a list
        return "part" if is_written else "dropped"

    def takes_system_tools(self) -> str:
        """Return the field of the system message in which alone tools are written; "" for none."""
        if self.renders([_USER], _TOOL, tools=True):
            return ""
        text, system = tools_text([_PROBE_TOOL]), {"role": "system", "content": _SYSTEM}
        fields = ("tools", "functions")
        written = (f for f in fields if self.renders([{**system, f: text}, _USER], _SYSTEM, text))
        return next(written, "")

    def calls(self) -> dict[str, Any]:
        """Return the traits about calls, {} if the template takes none.

        It may take them only if all contents are lists of parts.
        """
        before = self.text_parts
        for self.text_parts in dict.fromkeys((before, True)):
            if traits := next(filter(None, map(self.call_traits, _CALL_FORMS)), {}):
                return traits
        self.text_parts = before
        return self._metadata_call_traits()

    def _metadata_call_traits(self) -> dict[str, Any]:
        """Return the traits about calls if they are messages with metadata, else {}."""
        call = metadata_call(_TOOL, _call_arguments(_VALUE))
        result, following = _observation(_RESULT), {"role": "user", "content": _FOLLOWING}
        exchange = [_USER, call, result]
        if not self.renders([_USER], _TOOL, tools=True):
            return {}  # the model calls tools that are described to it in another form
        if not self.renders(exchange, _TOOL, _VALUE, _RESULT):
            return {}
        return {
            "calls": True,
            "metadata_calls": True,
            "calls_without_tools": True,
            "lone_results": self.renders([_USER, result], _RESULT),
            "call_first": self.renders([*exchange[1:], _USER], _VALUE, _RESULT),
            "text_with_calls": "before",
            "user_after_result": self.renders([*exchange, following], _RESULT, _FOLLOWING),
        }

    def call_traits(self, form: tuple[Literal["mapping", "text"], bool]) -> dict[str, Any]:
        """Return the traits about calls if the template takes them in this form, else {}."""
        arguments, short_ids = form
        first, last = (
            _call(value, arguments, _SHORT_ID[:-1] + str(number) if short_ids else _LONG_ID)
            for number, value in enumerate((_VALUE, _OTHER_VALUE))
        )
        result = _result(_RESULT, first)
        call_message: Mapping[str, Any] = {
            "role": "assistant",
            "content": "",
            "tool_calls": [first],
        }
        exchange = [_USER, call_message, result]
        if not self._writes_call(exchange, arguments):
            return {}
        both: Mapping[str, Any] = {**call_message, "tool_calls": [first, last]}
        parallel = [_USER, both, result, _result(_OTHER_RESULT, last)]
        following: Mapping[str, Any] = {"role": "user", "content": _FOLLOWING}
        lone_result = {key: value for key, value in result.items() if key != "name"}
        return {
            "calls": True,
            "arguments": arguments,
            "short_ids": short_ids,
            "calls_without_tools": self.renders(exchange, _TOOL, _VALUE, _RESULT),
            "parallel_calls": self.renders(
                parallel, _VALUE, _OTHER_VALUE, _RESULT, _OTHER_RESULT, tools=True
            ),
            "lone_results": self.renders([_USER, lone_result], _RESULT, tools=True),
            "call_first": self.renders([*exchange[1:], _USER], _VALUE, _RESULT, tools=True),
            "user_after_result": self.renders(
                [*exchange, following], _RESULT, _FOLLOWING, tools=True
            ),
            **self._text_with_calls(call_message, result),
            **self._results_in_call(call_message, result),
        }

    def _results_in_call(
        self, call_message: Mapping[str, Any], result: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the traits of a template that has a place for results in their call, else {}."""
        responses = [{"name": _TOOL, "response": _RESULT}]
        exchange = [_USER, {**call_message, "tool_responses": responses}]
        if not self.renders(exchange, _VALUE, _RESULT, tools=True):
            return {}
        if self._sealed(exchange) == self._sealed([_USER, call_message, result]):
            return {}  # it has messages of results, too
        opening = self._call_opening(call_message, result)
        place = {"text_with_calls": "inserted", "call_opening": opening} if opening else {}
        return {"results_in_call": True, "lone_results": False, **place}

    def _text_with_calls(
        self, call_message: Mapping[str, Any], result: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return the traits about texts beside calls."""
        spoken = {**call_message, "content": _TEXT, "reasoning_content": _REASONING}
        forms = (("inside", spoken), ("plan", {**spoken, "tool_plan": _TEXT}))
        for name, message in forms:
            if self.renders([_USER, message, result], _TEXT, _VALUE, _RESULT, tools=True):
                return {"text_with_calls": name}
        if opening := self._call_opening(call_message, result):
            return {"text_with_calls": "inserted", "call_opening": opening}
        text = {**_ANSWER, "content": _TEXT}
        call = {**call_message, "reasoning_content": _REASONING}
        before = [_USER, text, call, result, _ANSWER]
        is_before = self.renders(before, _TEXT, _VALUE, _RESULT, tools=True)
        return {"text_with_calls": "before" if is_before else "dropped"}

    def _call_opening(self, call_message: Mapping[str, Any], result: Mapping[str, Any]) -> str:
        """Return what is written before a call's name, behind its turn's opening, sealed.

        "" if that depends on the call, or no text can be inserted before it.
        """
        to_text = self._sealed([_USER, {**_ANSWER, "content": _TEXT}]).partition(_TEXT)[0]
        (call,) = call_message["tool_calls"]
        named = {**call, "function": {**call["function"], "name": call_mark(0) + _TOOL}}
        marked = self._sealed([_USER, {**call_message, "tool_calls": [named]}, result])
        start = self._common_length(to_text, marked)
        opening, mark, _ = marked[start:].partition(call_mark(0))
        if not mark or to_text[start:].strip() or any(part in opening for part in _CALL_PARTS):
            return ""
        return opening

    def _common_length(self, first: str, second: str) -> int:
        """Return the length of a common beginning of sealed texts, without a token's part."""
        pairs = zip(first, second, strict=False)
        length = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        places = self._codec.control_places(second, 0, len(second))
        return next((begin for begin, end, _ in places if begin < length < end), length)

    def _writes_call(self, exchange: _Messages, arguments: str) -> bool:
        """Whether the template writes the call, its arguments unescaped, and the result."""
        if not self.renders(exchange, _TOOL, _VALUE, _RESULT, tools=True):
            return False
        rendered = self._render(exchange, True, self.text_parts)
        # A mapping that is not written as JSON has Python's quotes, and a text may be escaped.
        bad_quote = f"'{_KEY}'" if arguments == "mapping" else f'\\"{_KEY}'
        return bad_quote not in rendered

    def _sealed(self, messages: _Messages) -> str:
        rendered = self._render(messages, True, self.text_parts)
        return rendered.sealed if isinstance(rendered, ChatText) else rendered

    def _render(self, messages: _Messages, tools: bool, parts: bool) -> str:
        if parts:
            messages = [
                {**m, "content": text_part_list(content)}
                if isinstance(content := m["content"], str)
                else m
                for m in messages
            ]
        tool = tool_function(_PROBE_TOOL, self.full_schemas)
        tool_list = [tool] if tools else self.no_tools
        try:
            return self._codec.chat(messages, add_generation_prompt=False, tools=tool_list)
        except InvalidArgument:
            return ""


_PROBE_TOOL = Tool(_TOOL, "probe", {"type": "object", "properties": {_KEY: {"type": "string"}}})


def _call(value: str, arguments: str, call_id: str) -> dict[str, Any]:
    values = {_KEY: value} if arguments == "mapping" else _call_arguments(value)
    function = {"name": _TOOL, "arguments": values}
    return {"id": call_id, "type": "function", "function": function}


def _call_arguments(value: str) -> str:
    return f'{{"{_KEY}": "{value}"}}'


def _observation(text: str) -> dict[str, Any]:
    return {"role": "observation", "content": text}


def _result(text: str, call: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call["id"], "name": _TOOL}
