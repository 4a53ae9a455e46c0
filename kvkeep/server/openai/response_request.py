"""Bodies of requests of OpenAI's Responses API."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from kvkeep.errors import InvalidArgument
from kvkeep.server.alignment import OwnFields
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.limits import (
    MAX_FIELDS,
    MAX_TOKENS,
    Data,
    LongText,
    Messages,
    Metadata,
    Options,
    ShortText,
    Tools,
)
from kvkeep.server.openai.cache_fields import PinningRequest
from kvkeep.server.openai.reasoning_fields import ReasoningConfig
from kvkeep.server.schemas import RequestBody, SamplingParams, TokenLimit

_LOGPROBS = "message.output_text.logprobs"  # a value of `include`


class TextOptions(RequestBody):
    format: Data | None = None


class ReasoningOptions(ReasoningConfig):
    summary: ShortText | None = None
    generate_summary: ShortText | None = None  # an older name of `summary`


class ContextManagement(RequestBody):
    type: ShortText
    compact_threshold: Annotated[int | None, Field(ge=1, le=2**40)] = None  # tokens of the prompt


class ResponsesRequest(SamplingParams, PinningRequest, OwnFields):
    input: LongText | Messages
    instructions: LongText | Messages | None = None
    previous_response_id: ShortText | None = None
    max_output_tokens: TokenLimit = None
    # Of hosted tools, which there are none of.
    max_tool_calls: Annotated[int | None, Field(ge=0, le=MAX_TOKENS)] = None
    store: bool | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: Annotated[list[ContextManagement], Field(max_length=MAX_FIELDS)] | None = (
        None
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Options | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: Tools | None = None
    tool_choice: ShortText | Data | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    return_progress: bool = False
    timings_per_token: bool = False

    @property
    def stores(self) -> bool:
        """Whether the response is kept for later requests."""
        return self.store is not False

    @property
    def compact_threshold(self) -> int | None:
        """The prompt's tokens beyond which its conversation is compacted; None for never."""
        entries = [entry for entry in self.context_management or () if entry.type == "compaction"]
        return next((entry.compact_threshold for entry in entries), None)

    @property
    def logprob_count(self) -> int | None:
        """Return how many likely tokens are reported beside each token; None for no report."""
        wanted = self.top_logprobs or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def summarizes_reasoning(self) -> bool:
        """Whether clients expect reasoning as a summary, which is then the reasoning itself."""
        options = self.reasoning or ReasoningOptions()
        return bool(options.summary or options.generate_summary)

    def text_format(self) -> dict[str, Any]:
        return (self.text.format if self.text else None) or {"type": "text"}

    def output_schema(self) -> Mapping[str, Any] | None:
        """Return the JSON schema that the output must follow; None for any text."""
        text_format = self.text_format()
        format_type, schema = text_format.get("type"), text_format.get("schema")
        if format_type == "json_schema" and not isinstance(schema, dict):
            raise InvalidArgument("text.format.schema must be a JSON schema")
        if format_type not in ("text", "json_object", "json_schema"):
            raise InvalidArgument(f"text.format.type {format_type!r:.100} is not supported")
        return {"text": None, "json_object": ANY_OBJECT, "json_schema": schema}[format_type]
