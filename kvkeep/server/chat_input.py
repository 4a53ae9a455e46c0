"""Prompt, constraint and reading of the answer of a conversation, for all chat APIs."""

import re
from asyncio import to_thread, wrap_future
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from kvkeep.chat.formats.registry import format_warnings
from kvkeep.chat.messages import Chat
from kvkeep.chat.output import CallEnded, OutputEvent
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.renderer import ChatRenderer, RenderedPrompt, RenderOptions
from kvkeep.chat.written import written_answer
from kvkeep.engine import Finished
from kvkeep.server.answer_grammar import compile_answer
from kvkeep.server.generation_stream import GenerationResult
from kvkeep.server.service import RequestContext
from kvkeep.session.sampling import Constraint, Sampling
from kvkeep.session.stop_gate import ReasoningMarkers

_TITLE_LENGTH = 60  # characters
_OPENING_TAG = re.compile(r"\s*<(\w{1,40}[-_][\w-]{1,40})>")  # no HTML tag has two words


def title_for(text: str) -> str:
    """Return a title of a conversation that begins with a text, as the web UI gives it.

    Blocks in tags at its beginning are left out: agents put reminders and their settings there.
    """
    start = 0
    while opening := _OPENING_TAG.match(text, start):
        end_tag = f"</{opening[1]}>"
        end = text.find(end_tag, opening.end())
        if end < 0:
            break
        start = end + len(end_tag)
    line = (text[start:].strip() or text.strip()).partition("\n")[0].strip()
    return line if len(line) <= _TITLE_LENGTH else f"{line[: _TITLE_LENGTH - 3]}..."


class StopAfterFirstCall:
    """A constraint that ends the generation after its first tool call.

    Until then it applies the wrapped constraint, if any.
    Tokens may be sampled behind the call before it is read, and end the generation otherwise.
    """

    def __init__(self, constraint: Constraint | None):
        self._constraint = constraint
        self.ended = False  # with the first call

    @classmethod
    def add(
        cls, samplings: Sequence[Sampling]
    ) -> "tuple[list[Sampling], list[StopAfterFirstCall]]":
        """Return the samplings with such a constraint each, and these."""
        ends = [cls(sampling.constraint) for sampling in samplings]
        pairs = zip(samplings, ends, strict=True)
        return [replace(sampling, constraint=end) for sampling, end in pairs], ends

    def up_to_first_call(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """Return the next events of the answer, up to the end of its first call."""
        if self.ended:
            return []
        for index, event in enumerate(events):
            if isinstance(event, CallEnded):
                self.ended = True
                return events[: index + 1]
        return events

    @property
    def complete(self) -> bool:
        return self.ended or bool(getattr(self._constraint, "complete", False))

    def masked(self, logits: Tensor) -> Tensor:
        return logits if self._constraint is None else self._constraint.masked(logits)

    def accept(self, token: int) -> None:
        if self._constraint is not None:
            self._constraint.accept(token)


def is_cut_off(finished: Finished, early_end: StopAfterFirstCall | None) -> bool:
    """Whether a limit ended an answer, and neither the model nor the answer's only call."""
    ended = early_end is not None and early_end.ended
    return not ended and finished.reason in ("length", "full")


@dataclass(frozen=True)
class ChatInput:
    """A conversation with its prompt, ready for generations."""

    chat: Chat
    prompt: RenderedPrompt
    renderer: ChatRenderer
    context: RequestContext
    # With a schema, the tools whose calls may be bare JSON: see `OutputReader`.
    schema_calls: frozenset[str] | None = None
    constrained: bool = False  # whether a grammar holds for what follows the reasoning

    @property
    def ids(self) -> list[int]:
        return self.prompt.ids

    @property
    def forced(self) -> bool:
        """Whether the model must call a tool."""
        return self.chat.choice.mode == "required"

    async def constrain(
        self,
        samplings: Sequence[Sampling],
        schema: Mapping[str, Any] | None = None,
        gbnf: str | None = None,
        reasoning_budget: int | None = None,
    ) -> "tuple[ChatInput, list[Sampling]]":
        """Constrain samplings to a forced call, or to a JSON schema or GBNF grammar, if given.

        Besides an answer by a schema, calls of the tools stay possible. Stop strings count behind
        the reasoning.

        Returns the input whose readers read such answers, and the samplings, each with a constraint
        of its own. The answer is constrained, and not the reasoning before it. reasoning_budget:
        the most tokens of reasoning; None for any number. Raises InvalidArgument for an invalid
        schema or grammar, or for a combination of them.
        """
        model = self.context.service.model
        arguments = (model, self.chat, schema, gbnf)
        is_strict = any(tool.strict for tool in self.chat.callable_tools)
        if schema is None and not gbnf and not self.forced and not is_strict:  # nothing to compile
            answer = compile_answer(*arguments)
        else:
            compiler = self.context.service.compiler
            answer = await wrap_future(compiler.submit(compile_answer, *arguments))
        self.context.notices.warn(*answer.warnings)

        markers = ReasoningMarkers.behind_prompt(self.renderer.output_format, self.prompt)

        def constrained() -> list[Sampling]:
            return [
                replace(
                    sampling,
                    constraint=answer.constraint(model, self.prompt, reasoning_budget),
                    reasoning=markers,
                )
                for sampling in samplings
            ]

        # The first constraint that forbids calls searches the vocabulary.
        result = await to_thread(constrained) if answer.forbids_calls else constrained()
        is_constrained = answer.grammar is not None
        return (
            replace(self, schema_calls=answer.schema_calls, constrained=is_constrained),
            result,
        )

    @property
    def written_tokens(self) -> int:
        """The number of tokens of the history that the model sampled."""
        return self.prompt.written_tokens

    @property
    def title(self) -> str:
        """The beginning of the first user message, as a title; "" without one."""
        texts = (message.text for message in self.chat.messages if message.role == "user")
        return title_for(next(texts, ""))

    def new_reader(self, result: GenerationResult | None = None) -> OutputReader:
        """Return a reader for a generation's answer.

        result: of the generation. Its tokens are remembered when they have been read, if the answer
        is complete, for when the client sends it back. None to remember nothing.
        """
        reader = OutputReader(
            self.renderer.output_format,
            self.chat.callable_tools,
            self.renderer.new_call_id,
            self.prompt.starts_in_reasoning,
            self.forced,
            self.context.tokenizer.control_text,
            self.schema_calls,
            self.constrained,
        )
        if result is not None and not self.prompt.continues:
            reader.on_finish = partial(self._remember, reader, result)
        return reader

    def _remember(self, reader: OutputReader, result: GenerationResult) -> None:
        if result.finished.reason != "eos":
            return
        output = reader.output
        answer = written_answer(
            output,
            [token.token for token in result.tokens],
            self.renderer.output_format,
            self.context.tokenizer,
            self.ids,
            self.prompt.starts_in_reasoning,
            tuple(call.id for call in output.calls),
        )
        if answer is not None:
            self.context.service.engine.written.add(self.context.owner, output.message(), answer)


async def chat_input(
    context: RequestContext,
    parse: Callable[[], Chat],
    options: RenderOptions = RenderOptions(),  # noqa: B008 (frozen)
    restore_reasoning: bool = True,
) -> ChatInput:
    """Render a conversation with the model's chat template. Raises as `ChatRenderer.render`.

    parse: returns the conversation; called in a thread, as a long one would block the event loop.
    The service's prompt rules change it first. The response's headers name the rules that did, and
    what the template cannot take. Answers that the server generated for the owner are in the tokens
    that the model sampled. restore_reasoning: with their reasoning, where the client dropped it.
    """
    renderer = context.service.model.renderer
    written = context.engine.written
    find_written = partial(written.find, context.owner, restore_reasoning=restore_reasoning)

    def render() -> tuple[Chat, tuple[str, ...], RenderedPrompt]:
        chat, rules = context.service.ruled(context.owner, parse())
        return chat, rules, renderer.render(chat, options, find_written)

    chat, rules, prompt = await to_thread(render)
    context.notices.add_rules(*rules)
    context.notices.warn(*prompt.warnings)
    if chat.callable_tools:
        takes_tools = renderer.traits.tools
        context.notices.warn(*format_warnings(renderer.output_format, takes_tools))
    return ChatInput(chat, prompt, renderer, context)
