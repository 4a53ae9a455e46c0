"""Fields of requests that are not supported: harmless, refused, or ignored and named in a header.

A field is harmless if the answer is the same without it: who asks, where the answer is kept or
billed, or how soon it comes. A field without which the answer would be another one in kind is
refused. All others are ignored, as other servers do, and named in `X-Kvkeep-Ignored`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.server.errors import ApiError
from kvkeep.server.notices import Notices
from kvkeep.server.schemas import RequestBody

_HARMLESS = frozenset(
    [
        "cache_control",
        "cache_prompt",
        "id_slot",
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options.include_obfuscation",
        "user",
    ]
)
_OPTIONS = "options."  # the beginning of the paths of Ollama's options
# Values that ask for nothing beyond what is done without the field.
_NEUTRAL_VALUES: Mapping[str, Any] = {
    "add_special_tokens": True,
    "background": False,
    "best_of": 1,
    "chat_format": 0,
    "dry_multiplier": 0,
    "dynatemp_range": 0,
    "echo": False,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "min_keep": 0,
    "min_tokens": 0,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "modalities": ["text"],
    "n": 1,
    "n_discard": 0,
    "n_keep": 0,
    "n_predict": -1,
    "num_keep": 4,
    "parallel_tool_calls": True,
    "parse_tool_calls": True,
    "penalize_newline": True,
    "post_sampling_probs": False,
    "repetition_penalty": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "tfs_z": 1,
    "timings_per_token": False,
    "top_a": 0,
    "top_logprobs": 0,
    "top_n_sigma": -1,
    "typical_p": 1,
    "use_beam_search": False,
    "verbosity": "medium",
    "text.verbosity": "medium",
    "xtc_probability": 0,
}


@dataclass(frozen=True)
class FieldRules:
    """The unsupported fields of an API. harmless: beside those of all APIs. refused: reasons.

    details: of the errors of refused fields, as of `ApiError`.
    """

    harmless: Collection[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def check(self, body: RequestBody, notices: Notices) -> None:
        """Name a request's ignored fields. Raises ApiError for one that is refused."""
        for name, reason in self.refused.items():
            if _asks_for_something(name, getattr(body, name, None)):
                message = f"{name} is not supported: {reason}"
                raise ApiError(
                    *(400, message),
                    code="unsupported_parameter",
                    param=name,
                    details=self.details.get(name),
                )
        notices.ignore(*self.ignored(body))

    def ignored(self, body: RequestBody) -> list[str]:
        """Return the names of a request's unknown fields that would change the answer."""
        return [
            name
            for name, value in _unknown_fields(body)
            if name not in _HARMLESS
            and name not in self.harmless
            and _asks_for_something(name, value)
        ]


CHAT_RULES = FieldRules(
    refused={
        "audio": "the model writes text only; leave it out",
        "modalities": 'the model writes text only; leave it out, or send ["text"]',
    }
)
_ELSEWHERE = "ask for it in a chat, or send json_schema or grammar to /completion"
_GUIDED = dict.fromkeys(
    (
        "guided_json",
        "guided_choice",
        "guided_grammar",
        "guided_regex",
        "structured_outputs",
    ),
    _ELSEWHERE,
)
_GRAMMARS = _GUIDED | dict.fromkeys(("grammar", "json_schema"), _ELSEWHERE)
COMPLETION_RULES = FieldRules(refused=_GRAMMARS)
LLAMACPP_RULES = FieldRules(refused=_GUIDED)
RESPONSES_RULES = FieldRules(
    harmless=("client_metadata", "include", "stream_options"),
    refused={
        **dict.fromkeys(_GRAMMARS, "send a JSON schema as text.format"),
        "background": "a response ends with its connection; leave it out, and stream the response",
        "conversation": "the server stores responses only; continue with previous_response_id",
        "prompt": "the server stores no prompt templates; send the text as instructions and input",
    },
)
SESSION_RULES = FieldRules()


def _unknown_fields(body: RequestBody, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each unknown field, also of the objects in the body."""
    for name, value in (body.model_extra or {}).items():
        yield f"{prefix}{name}", value
    for name in type(body).model_fields:
        if isinstance(value := getattr(body, name), RequestBody):
            yield from _unknown_fields(value, f"{prefix}{name}.")


def _asks_for_something(name: str, value: Any) -> bool:
    if value is None or value in ("", [], {}):
        return False
    name = name.removeprefix(_OPTIONS)
    return name not in _NEUTRAL_VALUES or bool(value != _NEUTRAL_VALUES[name])
