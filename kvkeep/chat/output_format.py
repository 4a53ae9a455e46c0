"""The formats in which models write answers: their reasoning, their calls, and their detection."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvkeep.chat import bare_calls as bare
from kvkeep.chat import call_syntax as forms
from kvkeep.chat.bare_calls import BareForm
from kvkeep.chat.call_syntax import CallForm, CallText
from kvkeep.chat.channels import CHANNEL_MARKERS
from kvkeep.errors import InvalidArgument


@dataclass(frozen=True)
class BlockMarkers:
    """The markers around a part of the answer, and a label behind the first one.

    has_lines: whether white space at both ends, inside the markers, is no text. That of reasoning
    never is.
    """

    start: str
    end: str
    label: str = ""
    has_lines: bool = False


_THINK = BlockMarkers("<think>", "</think>")


@dataclass(frozen=True)
class OutputFormat:
    """A format of answers.

    reasoning: the markers around it; the first ones are those that the model writes.
    wrappers: markers around the text, which are left out.
    bare_json: whether a JSON object that is the whole answer may be a call.
    bare_calls: forms of calls without a marker, which begin an answer.
    channels: whether the answer is messages in channels.
    control_markers: the markers that are control tokens, so that their text is no marker.
    call_text: the form of calls in the history, if chat templates of these models know none.
    is_assumed: whether neither template nor vocabulary shows a form of calls.
    """

    name: str
    reasoning: tuple[BlockMarkers, ...] = (_THINK,)
    calls: tuple[CallForm, ...] = (forms.TAGGED,)
    wrappers: tuple[BlockMarkers, ...] = ()
    bare_json: bool = False
    bare_calls: tuple[BareForm, ...] = ()
    channels: bool = False
    control_markers: frozenset[str] = frozenset()
    call_text: CallText | None = None
    is_assumed: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, each once."""
        if self.channels:
            return CHANNEL_MARKERS
        result = list(self.silent_markers)
        for form in self.calls:
            result += [form.opener, *form.markers]
        return tuple(dict.fromkeys(result))

    @property
    def silent_markers(self) -> tuple[str, ...]:
        """Markers that are never part of the text, if they are control tokens."""
        if self.channels:
            return ()
        pairs = (*self.reasoning, *self.wrappers)
        return tuple(text for pair in pairs for text in (pair.start, pair.end))


_COMMAND_WRAPPERS = (
    BlockMarkers("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    BlockMarkers("<|START_TEXT|>", "<|END_TEXT|>"),
)
_GRANITE_REASONING = BlockMarkers("Here is my thought process:", "Here is my response:")
_FORMATS = (
    OutputFormat("plain", calls=()),
    OutputFormat(
        "hermes",
        bare_calls=(
            *(bare.JSON_CALLS, bare.FENCED_CALLS, bare.CALLS_IN_TOOLS),
            *(bare.PYTHON_LIST, bare.NAMED_CALL),
        ),
    ),
    OutputFormat("qwen3-coder", calls=(forms.TAGGED, forms.FUNCTION_TAG)),
    OutputFormat("glm"),
    OutputFormat(
        "llama3",
        calls=(forms.PYTHON_TAG, forms.TAGGED, forms.FUNCTION_TAG_LINE),
        bare_json=True,
        bare_calls=(bare.JSON_LINES, bare.PYTHON_LIST),
    ),
    OutputFormat(
        "mistral",
        reasoning=(BlockMarkers("[THINK]", "[/THINK]"), _THINK),
        calls=(forms.MISTRAL, forms.TAGGED),
    ),
    OutputFormat(
        "harmony",
        reasoning=(BlockMarkers("<|channel|>analysis<|message|>", "<|end|>"),),
        calls=(),
        channels=True,
    ),
    OutputFormat("gemma3", calls=(forms.TOOL_CODE, forms.FENCED_JSON, forms.TAGGED)),
    OutputFormat(
        "gemma4",
        reasoning=(BlockMarkers("<|channel>", "<channel|>", "thought"), _THINK),
        calls=(forms.GEMMA, forms.TAGGED),
    ),
    OutputFormat("function-gemma", calls=(forms.FUNCTION_GEMMA, forms.TAGGED)),
    OutputFormat("deepseek", calls=(forms.DEEPSEEK, forms.DEEPSEEK_CALL, forms.TAGGED)),
    OutputFormat(
        "command-r7b",
        reasoning=(BlockMarkers("<|START_THINKING|>", "<|END_THINKING|>"), _THINK),
        calls=(forms.COMMAND, forms.TAGGED),
        wrappers=_COMMAND_WRAPPERS,
    ),
    OutputFormat("command-r", calls=(forms.ACTION, forms.TAGGED), wrappers=_COMMAND_WRAPPERS),
    OutputFormat(
        "granite",
        reasoning=(_THINK, _GRANITE_REASONING),
        calls=(forms.GRANITE, forms.TAGGED),
        wrappers=(BlockMarkers("<response>", "</response>"),),
        call_text=forms.GRANITE_TEXT,
    ),
    OutputFormat("phi4-mini", calls=(forms.GRANITE, forms.TAGGED), call_text=forms.PHI4_MINI_TEXT),
    OutputFormat(
        "functionary",
        calls=(CallForm(">>>", (), bare.read_recipient), forms.TAGGED),
        wrappers=(BlockMarkers("all\n", "<|eot_id|>"),),
        bare_calls=(bare.NAMED_CALL,),
    ),
    OutputFormat(
        "apriel",
        reasoning=(BlockMarkers("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), _THINK),
        calls=(forms.APRIEL, forms.TAGGED),
        wrappers=(BlockMarkers("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]", has_lines=True),),
    ),
    OutputFormat("ernie", wrappers=(BlockMarkers("<response>", "</response>", has_lines=True),)),
    OutputFormat(
        "seed-oss",
        reasoning=(BlockMarkers("<seed:think>", "</seed:think>"), _THINK),
        calls=(forms.SEED, forms.TAGGED),
    ),
    OutputFormat("minimax", calls=(forms.MINIMAX, forms.TAGGED)),
    OutputFormat(
        "apertus",
        reasoning=(BlockMarkers("<|inner_prefix|>", "<|inner_suffix|>"), _THINK),
        calls=(forms.APERTUS, forms.TAGGED),
    ),
    OutputFormat("olmo3", calls=(forms.OLMO, forms.TAGGED), call_text=forms.OLMO_TEXT),
    OutputFormat("lfm2", calls=(forms.LFM2, forms.TAGGED), call_text=forms.LFM2_TEXT),
    OutputFormat("nemotron2", calls=(forms.NEMOTRON2, forms.TAGGED)),
)
FORMATS = {output_format.name: output_format for output_format in _FORMATS}

# The first of these whose texts are all in a template, or all control tokens, is the format.
# Forms that models with various templates write come last.
_BY_TEMPLATE = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("gemma4", ("<|channel>",)),
    ("function-gemma", ("<start_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("mistral", ("[THINK]",)),
    ("command-r7b", ("<|START_ACTION|>",)),
    ("command-r7b", ("<|START_THINKING|>",)),
    ("command-r", ("<|CHATBOT_TOKEN|>", "Action:")),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("seed-oss", ("<seed:tool_call>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("functionary", (">>>all",)),
    ("apriel", ("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
    ("qwen3-coder", ("<function=", "<parameter=")),
    ("glm", ("<arg_key>",)),
    ("olmo3", ("<function_calls>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("nemotron2", ("<TOOLCALL>",)),
    ("phi4-mini", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<|start_of_role|>",)),
    ("ernie", ("<response>", "<tool_call>")),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("gemma3", ("<start_of_turn>",)),
    ("phi4-mini", ("<|tool_call|>",)),  # a control token that its template does not show
)
_BY_CONTROL_TOKENS = (
    *("harmony", "gemma4", "function-gemma", "mistral", "command-r7b", "deepseek", "lfm2"),
    "phi4-mini",
)


def format_by_name(name: str, control_texts: Collection[str] = ()) -> OutputFormat:
    """Return a format. control_texts: the texts of the vocabulary's control tokens.

    Raises InvalidArgument for an unknown name.
    """
    if name not in FORMATS:
        raise InvalidArgument(f"output format {name!r} is unknown; known: {', '.join(FORMATS)}")
    markers = FORMATS[name].markers
    return replace(FORMATS[name], control_markers=frozenset(markers) & frozenset(control_texts))


def detect_format(template_source: str, control_texts: Collection[str]) -> OutputFormat:
    """Return the format of the answers of a model.

    template_source: of its chat template, "" without one. control_texts: the texts of its special
    tokens. Models whose template has no tool support get instructions for Hermes' form, which is
    read in all formats but channels.
    """
    texts = frozenset(control_texts)
    for name, signs in _BY_TEMPLATE:
        if all(sign in template_source for sign in signs):
            return format_by_name(name, texts)
    for name, signs in _BY_TEMPLATE:
        if name in _BY_CONTROL_TOKENS and texts.issuperset(signs):
            return format_by_name(name, texts)
    return replace(format_by_name("hermes", texts), is_assumed="<tool_call>" not in template_source)


def format_warnings(output_format: OutputFormat, takes_tools: bool) -> tuple[str, ...]:
    """Return warnings for a request with tools about the format of calls.

    takes_tools: whether the chat template takes tools; otherwise the prompt describes the format.
    """
    if not (output_format.is_assumed and takes_tools):
        return ()
    return (
        "tools: the chat template shows no form of calls; they are read as JSON, in <tool_call> "
        "tags or as the whole answer",
    )
