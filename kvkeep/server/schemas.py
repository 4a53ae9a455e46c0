"""The common parts of all APIs' request bodies: token ids, limits, sampling parameters."""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from kvkeep.chat.fields import MAX_NESTING, is_nested_too_deeply
from kvkeep.errors import InvalidArgument
from kvkeep.server.limits import (
    MAX_BIASES,
    MAX_STOPS,
    MAX_TOKENS,
    Bias,
    Biases,
    ShortText,
    TokenId,
)
from kvkeep.session.default_sampling import with_parameters
from kvkeep.session.sampling import Sampling

_SEED_LIMIT = 2**53
_FORBIDDING_BIAS = -1e6  # what llama.cpp's clients mean by a bias of `false`


def _new_tokens(limit: int | None) -> int | None:
    """Return a limit of generated tokens; None for none, which clients write as -1."""
    if limit == 0:
        raise ValueError("must be at least 1, or -1 for no limit")
    return None if limit == -1 else limit


# The most tokens to generate; None, in requests -1, for no limit.
TokenLimit = Annotated[int | None, Field(ge=-1, le=MAX_TOKENS), AfterValidator(_new_tokens)]

_OUTER_KEYS = ("default", "title", "description")  # of a field, not of one of its alternatives


class RequestBody(BaseModel):
    """A request's body. Unknown fields are accepted, and null means that a field is missing."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _require_encodable(cls, value: Any) -> Any:
        """Refuse what no JSON can hold, which Python reads, and deep nesting."""
        if isinstance(value, Mapping):
            if is_nested_too_deeply(value):
                raise ValueError(f"the body is nested too deeply; at most {MAX_NESTING} levels")
            _require_encodable_members(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Allow null for each field that may be missing."""
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema)
        required = fields.get("required", ())
        for name, field_schema in fields.get("properties", {}).items():
            if name not in required and {"type": "null"} not in field_schema.get("anyOf", ()):
                outer = {key: field_schema[key] for key in _OUTER_KEYS if key in field_schema}
                inner = {key: value for key, value in field_schema.items() if key not in outer}
                fields["properties"][name] = {"anyOf": [inner, {"type": "null"}], **outer}
        return schema


class StrictBody(RequestBody):
    """A body of kvkeep's own API. Unknown fields are refused: a misspelt one would be ignored."""

    model_config = ConfigDict(extra="forbid")


def _require_encodable_members(value: Mapping[str, Any]) -> None:
    """Raise ValueError for a text or a number that no JSON can hold.

    Python code, since one call of `json.dumps` would hold up other threads for as long as it takes.
    """
    containers: list[Any] = [value]
    while containers:
        container = containers.pop()
        if isinstance(container, dict):
            containers.append(list(container))  # the names
            container = container.values()
        for member in container:
            if isinstance(member, str):
                _require_characters(member)
            elif isinstance(member, (dict, list, tuple)):
                containers.append(member)
            elif isinstance(member, float) and not math.isfinite(member):
                raise ValueError("numbers must be finite and at most 1.8e308")


def _require_characters(text: str) -> None:
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "the text has a lone surrogate, which is not a Unicode character"
        ) from None


class StreamOptions(RequestBody):
    include_usage: bool = False


class SamplingParams(RequestBody):
    """Sampling parameters, by OpenAI's names, and by llama.cpp's for those that OpenAI lacks.

    repetition_penalty: as repeat_penalty, but of all tokens unless repeat_last_n says how many.
    """

    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None  # 0: only the likeliest token
    top_k: Annotated[int | None, Field(ge=-1, le=10_000_000)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repeat_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None  # vLLM's name
    repeat_last_n: Annotated[int | None, Field(ge=-1, le=10_000_000)] = None
    presence_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-100, le=100)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: Annotated[list[ShortText], Field(max_length=MAX_STOPS)] | ShortText | None = None
    logit_bias: (
        Biases
        | Annotated[list[tuple[TokenId, Bias | Literal[False]]], Field(max_length=MAX_BIASES)]
        | None
    ) = None

    def samplings(self, defaults: Sampling, count: int = 1) -> list[Sampling]:
        """Return a `Sampling` for each generation. defaults: of what the request leaves out."""
        seed = secrets.randbelow(_SEED_LIMIT) if self.seed is None or self.seed < 0 else self.seed
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        penalty, last_n = self.repeat_penalty, self.repeat_last_n
        if penalty is None and self.repetition_penalty is not None:
            penalty = self.repetition_penalty
            last_n = -1 if last_n is None else last_n  # of all tokens, as in vLLM
        top_k = self.top_k and max(0, self.top_k)  # -1, as 0: no limit
        parameters = {
            "temperature": self.temperature,
            "top_k": 1 if self.top_p == 0 else top_k,
            "top_p": self.top_p or None,
            "min_p": self.min_p,
            "repetition_penalty": penalty,
            "repetition_window": 2**31 if last_n == -1 else last_n,  # -1: all tokens
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop": tuple(text for text in stop if text),
            "logit_bias": _bias_pairs(self.logit_bias or {}),
        }
        sampling = with_parameters(defaults, parameters)
        # With a seed the same request gives the same texts.
        return [replace(sampling, seed=seed + index) for index in range(count)]


class CompletionParams(SamplingParams):
    """The common fields of OpenAI's chat and text completions."""

    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    @property
    def streams_usage(self) -> bool:
        """Whether the last event of a stream reports the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def _bias_pairs(biases: Mapping[str, float] | Sequence[Any]) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs from OpenAI's mapping of digits, or from llama.cpp's pairs."""
    if not isinstance(biases, Mapping):
        return tuple((token, _FORBIDDING_BIAS if bias is False else bias) for token, bias in biases)
    if any(not (token.isascii() and token.isdigit()) for token in biases):
        raise InvalidArgument("logit_bias: each key must be a token id, in digits")
    return tuple((int(token), bias) for token, bias in biases.items())
