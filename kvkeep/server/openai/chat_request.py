"""Bodies of requests of `/v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from kvkeep.chat.messages import Chat
from kvkeep.chat.openai_chat import parse_chat
from kvkeep.chat.renderer import RenderOptions
from kvkeep.errors import InvalidArgument
from kvkeep.server.alignment import OwnFields
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.limits import (
    MAX_BATCH,
    MAX_TOKENS,
    Data,
    GrammarText,
    Messages,
    ShortText,
    Tools,
)
from kvkeep.server.openai.cache_fields import PinningRequest
from kvkeep.server.openai.guided_fields import GuidedFields
from kvkeep.server.schemas import CompletionParams, RequestBody

_CHAT_FIELDS = ("messages", "tools", "tool_choice", "functions", "function_call")
_Tokens = Annotated[int | None, Field(ge=-1, le=MAX_TOKENS)]  # -1: no limit


class ResponseFormat(RequestBody):
    """The requested output format.

    type: text, json_object or json_schema. json_schema: {"name", "schema"}, as in OpenAI's API.
    schema: beside the type, as in llama.cpp.
    """

    type: ShortText = "text"
    json_schema: Data | None = None
    own_schema: Annotated[Data | None, Field(alias="schema")] = None

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


class ChatRequest(CompletionParams, PinningRequest, GuidedFields, OwnFields):
    """A conversation, and how to answer it."""

    messages: Messages
    max_tokens: _Tokens = None
    max_completion_tokens: _Tokens = None
    n_predict: _Tokens = None
    n: Annotated[int | None, Field(ge=1, le=MAX_BATCH)] = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    json_schema: Data | None = None
    grammar: GrammarText | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Tools | None = None
    tool_choice: ShortText | Data | None = None
    parallel_tool_calls: bool | None = None
    functions: Tools | None = None
    function_call: ShortText | Data | None = None
    return_progress: bool | None = None

    def chat(self, messages: Sequence[Any] | None = None) -> Chat:
        """Return the conversation. messages: those of its beginning; None for all."""
        fields = {name: getattr(self, name) for name in _CHAT_FIELDS}
        return parse_chat(fields if messages is None else {**fields, "messages": list(messages)})

    @property
    def uses_functions(self) -> bool:
        """Whether the request has the deprecated field `functions` in place of `tools`."""
        return bool(self.functions) and not self.tools

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives of each token to report; None for no log-probabilities.

        Raises InvalidArgument for alternatives without log-probabilities, as OpenAI's API does.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs is reported with logprobs: set logprobs to true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        if self.prewarms:
            return 0
        limits = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        limit = next((limit for limit in limits if limit is not None), None)
        return None if limit == -1 else limit

    def render_options(self) -> RenderOptions:
        continue_final = self.continue_final_message
        if continue_final and self.add_generation_prompt:
            raise InvalidArgument(
                "continue_final_message continues the last message, and add_generation_prompt "
                "starts a new one: use only one of them"
            )
        continued = False if self.add_generation_prompt else continue_final
        return replace(super().render_options(), continue_final=continued)

    def output_schema(self) -> Mapping[str, Any] | None:
        """Return the JSON schema that the output must follow; None for any text."""
        output_format = self.response_format or ResponseFormat()
        schema, _ = self.guided_form()
        if output_format.type == "text":
            if schema is not None and self.json_schema is not None:
                raise InvalidArgument("json_schema and guided_* exclude each other")
            return self.json_schema if schema is None else schema
        if self.guided_form() != (None, None):
            raise InvalidArgument("response_format and guided_* exclude each other")
        return output_format.output_schema()

    def output_grammar(self) -> str | None:
        """Return the grammar in GBNF that the output must follow; None for any text."""
        _, grammar = self.guided_form()
        if grammar and self.grammar:
            raise InvalidArgument("grammar and guided_* exclude each other")
        return grammar or self.grammar
