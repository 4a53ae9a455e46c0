"""What an answer took, as OpenAI's and llama.cpp's clients read it."""

from typing import Any

from kvkeep.engine import PrefillProgress, Usage
from kvkeep.version import __version__

FINGERPRINT = f"kvkeep-{__version__}"  # what the same seed gives the same answers by
# How OpenAI's API names the reasons for which an answer ends.
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "full": "length"}


def usage_of(usages: list[Usage]) -> dict[str, Any]:
    """Of all answers to one prompt, which is counted once."""
    prompt, written = usages[0].prompt, sum(usage.generated for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": usages[0].reuse.tokens},
    }


def timings_of(usage: Usage) -> dict[str, Any]:
    """llama.cpp's `timings`: milliseconds, and tokens per second."""
    reading, writing = 1000 * usage.prefill_seconds, 1000 * usage.decode_seconds
    read, written = usage.evaluated, usage.generated
    return {
        "cache_n": usage.reuse.tokens,
        "prompt_n": read,
        "prompt_ms": reading,
        "prompt_per_token_ms": reading / read if read else 0.0,
        "prompt_per_second": 1000 * read / reading if reading else 0.0,
        "predicted_n": written,
        "predicted_ms": writing,
        "predicted_per_token_ms": writing / written if written else 0.0,
        "predicted_per_second": 1000 * written / writing if writing else 0.0,
    }


def progress_of(read: PrefillProgress) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`."""
    return {
        "total": read.total,
        "cache": read.reuse.tokens,
        "processed": read.done,
        "time_ms": round(1000 * read.seconds),
    }
