"""Parts of responses about a generation: finish reason, usage, timings, log probabilities."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from kvkeep.engine import GeneratedToken, PrefillProgress, TokenLogprob, Usage
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.alignment import own_fields
from kvkeep.server.generation_stream import GenerationResult
from kvkeep.server.service import Service
from kvkeep.version import __version__

SYSTEM_FINGERPRINT = f"kvkeep-{__version__}"  # under the same one, a seed gives the same text
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "full": "length"}


def completion_fields(prefix: str, service: Service) -> dict[str, Any]:
    """Return the fields that all chunks of a new completion share. prefix: of its id."""
    completion_id = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": completion_id, "created": int(time.time()), "model": service.model_name}


def usage_and_timings(results: Sequence[GenerationResult], reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage, timings and own fields of a chat's generations."""
    usages = [result.finished.usage for result in results]
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    fields = {"usage": openai_usage(results) | details, "timings": llamacpp_timings(usages[0])}
    return {**fields, **own_fields(*usages)}


def openai_usage(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """Return the usage of all generations of one prompt, which counts once."""
    usage, generated = results[0].finished.usage, sum(r.finished.usage.generated for r in results)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": generated,
        "total_tokens": usage.prompt + generated,
        "prompt_tokens_details": {"cached_tokens": usage.reuse.tokens},
    }


def total_usage(results_by_prompt: Sequence[Sequence[GenerationResult]]) -> dict[str, Any]:
    """Return the usage of all generations of several prompts, each of which counts once."""
    usages = [openai_usage(results) for results in results_by_prompt]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    total: dict[str, Any] = {name: sum(usage[name] for usage in usages) for name in names}
    cached_tokens = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached_tokens}}


def llamacpp_timings(usage: Usage) -> dict[str, Any]:
    prefill_ms, decode_ms = 1000 * usage.prefill_seconds, 1000 * usage.decode_seconds
    evaluated, generated, drafts = usage.evaluated, usage.generated, usage.drafts
    draft_counts = {"draft_n": drafts.drafted, "draft_n_accepted": drafts.accepted}
    return {
        "cache_n": usage.reuse.tokens,
        "prompt_n": evaluated,
        "prompt_ms": prefill_ms,
        "prompt_per_token_ms": prefill_ms / evaluated if evaluated else 0.0,
        "prompt_per_second": 1000 * evaluated / prefill_ms if prefill_ms else 0.0,
        "predicted_n": generated,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / generated if generated else 0.0,
        "predicted_per_second": 1000 * generated / decode_ms if decode_ms else 0.0,
        **(draft_counts if drafts.drafted else {}),
    }


def llamacpp_progress(progress: PrefillProgress) -> dict[str, Any]:
    return {
        "total": progress.total,
        "cache": progress.reuse.tokens,
        "processed": progress.done,
        "time_ms": round(1000 * progress.seconds),
    }


def logprobs_entry(
    tokenizer: TextCodec, event: GeneratedToken, decode_errors: str = "backslashreplace"
) -> dict[str, Any]:
    """Return a token's entry of `logprobs` in chats. decode_errors: `errors` of `bytes.decode`."""

    def entry(logprob: TokenLogprob) -> dict[str, Any]:
        token_bytes = tokenizer.token_bytes(logprob.token)
        return {
            "id": logprob.token,
            "token": token_bytes.decode(errors=decode_errors),
            "logprob": logprob.logprob,
            "bytes": list(token_bytes),
        }

    assert event.logprob is not None
    return {**entry(event.logprob), "top_logprobs": [entry(top) for top in event.top_logprobs]}
