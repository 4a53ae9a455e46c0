"""Bodies of requests of Anthropic's API."""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field

from kvkeep.chat.anthropic_blocks import unknown_types
from kvkeep.chat.anthropic_messages import parse_chat
from kvkeep.chat.anthropic_tool_changes import ignored_changes
from kvkeep.chat.anthropic_tools import client_tool_names, hosted_tools
from kvkeep.chat.messages import Chat
from kvkeep.chat.renderer import RenderOptions
from kvkeep.server.alignment import OwnFields
from kvkeep.server.ignored_fields import FieldRules
from kvkeep.server.limits import (
    MAX_STOPS,
    MAX_TOKENS,
    Blocks,
    Data,
    LongText,
    Messages,
    ShortText,
    Tools,
)
from kvkeep.server.schemas import RequestBody, SamplingParams

_HARMLESS = (
    "betas",
    "billing_policy",
    "diagnostics",
    "inference_geo",
    "speed",
    "thinking.display",
    "user_profile_id",
    "workspace_id",
)
# Without these fields the prompt would be another one.
_REFUSED_PROMPTS = {
    "thread": "the server holds no threads; leave it out, and send the whole conversation",
    "mcp_servers": "the server connects to no others; connect the client to them, and send tools",
}
# Clients that read this send the whole conversation instead.
_THREAD_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_REFUSED_DETAILS = {"thread": _THREAD_DETAILS}
MESSAGES_RULES = FieldRules(
    _HARMLESS,
    {
        **_REFUSED_PROMPTS,
        "container": "the server runs no code; leave it out, and send tools",
    },
    _REFUSED_DETAILS,
)
_ANSWER_FIELDS = (
    *("compaction", "container", "max_tokens", "stop_sequences", "stream"),
    *("temperature", "top_k", "top_p"),
)
COUNT_RULES = FieldRules((*_HARMLESS, *_ANSWER_FIELDS), _REFUSED_PROMPTS, _REFUSED_DETAILS)
# Efforts beyond those that templates know.
_EFFORTS = {"xhigh": "high", "max": "high"}
# Whether the model thinks; None where it decides, as with other types, which are ignored.
_THINKING_TYPES = {"enabled": True, "disabled": False, "between_tools": False, "adaptive": None}


class ThinkingConfig(RequestBody):
    """Whether the model thinks. It does not if the field is missing, as in the hosted API."""

    type: ShortText
    budget_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = None

    @property
    def enabled(self) -> bool | None:
        """Whether the model thinks; None where it decides."""
        return _THINKING_TYPES.get(self.type)


class JsonOutputFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: Annotated[Data, Field(alias="schema")]


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class CompactionConfig(RequestBody):
    """A request for a summary. instructions: in place of the default ones."""

    type: Literal["summarize"]
    instructions: LongText | None = None


class CountTokensRequest(RequestBody):
    """The fields of a request that form the prompt."""

    model: ShortText = ""
    messages: Annotated[Messages, Field(min_length=1)]
    system: LongText | Blocks | None = None
    tools: Tools | None = None
    tool_choice: Data | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None  # an older place of `output_config.format`
    # A mark of the whole prompt; blocks and tools have marks of their own.
    cache_control: Data | None = None
    context_management: Data | None = None  # `kvkeep.chat.context_edits`

    def chat(self) -> Chat:
        names = ("messages", "system", "tools", "tool_choice")
        return parse_chat({name: getattr(self, name) for name in names})

    def render_options(self) -> RenderOptions:
        effort = self.output_config.effort if self.output_config else None
        return RenderOptions(
            enable_thinking=self.thinking.enabled if self.thinking else False,
            reasoning_effort=_EFFORTS.get(effort or "", effort),
        )

    @property
    def reasoning_budget(self) -> int | None:
        """The most tokens of thinking; None for any number.

        Without the field `thinking`, a model that cannot answer without thinking may think.
        """
        if self.thinking is None:
            return None
        return 0 if self.thinking.enabled is False else self.thinking.budget_tokens

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that the answer must follow."""
        output_format = (self.output_config and self.output_config.format) or self.output_format
        return output_format.json_schema if output_format else None

    @property
    def ignored_values(self) -> list[str]:
        """The types of tools that only the hosted API can run, and of unknown blocks and thinking.

        References to tools that are none count, too. It looks at each block of the conversation. A
        message's own effort is ignored, too.
        """
        names = [str(tool["type"]) for tool in hosted_tools(self.tools)]
        names += ignored_changes(self.messages, client_tool_names(self.tools))
        contents = (message.get("content") for message in self.messages)
        types = chain.from_iterable(map(unknown_types, (self.system, *contents)))
        names += (f"messages.content.{name}" for name in dict.fromkeys(types))
        if any(message.get("output_config") for message in self.messages):
            names.append("messages.output_config")
        is_known = self.thinking is None or self.thinking.type in _THINKING_TYPES
        return names if is_known else [*names, "thinking.type"]


class MessagesRequest(CountTokensRequest, OwnFields):
    # The most tokens to generate: none for 0, which only evaluates the prompt; -1 for no limit.
    max_tokens: Annotated[int | None, Field(ge=-1, le=MAX_TOKENS)]
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    stop_sequences: Annotated[list[ShortText] | None, Field(max_length=MAX_STOPS)] = None
    stream: bool | None = None
    compaction: CompactionConfig | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; None for no limit."""
        return None if self.max_tokens == -1 else self.max_tokens

    def sampling_params(self) -> SamplingParams:
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }
        if self.top_p == 0:  # only the likeliest token
            fields |= {"top_k": 1, "top_p": None}
        return SamplingParams(**fields, stop=self.stop_sequences)
