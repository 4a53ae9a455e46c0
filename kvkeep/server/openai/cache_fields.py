"""Fields of OpenAI's APIs that say how long a prompt is kept for the next ones like it."""

from kvkeep.engine import PinRequest
from kvkeep.server.limits import Data, ShortText
from kvkeep.server.schemas import RequestBody

_DEFAULT_SECONDS = 300.0
# Of `prompt_cache_retention`, and of `ttl` in `prompt_cache_options`.
_SECONDS = {"24h": 86_400.0, "12h": 43_200.0, "30m": 1_800.0}


class CacheFields(RequestBody):
    """Request fields that protect a prompt's session from eviction, and name one to prefer.

    prompt_cache_key: names the conversation; its newest session is protected for five minutes after
    each use. prompt_cache_retention: "24h" for a day. prompt_cache_options: {"ttl": "30m" or
    "12h"}.
    """

    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: Data | None = None

    def pins(self, prompt_tokens: int) -> tuple[PinRequest, ...]:
        """Return the request to pin the prompt in its session; none without these fields."""
        lifetimes = (self.prompt_cache_retention, (self.prompt_cache_options or {}).get("ttl"))
        seconds = max((_SECONDS.get(str(lifetime), 0.0) for lifetime in lifetimes), default=0.0)
        if not seconds and not self.prompt_cache_key:
            return ()
        key = self.prompt_cache_key or ""
        return (PinRequest(seconds or _DEFAULT_SECONDS, prompt_tokens, key),)
