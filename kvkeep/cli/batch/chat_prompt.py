"""The prompt of a chat in a batch, and how its answer is constrained and read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Model
    from kvkeep.chat.messages import Chat
    from kvkeep.chat.output_reader import OutputReader
    from kvkeep.chat.renderer import RenderedPrompt
    from kvkeep.server.answer_grammar import AnswerGrammar
    from kvkeep.session.sampling import Constraint
    from kvkeep.session.stop_gate import ReasoningMarkers

_ANSWER_FIELDS = ("response_format", "tools", "tool_choice")  # the grammar depends on them
_ANY_MESSAGES = [{"role": "user", "content": "-"}]


@dataclass(frozen=True)
class ChatPrompt:
    """A chat with its prompt. grammar: of the answer; None for any text.

    reasoning_budget: the most tokens of reasoning; None for any number. warnings: the fields and
    parts of the messages that the model cannot get, in words.
    """

    model: "Model"
    chat: "Chat"
    prompt: "RenderedPrompt"
    grammar: "AnswerGrammar | None" = None
    reasoning_budget: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def reasoning_markers(self) -> "ReasoningMarkers | None":
        """The markers of the answer's reasoning; None if the prompt ends behind its beginning."""
        from kvkeep.session.stop_gate import ReasoningMarkers

        return ReasoningMarkers.behind_prompt(self.model.renderer.output_format, self.prompt)

    def new_constraint(self) -> "Constraint | None":
        """Return the constraint of one generation, if any."""
        from kvkeep.server.reasoning_budget import reasoning_constraint

        model, prompt, budget = self.model, self.prompt, self.reasoning_budget
        if self.grammar is not None:
            return self.grammar.constraint(model, prompt, budget)
        output_format, in_reasoning = model.renderer.output_format, prompt.starts_in_reasoning
        return reasoning_constraint(
            *(model.text, output_format, in_reasoning, budget, None, model.end_token_ids),
            tools=self.chat.callable_tools,
        )

    def new_reader(self) -> "OutputReader":
        """Return a reader for one generation's answer."""
        from kvkeep.chat.output_reader import OutputReader

        renderer = self.model.renderer
        return OutputReader(
            renderer.output_format,
            self.chat.callable_tools,
            renderer.new_call_id,
            self.prompt.starts_in_reasoning,
            forced=self.chat.choice.mode == "required",
            control_text=self.model.text.control_text,
            schema_calls=self.grammar.schema_calls if self.grammar else None,
            constrained=self.grammar is not None and self.grammar.grammar is not None,
        )


def render_chat(model: "Model", body: Mapping[str, Any]) -> ChatPrompt:
    """Render the messages of a body in OpenAI's form, and compile the answer's grammar, if any.

    Raises InvalidArgument for messages, tools or a schema that are not valid or not supported.
    """
    from kvkeep.chat.formats.registry import format_warnings
    from kvkeep.chat.openai_chat import parse_chat
    from kvkeep.chat.openai_tools import hosted_tools
    from kvkeep.chat.renderer import RenderOptions

    chat = parse_chat(body)
    effort, variables = body.get("reasoning_effort"), body.get("chat_template_kwargs") or {}
    options = RenderOptions(reasoning_effort=effort, template_kwargs=variables)
    reasons = effort != "none" and variables.get("enable_thinking") is not False
    prompt = model.renderer.render(chat, options)
    hosted = [f"tools.{kind} is ignored" for kind in hosted_tools(body.get("tools"))]
    grammar = None
    answer_format = body.get("response_format") or {}
    has_schema = answer_format.get("type", "text") != "text"
    is_strict = any(tool.strict for tool in chat.callable_tools)
    if chat.choice.mode == "required" or has_schema or is_strict:
        fields = {name: body[name] for name in _ANSWER_FIELDS if name in body}
        grammar = _compile_answer(model, json.dumps(fields, sort_keys=True))
    grammar_warnings = grammar.warnings if grammar else ()
    renderer = model.renderer
    format_notes = (
        format_warnings(renderer.output_format, renderer.traits.tools)
        if chat.callable_tools
        else ()
    )
    warnings = (*hosted, *prompt.warnings, *format_notes, *grammar_warnings)
    return ChatPrompt(model, chat, prompt, grammar, None if reasons else 0, warnings)


@lru_cache(maxsize=64)  # most requests of a batch have the same schema and tools
def _compile_answer(model: "Model", fields_json: str) -> "AnswerGrammar":
    """Compile the grammar of the answers to requests with these fields."""
    from kvkeep.chat.openai_chat import parse_chat

    try:
        from pydantic import ValidationError

        from kvkeep.server.answer_grammar import compile_answer
        from kvkeep.server.openai.chat_request import ResponseFormat
    except ImportError as error:
        raise InvalidArgument(
            f"response_format, strict tools and a required call need {error.name}: "
            "pip install 'kvkeep[server]'"
        ) from None
    fields = json.loads(fields_json)
    try:
        answer_format = ResponseFormat.model_validate(fields.get("response_format") or {})
    except ValidationError as error:
        raise InvalidArgument(f"response_format: {error.errors()[0]['msg']}") from None
    chat = parse_chat({**fields, "messages": _ANY_MESSAGES})
    return compile_answer(model, chat, answer_format.output_schema())
