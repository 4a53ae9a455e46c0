"""From a conversation in normal form to generations, and to readers of their output."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.chat.messages import Chat, Message, Tool, content_text
from kvkeep.chat.output_format import detect_format
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import GenerationRequest
from kvkeep.errors import UnsupportedModel
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.template_files import template_source
from kvkeep.server.generation import constrain, prompt_ids, start_generations
from kvkeep.server.service import GenerationStream, RequestContext
from kvkeep.server.tools import Tools
from kvkeep.session.sampling import Sampling


@dataclass(frozen=True)
class ChatPrompt:
    """The tokens of a conversation up to the assistant's next message, and the tools in it."""

    context: RequestContext
    ids: list[int]
    callable_tools: tuple[Tool, ...]
    described_tools: Tools

    @classmethod
    async def render(cls, context: RequestContext, chat: Chat) -> "ChatPrompt":
        entries = [_function_entry(tool) for tool in chat.callable_tools if not tool.deferred]
        choice = chat.choice.names[0] if chat.choice.names else chat.choice.mode
        tools = Tools(entries, choice) if entries else Tools()
        messages = [entry for message in chat.messages for entry in _template_messages(message)]
        ids = await prompt_ids(context, messages, tools)
        return cls(context, ids, chat.callable_tools, tools)

    async def start(
        self,
        request: GenerationRequest,
        samplings: list[Sampling],
        schema: Mapping[str, Any] | None = None,
    ) -> GenerationStream:
        """Start a generation for each sampling, constrained to a forced call or to the schema."""
        samplings = constrain(self.context, samplings, self.described_tools, schema)
        return await start_generations(self.context, request, samplings)

    def reader(self) -> OutputReader:
        """Return a reader for one of the generations."""
        codec = self.context.tokenizer
        return OutputReader(
            detect_format(_template(codec), _control_texts(codec)),
            self.callable_tools,
            new_call_id=lambda: f"call_{secrets.token_hex(12)}",
            forced=self.described_tools.forced,
            control_text=lambda token: codec.decode([token]),
        )


def _function_entry(tool: Tool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": fields}


def _template_messages(message: Message) -> list[dict[str, Any]]:
    """Return a message in the form of chat templates: one for each of its results."""
    if message.role == "tool":
        return [
            {
                "role": "tool",
                "content": content_text(result.content),
                "tool_call_id": result.call_id,
            }
            for result in message.results
        ]
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.calls
        ]
    return [fields]


def _template(codec: TextCodec) -> str:
    try:
        return template_source(codec.folder)
    except UnsupportedModel:
        return ""


def _control_texts(codec: TextCodec) -> list[str]:
    added = codec.tokenizer.get_added_tokens_decoder()
    return [str(token.content) for token in added.values() if token.special]
