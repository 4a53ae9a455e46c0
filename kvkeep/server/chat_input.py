"""Prompt, constraint and reading of the answer of a conversation, for all chat APIs."""

from asyncio import to_thread
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.chat.messages import Chat, Tool
from kvkeep.chat.output_reader import OutputReader
from kvkeep.chat.renderer import ChatRenderer, RenderedPrompt, RenderOptions
from kvkeep.errors import InvalidArgument
from kvkeep.server.grammar import Grammar, moved_schema
from kvkeep.server.reasoning_budget import reasoning_constraint
from kvkeep.server.service import RequestContext
from kvkeep.session.sampling import Constraint, Sampling


@dataclass(frozen=True)
class ChatInput:
    """A conversation with its prompt, ready for generations."""

    chat: Chat
    prompt: RenderedPrompt
    renderer: ChatRenderer
    context: RequestContext

    @property
    def ids(self) -> list[int]:
        return self.prompt.ids

    @property
    def forced(self) -> bool:
        """Whether the model must call a tool."""
        return self.chat.choice.mode == "required"

    def constrain(
        self,
        samplings: Sequence[Sampling],
        schema: Mapping[str, Any] | None = None,
        grammar: str | None = None,
        reasoning_budget: int | None = None,
    ) -> list[Sampling]:
        """Constrain samplings to a forced call, or to a JSON schema or GBNF grammar, if given.

        The answer is constrained, and not the reasoning before it. reasoning_budget: the most
        tokens of reasoning; None for any number. Each sampling gets a constraint of its own. Raises
        InvalidArgument for an invalid schema or grammar, or for a combination of them.
        """
        if self.forced:
            schema = forced_call_schema(self.chat.callable_tools)
        if schema is not None and grammar:
            raise InvalidArgument(
                "a grammar cannot be combined with a schema or a required tool call"
            )
        model = self.context.service.model
        result = []
        for sampling in samplings:
            answer: Constraint | None = None
            if schema is not None:
                answer = Grammar.from_schema(model, schema)
            elif grammar:
                answer = Grammar.from_gbnf(model, grammar)
            constraint = reasoning_constraint(
                self.context.tokenizer,
                self.renderer.output_format,
                self.prompt.starts_in_reasoning,
                reasoning_budget,
                answer,
                model.end_token_ids,
            )
            result.append(replace(sampling, constraint=constraint))
        return result

    def new_reader(self) -> OutputReader:
        """Return a reader for one generation's answer."""
        return OutputReader(
            self.renderer.output_format,
            self.chat.callable_tools,
            self.renderer.new_call_id,
            self.prompt.starts_in_reasoning,
            self.forced,
            self.context.tokenizer.control_text,
        )


async def chat_input(
    context: RequestContext,
    chat: Chat,
    options: RenderOptions = RenderOptions(),  # noqa: B008 (frozen)
) -> ChatInput:
    """Render a conversation with the model's chat template. Raises as `ChatRenderer.render`."""
    renderer = context.service.model.renderer
    prompt = await to_thread(renderer.render, chat, options)  # a long text would block the loop
    context.notices.warn(*prompt.warnings)
    return ChatInput(chat, prompt, renderer, context)


def forced_call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a forced call: bare JSON with a name and arguments."""
    call_schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": moved_schema(tool.parameters, f"#/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return {"anyOf": call_schemas}
