"""Answers written in each form, with the parts that were written."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvkeep.chat.formats.registry import FORMATS, format_by_name
from kvkeep.chat.messages import Tool
from kvkeep.chat.output_format import OutputFormat

_MARK = "\x00"  # around the markers that a form writes, so not around the same text in a value
_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "place": {"$ref": "#/$defs/Place"},
        "label": {"type": ["string", "null"]},
        "anything": {},
    },
    "$defs": {"Place": {"type": "object"}},
}
TOOLS = [Tool(name, parameters=_SCHEMA) for name in ("weather", "run_shell", "no-op")]
_FRAGMENTS = (
    "</tool_call>", "<tool_call>", '{"name": "weather", "arguments": {}}', "</parameter>",
    "</arg_value>", "<parameter=text>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}",
    '"', "'", "\\", "\\n", "\n", "\\u00e9", "é", "😀", "```", "<think>", "</think>", "<|end|>",
    "<|tool_call>", "<|channel|>", "null", "1", ", ", ": ", "=", "(", ")", "<", ">", "</", "\t",
)  # fmt: skip
_words = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
_texts = st.lists(st.sampled_from(_FRAGMENTS) | _words, max_size=5).map("".join)
_numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
_names = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _texts,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(_names, values, max_size=3),
    max_leaves=6,
)
_objects = st.dictionaries(_names, _values, max_size=3)
_ARGUMENTS = {
    "text": _texts,
    "count": st.integers(-(10**20), 10**20),
    "share": _numbers | st.none(),
    "flag": st.booleans(),
    "items": st.lists(_values, max_size=3),
    "place": _objects,
    "label": _texts | st.none(),
    "anything": _values,
}
_calls = st.tuples(st.sampled_from(TOOLS), st.fixed_dictionaries({}, optional=_ARGUMENTS))


def marked(text: str) -> str:
    return f"{_MARK}{text}{_MARK}"


@dataclass(frozen=True)
class Form:
    """A form of answers.

    write_calls: writes calls that follow one another. reasoning: the text around it. can_write:
    whether an argument's value is unambiguous in the form.
    """

    output_format: str
    write_calls: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
    reasoning: tuple[str, str] = (marked("<think>"), marked("</think>"))
    can_write: Callable[[str, Any], bool] = lambda key, value: True
    text_first: bool = True  # whether text may stand before calls


def _each(write: Callable[[str, Mapping[str, Any]], str], between: str = "\n") -> Any:
    return lambda calls: between.join(write(name, values) for name, values in calls)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(name: str, values: Mapping[str, Any]) -> str:
    call = _json({"name": name, "arguments": values})
    return f"{marked('<tool_call>')}\n{call}\n{marked('</tool_call>')}"


def _tagged_value(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3_coder(name: str, values: Mapping[str, Any]) -> str:
    lines = [
        f"<parameter={key}>\n{_tagged_value(value)}\n</parameter>" for key, value in values.items()
    ]
    body = "".join(f"{line}\n" for line in lines)
    return (
        f"{marked('<tool_call>')}\n<function={name}>\n{body}</function>\n{marked('</tool_call>')}"
    )


def _seed(name: str, values: Mapping[str, Any]) -> str:
    body = "".join(
        f"<parameter={key}>{_tagged_value(value)}</parameter>\n" for key, value in values.items()
    )
    start, end = marked("<seed:tool_call>"), marked("</seed:tool_call>")
    return f"{start}\n<function={name}>\n{body}</function>\n{end}"


def _invoke(name: str, values: Mapping[str, Any]) -> str:
    body = "".join(
        f'<parameter name="{key}">{_tagged_value(value)}</parameter>\n'
        for key, value in values.items()
    )
    start, end = marked("<minimax:tool_call>"), marked("</minimax:tool_call>")
    return f'{start}\n<invoke name="{name}">\n{body}</invoke>\n{end}'


def _apertus(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    entries = [{name: values} for name, values in calls]
    return f"{marked('<|tools_prefix|>')}{_json(entries)}{marked('<|tools_suffix|>')}"


def _glm(name: str, values: Mapping[str, Any]) -> str:
    pairs = "".join(
        f"{marked('<arg_key>')}{key}{marked('</arg_key>')}\n"
        f"{marked('<arg_value>')}{_tagged_value(value)}{marked('</arg_value>')}\n"
        for key, value in values.items()
    )
    return f"{marked('<tool_call>')}{name}\n{pairs}{marked('</tool_call>')}"


_AMBIGUOUS = re.compile(
    r"</(parameter|arg_value)>\s*"
    r"(<parameter[= ]|</function>|</invoke>|</(\w+:)?tool_call>|<arg_key>|$)"
)


def _can_tag(key: str, value: Any) -> bool:
    """Whether the text of a value tells it: a text is not JSON, and has no end of a value."""
    if _AMBIGUOUS.search(_tagged_value(value)):
        return False
    if not isinstance(value, str) or key == "text":
        return True
    try:
        json.loads(value.replace("True", "true").replace("False", "false").replace("None", "null"))
    except ValueError:
        return not re.match(r'\s*["\[{]', value)  # faults of these are mended
    return False


def _llama(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return "; ".join(_json({"name": name, "parameters": values}) for name, values in calls)


def _python_tag(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return marked("<|python_tag|>") + _llama(calls)


def _mistral_list(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    entries = [{"name": name, "arguments": values, "id": "a1b2c3d4e"} for name, values in calls]
    return marked("[TOOL_CALLS]") + _json(entries)


def _mistral(name: str, values: Mapping[str, Any]) -> str:
    return f"{marked('[TOOL_CALLS]')}{name}{marked('[ARGS]')}{_json(values)}"


def _mistral_with_id(name: str, values: Mapping[str, Any]) -> str:
    call_id = f"{marked('[CALL_ID]')}a1b2c3d4e"
    return f"{marked('[TOOL_CALLS]')}{name}{call_id}{marked('[ARGS]')}{_json(values)}"


def _gemma(quote: str, opener: str, end: str) -> Callable[[str, Mapping[str, Any]], str]:
    def write_value(value: Any) -> str:
        if isinstance(value, str):
            return marked(quote) + value + marked(quote)
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write_value(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write_value, value)) + "]"
        return _json(value)

    return lambda name, values: (
        f"{marked(opener)}call:{name}{write_value(dict(values))}{marked(end)}"
    )


def _without(text: str) -> Callable[[str, Any], bool]:
    return lambda key, value: text not in _json(value).replace('\\"', '"')


def _deepseek(calls: Sequence[tuple[str, Mapping[str, Any]]], fenced: bool = False) -> str:
    text = marked("<｜tool▁calls▁begin｜>")
    for name, values in calls:
        body = f"{name}{marked('<｜tool▁sep｜>')}{_json(values)}"
        if fenced:
            body = f"function{marked('<｜tool▁sep｜>')}{name}\n```json\n{_json(values)}\n```"
        text += f"{marked('<｜tool▁call▁begin｜>')}{body}{marked('<｜tool▁call▁end｜>')}"
    return text + marked("<｜tool▁calls▁end｜>")


def _command(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    entries = [
        {"tool_call_id": str(index), "tool_name": name, "parameters": values}
        for index, (name, values) in enumerate(calls)
    ]
    return f"{marked('<|START_ACTION|>')}{json.dumps(entries, indent=4)}{marked('<|END_ACTION|>')}"


def _action(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    entries = [{"tool_name": name, "parameters": values} for name, values in calls]
    return f"{marked('Action:')}\n```json\n{json.dumps(entries, indent=4)}\n```"


def _granite(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    entries = [{"name": name, "arguments": values} for name, values in calls]
    return marked("<|tool_call|>") + _json(entries)


def _python(name: str, values: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def _olmo(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    lines = "\n".join(_python(*call) for call in calls)
    return f"{marked('<function_calls>')}\n{lines}\n{marked('</function_calls>')}"


def _lfm2(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    listed = ", ".join(_python(*call) for call in calls)
    return f"{marked('<|tool_call_start|>')}[{listed}]{marked('<|tool_call_end|>')}"


def _listed(start: str, end: str) -> Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]:
    def write(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        entries = [{"name": name, "arguments": values} for name, values in calls]
        return marked(start) + _json(entries) + marked(end)

    return write


def _tool_code(name: str, values: Mapping[str, Any]) -> str:
    return f"{marked('```tool_code')}\nprint({_python(name, values)})\n```"


def _fenced(name: str, values: Mapping[str, Any]) -> str:
    return f"{marked('```json')}\n{_json({'name': name, 'parameters': values})}\n```"


def _harmony(name: str, values: Mapping[str, Any]) -> str:
    return (
        f"{marked('<|channel|>')}commentary to=functions.{name} {marked('<|constrain|>')}json"
        f"{marked('<|message|>')}{_json(values)}{marked('<|call|>')}"
    )


def _harmony_recipient_first(name: str, values: Mapping[str, Any]) -> str:
    return (
        f" to=functions.{name}{marked('<|channel|>')}commentary json"
        f"{marked('<|message|>')}{_json(values)}{marked('<|call|>')}"
    )


def _functionary(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return marked(">>>").join(f"{name}\n{_json(values)}" for name, values in calls)


_BETWEEN_MESSAGES = f"{marked('<|start|>')}assistant"
_ANALYSIS = f"{marked('<|channel|>')}analysis{marked('<|message|>')}"
_FINAL = f"{marked('<|channel|>')}final{marked('<|message|>')}"
_THOUGHT = f"{marked('<|channel>')}thought\n"

FORMS = {
    "hermes": Form("hermes", _each(_hermes)),
    "qwen3-coder": Form("qwen3-coder", _each(_qwen3_coder), can_write=_can_tag),
    "glm": Form("glm", _each(_glm), can_write=_can_tag),
    "seed-oss": Form(
        "seed-oss",
        _each(_seed),
        (marked("<seed:think>"), marked("</seed:think>")),
        _can_tag,
    ),
    "minimax": Form("minimax", _each(_invoke), can_write=_can_tag),
    "apertus": Form(
        "apertus", _apertus, (marked("<|inner_prefix|>"), marked("<|inner_suffix|>"))
    ),
    "apriel": Form(
        "apriel",
        _listed("<tool_calls>", "</tool_calls>"),
        (marked("Here are my reasoning steps:"), marked("[BEGIN FINAL RESPONSE]")),
    ),
    "ernie": Form("ernie", _each(_hermes)),
    "llama3": Form("llama3", _llama, text_first=False),
    "llama3 python tag": Form("llama3", _python_tag),
    "mistral list": Form("mistral", _mistral_list, (marked("[THINK]"), marked("[/THINK]"))),
    "mistral": Form("mistral", _each(_mistral, ""), (marked("[THINK]"), marked("[/THINK]"))),
    "mistral id": Form("mistral", _each(_mistral_with_id, "")),
    "gemma3 tool_code": Form("gemma3", _each(_tool_code)),
    "gemma3 json": Form("gemma3", _each(_fenced)),
    "gemma4": Form(
        "gemma4",
        _each(_gemma('<|"|>', "<|tool_call>", "<tool_call|>"), ""),
        (_THOUGHT, marked("<channel|>")),
        _without('<|"|>'),
    ),
    "function-gemma": Form(
        "function-gemma",
        _each(_gemma("<escape>", "<start_function_call>", "<end_function_call>"), ""),
        can_write=_without("<escape>"),
    ),
    "deepseek": Form("deepseek", _deepseek),
    "deepseek fenced": Form("deepseek", lambda calls: _deepseek(calls, fenced=True)),
    "command-r7b": Form(
        "command-r7b", _command, (marked("<|START_THINKING|>"), marked("<|END_THINKING|>"))
    ),
    "command-r": Form("command-r", _action),
    "granite": Form("granite", _granite),
    "phi4-mini": Form("phi4-mini", _listed("<|tool_call|>", "<|/tool_call|>")),
    "olmo3": Form("olmo3", _olmo),
    "lfm2": Form("lfm2", _lfm2),
    "lfm2 json": Form("lfm2", _listed("<|tool_call_start|>", "<|tool_call_end|>")),
    "nemotron2": Form("nemotron2", _listed("<TOOLCALL>", "</TOOLCALL>")),
    "harmony": Form(
        "harmony", _each(_harmony, _BETWEEN_MESSAGES), (_ANALYSIS, marked("<|end|>"))
    ),
    "harmony recipient": Form(
        "harmony",
        _each(_harmony_recipient_first, _BETWEEN_MESSAGES),
        (_ANALYSIS, marked("<|end|>")),
    ),
    "functionary": Form("functionary", _functionary, text_first=False),
}  # fmt: skip


@dataclass(frozen=True)
class WrittenAnswer:
    text: str  # with marks around markers
    parts: tuple[tuple[str, Any], ...]  # kind, and text or (name, arguments)

    def pieces(self, output_format: OutputFormat) -> list[str | int]:
        """Return characters, and ids of the markers that are control tokens."""
        result: list[str | int] = []
        for index, text in enumerate(self.text.split(_MARK)):
            if index % 2 and text in output_format.control_markers:
                result.append(output_format.markers.index(text))
            else:
                result += text
        return result


def format_of(form: Form, control_tokens: bool) -> OutputFormat:
    """Return a form's format, whose markers are control tokens or not."""
    markers = FORMATS[form.output_format].markers
    tokens = [marker for marker in markers if re.fullmatch(r"<.*>|\[.*\]", marker)]
    return format_by_name(form.output_format, tokens if control_tokens else ())


def _plain_texts(form: Form) -> st.SearchStrategy[str]:
    """Texts without markers, and not blank."""
    markers = FORMATS[form.output_format].markers

    def is_plain(text: str) -> bool:
        has_marker = any(marker in text for marker in markers)
        may_be_call = FORMATS[form.output_format].bare_json and '{"name"' in text
        return bool(text) and not has_marker and not may_be_call

    texts = st.lists(st.sampled_from(_FRAGMENTS) | _words, min_size=1, max_size=4)
    return texts.map("".join).map(str.strip).filter(is_plain)


@st.composite
def written_answers(draw: st.DrawFn, form: Form) -> WrittenAnswer:
    """Answers in a form: perhaps reasoning, then texts and calls."""
    texts, spaces = _plain_texts(form), st.sampled_from(["", "\n", "\n\n", " "])
    channels = FORMATS[form.output_format].channels
    written: list[str] = []
    parts: list[tuple[str, Any]] = []
    if draw(st.booleans()):
        text = draw(texts)
        start, end = form.reasoning
        written.append(f"{start}{draw(spaces)}{text}{draw(spaces)}{end}")
        parts.append(("reasoning", text))
    kinds = draw(st.lists(st.booleans(), max_size=4))
    for is_call in kinds:
        last = parts[-1][0] if parts else ""
        if is_call and last != "call" and (form.text_first or last != "text"):
            calls = draw(st.lists(_calls, min_size=1, max_size=3))
            pairs = [
                (tool.name, {k: v for k, v in values.items() if form.can_write(k, v)})
                for tool, values in calls
            ]
            written.append(form.write_calls(pairs))
            parts += [("call", pair) for pair in pairs]
        elif not is_call and last != "text":
            text = draw(texts)
            parts.append(("text", text))
            if channels:
                text = (
                    f"{marked('<|channel|>')}final{marked('<|message|>')}{text}{marked('<|end|>')}"
                )
            written.append(text)
    between = _BETWEEN_MESSAGES if channels else draw(spaces)
    return WrittenAnswer(between.join(written), tuple(parts))
