"""All formats of answers, and which one a model writes."""

from collections.abc import Collection
from dataclasses import replace

from kvkeep.chat.formats.command import COMMAND_R, COMMAND_R7B
from kvkeep.chat.formats.deepseek import DEEPSEEK
from kvkeep.chat.formats.functionary import FUNCTIONARY
from kvkeep.chat.formats.gemma import FUNCTION_GEMMA, GEMMA3, GEMMA4
from kvkeep.chat.formats.harmony import HARMONY
from kvkeep.chat.formats.hermes import HERMES, PLAIN
from kvkeep.chat.formats.json_blocks import APERTUS, APRIEL, GRANITE, NEMOTRON2, PHI4_MINI
from kvkeep.chat.formats.llama3 import LLAMA3
from kvkeep.chat.formats.mistral import MISTRAL
from kvkeep.chat.formats.python_blocks import LFM2, OLMO3
from kvkeep.chat.formats.tagged import ERNIE, GLM, MINIMAX, QWEN3_CODER, SEED_OSS
from kvkeep.chat.output_format import OutputFormat
from kvkeep.errors import InvalidArgument

# In the order of detection: forms that models with various templates write come last.
_DETECTED = (
    *(HARMONY, GEMMA4, FUNCTION_GEMMA, MISTRAL, COMMAND_R7B, COMMAND_R, DEEPSEEK, SEED_OSS),
    *(MINIMAX, APERTUS, FUNCTIONARY, APRIEL, QWEN3_CODER, GLM, OLMO3, LFM2, NEMOTRON2),
    *(PHI4_MINI, GRANITE, ERNIE, LLAMA3, GEMMA3),
)
FORMATS = {form.name: form for form in (PLAIN, HERMES, *_DETECTED)}


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
    for form in _DETECTED:
        if any(all(text in template_source for text in sign) for sign in form.signs):
            return format_by_name(form.name, texts)
    for form in _DETECTED:
        if any(texts.issuperset(sign) for sign in form.control_signs):
            return format_by_name(form.name, texts)
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
