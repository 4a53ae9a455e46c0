"""Fields of OpenAI's APIs that say how long a prompt is kept for the next ones like it."""

from typing import Any

from kvkeep.engine import PinRequest
from kvkeep.server.limits import ShortText
from kvkeep.server.openai.reasoning_fields import ReasoningFields
from kvkeep.server.schemas import RequestBody

_DEFAULT_SECONDS = 300.0
# Of `prompt_cache_retention`, and of `ttl` in `prompt_cache_options` and breakpoints.
_SECONDS = {"24h": 86_400.0, "12h": 43_200.0, "30m": 1_800.0}


class PromptCacheOptions(RequestBody):
    """Options of the prompt's cells.

    ttl: "30m" or "12h". mode: "explicit" to pin only what breakpoints mark. prewarm: whether the
    prompt is evaluated and pinned, and nothing generated.
    """

    ttl: ShortText | None = None
    mode: ShortText | None = None
    prewarm: bool | None = None


class CacheFields(RequestBody):
    """Request fields that protect a prompt's session from eviction, and name one to prefer.

    prompt_cache_key: names the conversation; its newest session is protected for five minutes after
    each use. prompt_cache_retention: "24h" for a day. prompt_cache_options: see
    `PromptCacheOptions`.
    """

    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: PromptCacheOptions | None = None

    @property
    def prewarms(self) -> bool:
        """Whether the prompt is evaluated without an answer."""
        return bool(self._options.prewarm)

    @property
    def _options(self) -> PromptCacheOptions:
        return self.prompt_cache_options or PromptCacheOptions()

    def pins(self, prompt_tokens: int) -> tuple[PinRequest, ...]:
        """Return the request to pin the prompt in its session; none without these fields."""
        if self._options.mode == "explicit":
            return ()
        lifetimes = (self.prompt_cache_retention, self._options.ttl)
        seconds = max((_SECONDS.get(str(lifetime), 0.0) for lifetime in lifetimes), default=0.0)
        if not seconds and self.prewarms:
            seconds = self.breakpoint_seconds(None)
        if not seconds and not self.prompt_cache_key:
            return ()
        key = self.prompt_cache_key or ""
        return (PinRequest(seconds or _DEFAULT_SECONDS, prompt_tokens, key),)

    def breakpoint_seconds(self, lifetime: Any) -> float:
        """Return the time of a breakpoint: its own `ttl`, the request's, or half an hour."""
        lifetimes = (str(lifetime), str(self._options.ttl), "30m")
        return next(_SECONDS[text] for text in lifetimes if text in _SECONDS)


class PinningRequest(ReasoningFields, CacheFields):
    """The fields of chats and responses that pin prompts, and those that say how they reason."""
