"""Bodies of requests of `/v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_chat import parse_chat
from kvkeep.chat.renderer import RenderOptions
from kvkeep.errors import InvalidArgument
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.schemas import MAX_BATCH, MAX_TOKENS, CompletionParams, RequestBody

_MAX_MESSAGES = 10_000
_MAX_TOOLS = 1_024
_CHAT_FIELDS = ("messages", "tools", "tool_choice", "functions", "function_call")
_Tokens = Annotated[int | None, Field(ge=-1, le=MAX_TOKENS)]  # -1: no limit
_Entries = list[dict[str, Any]]


class ResponseFormat(RequestBody):
    """The requested output format.

    type: text, json_object or json_schema. json_schema: {"name", "schema"}, as in OpenAI's API.
    schema: beside the type, as in llama.cpp.
    """

    type: str = "text"
    json_schema: dict[str, Any] | None = None
    own_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    def output_schema(self) -> Mapping[str, Any] | None:
        """Return the JSON schema of the output; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return ANY_OBJECT if self.own_schema is None else self.own_schema
        if self.type != "json_schema":
            raise InvalidArgument(f"response_format.type {self.type!r} is not supported")
        schema = (self.json_schema or {}).get("schema", self.own_schema)
        if not isinstance(schema, dict):
            raise InvalidArgument("response_format.json_schema.schema must be a JSON schema")
        return schema


class ReasoningConfig(RequestBody):
    """How the model reasons, as in Anthropic's API ("thinking") and OpenRouter's ("reasoning")."""

    type: str | None = None  # "disabled" for no reasoning
    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: _Tokens = None
    max_tokens: _Tokens = None

    @property
    def is_enabled(self) -> bool | None:
        """Whether the model reasons; None for the template's default."""
        if self.enabled is not None:
            return self.enabled
        return None if self.type is None else self.type != "disabled"

    @property
    def budget(self) -> int | None:
        return self.max_tokens if self.budget_tokens is None else self.budget_tokens


class ChatRequest(CompletionParams):
    """A conversation, and how to answer it.

    reasoning_budget: the most tokens of reasoning; -1 for any number. enable_thinking: whether the
    model reasons. chat_template_kwargs: variables for the chat template.
    """

    messages: Annotated[_Entries, Field(max_length=_MAX_MESSAGES)]
    max_tokens: _Tokens = None
    max_completion_tokens: _Tokens = None
    n: Annotated[int | None, Field(ge=1, le=MAX_BATCH)] = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[_Entries | None, Field(max_length=_MAX_TOOLS)] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[_Entries | None, Field(max_length=_MAX_TOOLS)] = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_budget: _Tokens = None
    enable_thinking: bool | None = None
    thinking: ReasoningConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_progress: bool | None = None

    def chat(self) -> Chat:
        return parse_chat({name: getattr(self, name) for name in _CHAT_FIELDS})

    @property
    def uses_functions(self) -> bool:
        """Whether the request has the deprecated field `functions` in place of `tools`."""
        return bool(self.functions) and not self.tools

    @property
    def token_limit(self) -> int | None:
        limits = (self.max_completion_tokens, self.max_tokens)
        limit = next((limit for limit in limits if limit is not None), None)
        return None if limit == -1 else limit

    def render_options(self) -> RenderOptions:
        continue_final = self.continue_final_message
        if continue_final and self.add_generation_prompt:
            raise InvalidArgument(
                "continue_final_message continues the last message, and add_generation_prompt "
                "starts a new one: use only one of them"
            )
        return RenderOptions(
            continue_final=False if self.add_generation_prompt else continue_final,
            reasoning_effort=self._effort,
            enable_thinking=self._enable_thinking,
            template_kwargs=self.chat_template_kwargs or {},
        )

    @property
    def budget(self) -> int | None:
        """The most tokens of reasoning; None for any number."""
        if self._enable_thinking is False or self._effort == "none":
            return 0
        budgets = (self.reasoning_budget, *(config.budget for config in self._configs))
        budget = next((budget for budget in budgets if budget is not None), None)
        return None if budget == -1 else budget

    def output_schema(self) -> Mapping[str, Any] | None:
        """Return the JSON schema that the output must follow; None for any text."""
        output_format = self.response_format or ResponseFormat()
        return self.json_schema if output_format.type == "text" else output_format.output_schema()

    @property
    def _configs(self) -> list[ReasoningConfig]:
        return [config for config in (self.thinking, self.reasoning) if config]

    @property
    def _effort(self) -> str | None:
        efforts = (self.reasoning_effort, *(config.effort for config in self._configs))
        return next((effort for effort in efforts if effort), None)

    @property
    def _enable_thinking(self) -> bool | None:
        variables = self.chat_template_kwargs or {}
        values = (
            self.enable_thinking,
            variables.get("enable_thinking"),
            *(config.is_enabled for config in self._configs),
        )
        return next((bool(value) for value in values if value is not None), None)
