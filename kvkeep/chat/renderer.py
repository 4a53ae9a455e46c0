"""Rendering of conversations as prompts, by the model's chat template and what it can render."""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvkeep.chat.formats.registry import detect_format, format_by_name
from kvkeep.chat.inserted_texts import insert_texts
from kvkeep.chat.message_rewriting import (
    TEXT_LEFT_OUT,
    TOOLS_REFUSED,
    TOOLS_UNKNOWN,
    USER_FIRST,
    rewrite_messages,
    with_call_form,
)
from kvkeep.chat.messages import (
    Chat,
    Message,
    TextPart,
    media_warnings,
)
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.prefill import open_reasoning, write_prefill
from kvkeep.chat.rendered_calls import RenderedCall
from kvkeep.chat.template_entries import ID_CHARACTERS, TemplateEntries
from kvkeep.chat.template_probe import probe_template
from kvkeep.chat.template_traits import TemplateTraits
from kvkeep.chat.tool_schemas import tool_function
from kvkeep.chat.write_back import PROBE_TOOL, AnswerWriter, WrittenHistory
from kvkeep.chat.written import FindWritten
from kvkeep.errors import InvalidArgument, UnsupportedModel
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.control_tokens import ChatText

# Marks in a rendering where the unfinished message ends. Letters only: no template trims it.
_CONTINUATION_MARK = "kvkeepgoeson"
_EFFORTS_WITHOUT_REASONING = ("none",)


@dataclass(frozen=True)
class RenderOptions:
    """Options of one rendering.

    continue_final: whether the prompt ends inside the last message, which the model continues; None
    for "if it is the assistant's". generation_prompt: whether another ends where the answer begins.
    reasoning_effort: such as "low", for templates that have it; "none" for no reasoning.
    enable_thinking: whether the model reasons, None for the template's default. template_kwargs:
    more variables for the template.
    """

    continue_final: bool | None = None
    generation_prompt: bool = True
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def variables(self) -> dict[str, Any]:
        """Return the template's variables."""
        result: dict[str, Any] = {}
        enable_thinking = self.enable_thinking
        if self.reasoning_effort is not None:
            if self.reasoning_effort in _EFFORTS_WITHOUT_REASONING:
                enable_thinking = False if enable_thinking is None else enable_thinking
            else:
                result["reasoning_effort"] = self.reasoning_effort
        if enable_thinking is not None:
            result |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
        return {**result, **self.template_kwargs}


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as a prompt.

    text: as the template writes it. ids: of it, except that answers of the history may be in the
    tokens that the model sampled. written_back, written_tokens: how many answers, and how many
    tokens they have. starts_in_reasoning: whether the prompt ends where reasoning has begun.
    continues: whether it ends inside the last message. warnings: what had to be changed for the
    template, in words.
    """

    text: ChatText
    ids: list[int]
    starts_in_reasoning: bool
    warnings: tuple[str, ...] = ()
    written_back: int = 0
    written_tokens: int = 0
    continues: bool = False


class ChatRenderer:
    """Renders conversations with a model's chat template.

    What the template cannot render is rewritten: see `rewrite_messages`. Only the template writes
    control tokens, never the text of a message.
    """

    def __init__(self, codec: TextCodec):
        self._codec = codec

    @cached_property
    def traits(self) -> TemplateTraits:
        """The abilities of the model's template. Raises UnsupportedModel if there is none."""
        return probe_template(self._codec)

    @property
    def _entries(self) -> TemplateEntries:
        return TemplateEntries(self._codec, self.traits, self.output_format.call_text)

    @cached_property
    def output_format(self) -> OutputFormat:
        """The format in which the model writes its answers."""
        try:
            source = self._codec.template_files.source(with_tools=True)
        except UnsupportedModel:
            source = ""
        return detect_format(source, self._codec.control_texts)

    def choose_output_format(self, name: str) -> None:
        """Read answers in a format by name. Raises InvalidArgument for an unknown one."""
        self.output_format = format_by_name(name, self._codec.control_texts)

    def render(
        self,
        chat: Chat,
        options: RenderOptions = RenderOptions(),
        find_written: FindWritten | None = None,
    ) -> RenderedPrompt:
        """Render a conversation, up to where the model's answer begins or continues.

        find_written: finds the sampled tokens of an answer; see `write_back`. Raises
        UnsupportedModel without a template, and InvalidArgument for a conversation that the
        template refuses, or whose last message it cannot continue.
        """
        text = self._render_text(chat, options)
        history = find_written and self._write_back(chat, options, text.text, find_written)
        if history:
            count, num_tokens = history.count, history.num_tokens
            return replace(text, ids=history.ids, written_back=count, written_tokens=num_tokens)
        return replace(text, ids=self._codec.encode(text.text))

    def _render_text(self, chat: Chat, options: RenderOptions) -> RenderedPrompt:
        """Render a conversation, without ids."""
        try:
            return self._render_with(self._entries, chat, options)
        except InvalidArgument:
            entries = replace(self._entries, traits=replace(self.traits, tools=False))
            has_tools = self.traits.tools and any(not tool.deferred for tool in chat.tools)
            with suppress(InvalidArgument):
                if has_tools and self._render_with(self._entries, replace(chat, tools=()), options):
                    prompt = self._render_with(entries, chat, options)
                    others = [text for text in prompt.warnings if text != TOOLS_UNKNOWN]
                    return replace(prompt, warnings=(TOOLS_REFUSED, *others))
            raise

    def _render_with(
        self, conversion: TemplateEntries, chat: Chat, options: RenderOptions
    ) -> RenderedPrompt:
        """Render a conversation whose messages are converted so, without ids."""
        listed = tuple(tool for tool in chat.tools if not tool.deferred)
        calls_in_text = conversion.text_form is not None
        traits = conversion.traits.with_calls_in_text() if calls_in_text else conversion.traits
        sent = chat.messages
        if chat.tools and not listed and not self.output_format.channels:  # with an own form
            sent = with_call_form(sent, chat.tools)
        messages, warnings = rewrite_messages(sent, listed, traits)
        entries = conversion.with_tools(conversion.of(messages), listed)
        functions = [tool_function(tool, traits.full_schemas) for tool in listed]
        no_tools: list[dict[str, Any]] | None = [] if traits.empty_tools else None
        is_variable = traits.tools and not traits.system_tools
        template_tools = functions if functions and is_variable else no_tools
        rendering = _Rendering(self._codec, template_tools, options.variables())
        last = messages[-1]
        continued = options.continue_final
        if continued is None:
            continued = last.role == "assistant" and not last.calls
        if continued:
            text, in_reasoning, changed = self._render_unfinished(rendering, entries, last)
            warnings += changed
        else:
            text = rendering.render(entries, options.generation_prompt)
            in_reasoning = open_reasoning(self.output_format, text) is not None
        if texts := conversion.inserted_texts(messages):
            opening = traits.call_opening
            text, has_all = insert_texts(self._codec, text, opening, texts)
            warnings += [] if has_all else [TEXT_LEFT_OUT]
        all_warnings = (*media_warnings(chat.messages), *warnings)
        return RenderedPrompt(text, [], in_reasoning, all_warnings, continues=continued)

    def _write_back(
        self, chat: Chat, options: RenderOptions, text: ChatText, find_written: FindWritten
    ) -> WrittenHistory | None:
        """Return the ids of a history with answers in sampled tokens; None if there are none."""
        history = [(n, find_written(message)) for n, message in enumerate(chat.messages[:-1])]
        answers = {number: found for number, found in history if found}
        if not answers or not self._turns_are_delimited:
            return None
        return self._answer_writer(chat, options).write_back(chat.messages, answers, text)

    def _answer_writer(self, chat: Chat, options: RenderOptions) -> AnswerWriter:
        def render(messages: Sequence[Message], prompt: bool | None = None) -> ChatText:
            end: dict[str, Any]
            end = {} if prompt is None else {"continue_final": False, "generation_prompt": prompt}
            new_chat = replace(chat, messages=tuple(messages))
            return self._render_text(new_chat, replace(options, **end)).text

        return AnswerWriter(self._codec, self.output_format, render)

    @cached_property
    def _turns_are_delimited(self) -> bool:
        """Whether control tokens set the turns of a conversation apart."""
        return self._answer_writer(Chat((), (PROBE_TOOL,)), RenderOptions()).turns_are_delimited()

    @cached_property
    def rendered_call(self) -> RenderedCall | None:
        """The form of calls in the template; None if that is not certain, or not JSON."""
        writer = self._answer_writer(Chat((), (PROBE_TOOL,)), RenderOptions())
        return writer.rendered_call() if self._turns_are_delimited else None

    def new_reader(self) -> OutputReader:
        """Return a reader for an answer without calls, from where the template's text ends on."""
        return OutputReader(
            self.output_format,
            starts_in_reasoning=self.starts_in_reasoning,
            control_text=self._codec.control_text,
        )

    @cached_property
    def starts_in_reasoning(self) -> bool:
        """Whether the template itself begins the reasoning of each answer."""
        return self.render(Chat((Message("user", (TextPart("-"),)),))).starts_in_reasoning

    def new_call_id(self) -> str:
        """Return an id for a call, in the form that the template takes."""
        if self.traits.short_ids:
            return "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def _render_unfinished(
        self, rendering: "_Rendering", entries: list[dict[str, Any]], last: Message
    ) -> tuple[ChatText, bool, list[str]]:
        """Render a conversation that ends inside the assistant's last message.

        Returns whether it ends in reasoning, and what was changed, in words, too.
        """
        if last.role != "assistant" or last.calls:
            raise InvalidArgument("to continue the last message, it must be the assistant's text")
        as_written = self._render_before_mark(rendering, entries, last)
        if as_written is not None:
            return as_written, open_reasoning(self.output_format, as_written) is not None, []
        is_first = len(entries) == 1  # templates need a message before the answer's opening
        before = [self._entries.with_content(Message("user"), "")] if is_first else entries[:-1]
        warnings, prompt = [USER_FIRST] if is_first else [], rendering.render(before)
        if not last.text and not last.reasoning:
            return prompt, open_reasoning(self.output_format, prompt) is not None, warnings
        return *write_prefill(self._codec, self.output_format, prompt, last), warnings

    def _render_before_mark(
        self, rendering: "_Rendering", entries: list[dict[str, Any]], last: Message
    ) -> ChatText | None:
        """Render up to the end of the last message's text; None if the template changes it."""
        states_reasoning = last.text.lstrip().startswith(self._reasoning_starts)
        if not last.text or states_reasoning:  # templates move, strip or drop reasoning
            return None
        marked = self._entries.with_content(last, last.text + _CONTINUATION_MARK)
        try:
            rendered = rendering.render([*entries[:-1], marked], generation_prompt=False)
        except InvalidArgument:
            return None
        before_mark, mark, _ = rendered.rpartition(_CONTINUATION_MARK)
        has_reasoning = last.reasoning.strip() in before_mark
        if not mark or not before_mark.endswith(last.text) or not has_reasoning:
            return None
        return ChatText(before_mark, rendered.sealed.rpartition(_CONTINUATION_MARK)[0])

    @property
    def _reasoning_starts(self) -> tuple[str, ...]:
        return tuple(markers.start for markers in self.output_format.reasoning)


@dataclass(frozen=True)
class _Rendering:
    """The parts of a rendering that do not depend on the messages."""

    codec: TextCodec
    tools: list[dict[str, Any]] | None
    variables: Mapping[str, Any]

    def render(self, entries: list[dict[str, Any]], generation_prompt: bool = True) -> ChatText:
        return self.codec.chat(entries, generation_prompt, self.tools, self.variables)
