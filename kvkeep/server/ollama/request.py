"""Bodies of requests of Ollama's API."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from kvkeep.chat.messages import Chat, MediaPart, Message, TextPart, normalized
from kvkeep.chat.ollama_chat import parse_chat
from kvkeep.chat.renderer import RenderOptions
from kvkeep.errors import InvalidArgument
from kvkeep.server.alignment import OwnFields
from kvkeep.server.generation import STREAM_PATIENCE
from kvkeep.server.grammar import ANY_OBJECT
from kvkeep.server.ignored_fields import FieldRules
from kvkeep.server.limits import (
    MAX_FIELDS,
    MAX_SECONDS,
    MAX_TOKENS,
    Data,
    LongText,
    Messages,
    ShortText,
    TokenIds,
    Tools,
)
from kvkeep.server.schemas import SamplingParams

# Options about how a model is loaded, which the server decides when it starts.
_LOAD_OPTIONS = (
    *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all"),
    *("vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread"),
)
_EFFORTS = {"max": "high"}  # that templates do not know
OLLAMA_RULES = FieldRules(
    harmless=["truncate", "shift", *(f"options.{name}" for name in _LOAD_OPTIONS)]
)


class OllamaOptions(SamplingParams):
    """The `options` of a request. num_predict: 0, -1 and -2 for no limit."""

    num_predict: Annotated[int | None, Field(ge=-2, le=MAX_TOKENS)] = None

    @property
    def max_tokens(self) -> int | None:
        """The most tokens to generate; None for no limit."""
        return self.num_predict if self.num_predict and self.num_predict > 0 else None


class OllamaRequest(OwnFields):
    """The fields that `/api/chat` and `/api/generate` share."""

    model: ShortText = ""
    format: ShortText | Data | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: bool | ShortText | None = None
    keep_alive: Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)] | ShortText | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that the answer must follow."""
        if isinstance(self.format, dict):
            return self.format
        if self.format not in (None, "", "json"):
            raise InvalidArgument(f'format must be "json" or a JSON schema; found {self.format!r}')
        return ANY_OBJECT if self.format else None

    def render_options(self) -> RenderOptions:
        if isinstance(self.think, str):
            effort = _EFFORTS.get(self.think, self.think)
            return RenderOptions(enable_thinking=True, reasoning_effort=effort)
        return RenderOptions(enable_thinking=self.think)

    @property
    def reasoning_budget(self) -> int | None:
        """The most tokens of thinking; None for any number."""
        return 0 if self.think is False else None

    @property
    def patience(self) -> float | None:
        """Seconds to wait for admission before the stream begins, which is the default."""
        return None if self.stream is False else STREAM_PATIENCE

    @property
    def requested_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaChatRequest(OllamaRequest):
    messages: Messages | None = None
    tools: Tools | None = None

    def chat(self) -> Chat:
        return parse_chat(self.messages, self.tools)


class OllamaGenerateRequest(OllamaRequest):
    """A prompt. raw: without the chat template. context: the tokens of earlier answers."""

    prompt: LongText | None = None
    suffix: LongText | None = None
    system: LongText | None = None
    template: LongText | None = None
    raw: bool | None = None
    images: Annotated[list[LongText] | None, Field(max_length=MAX_FIELDS)] = None
    context: TokenIds | None = None

    def chat(self) -> Chat:
        images = tuple(MediaPart("image") for _ in self.images or ())
        messages = [Message("system", (TextPart(self.system),))] if self.system else []
        messages.append(Message("user", (*images, TextPart(self.prompt or ""))))
        return Chat(normalized(messages))
