"""Many prompts through one engine: read one after the other, answered together."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from kvkeep.cli.batch.requests import BatchRequest
from kvkeep.engine import (
    Engine,
    Failed,
    Finished,
    GeneratedToken,
    GenerationEvent,
    GenerationRequest,
    PrefillProgress,
)
from kvkeep.errors import NoRoom

OWNER = "0"


@dataclass
class BatchAnswer:
    """A request, and what has come of it. end: None where it failed, with error."""

    request: BatchRequest
    ask: GenerationRequest
    texts: list[str] = field(default_factory=list)
    end: Finished | None = None
    error: BaseException | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def line(self, model: str) -> dict[str, Any]:
        """As it stands in the results."""
        request, mark = self.request, {"request": self.request.digest}
        if self.end is None:
            error = {"code": type(self.error).__name__, "message": str(self.error)}
            name = {"custom_id": request.name} if request.openai else {"id": request.name}
            return {**name, "response": None, "error": error, **mark}
        usage = self._usage()
        if not request.openai:
            reason = {"finish_reason": self._reason}
            return {"id": request.name, "text": self.text, **reason, "usage": usage, **mark}
        body = {"id": f"chatcmpl-{request.digest}", "created": int(time.time()), "model": model}
        said = {"message": {"role": "assistant", "content": self.text}}
        choice = {"index": 0, **(said if request.chat else {"text": self.text})}
        body["object"] = "chat.completion" if request.chat else "text_completion"
        body["choices"] = [{**choice, "finish_reason": self._reason}]
        body["usage"] = usage
        response = {"status_code": 200, "request_id": request.digest, "body": body}
        head = {"id": f"batch_req_{request.digest}", "custom_id": request.name}
        return {**head, "response": response, "error": None, **mark}

    @property
    def _reason(self) -> str:
        assert self.end is not None
        return "stop" if self.end.reason in ("eos", "stop") else "length"

    def _usage(self) -> dict[str, Any]:
        assert self.end is not None
        usage = self.end.usage
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.generated,
            "total_tokens": usage.prompt + usage.generated,
            "prompt_tokens_details": {"cached_tokens": usage.reuse.tokens},
        }


def answers(
    engine: Engine,
    requests: Sequence[tuple[BatchRequest, GenerationRequest]],
    at_once: int,
    seen: Callable[[BatchAnswer, GenerationEvent], None],
) -> Iterator[BatchAnswer]:
    """Each once it is whole, or has failed. seen: is told what happens meanwhile.

    The next prompt is handed over when the last one is read: so it finds what they have in common,
    and nobody waits for it, since the engine reads one prompt at a time. Those that begin alike
    come one after the other.
    """
    waiting = sorted(requests, key=lambda pair: pair[1].prompt, reverse=True)
    came = SimpleQueue[tuple[BatchAnswer, GenerationEvent]]()
    working, unread = 0, None
    while waiting or working:
        if waiting and unread is None and working < at_once:
            asked = BatchAnswer(*waiting[-1])
            try:
                engine.submit(asked.ask, owner=OWNER, listener=_into(came, asked)).result()
            except Exception as error:
                if not (working and isinstance(error, NoRoom) and error.retry_after < math.inf):
                    waiting.pop()  # this one cannot be answered; others can
                    asked.error = error
                    yield asked
                    continue
            else:
                waiting.pop()
                working, unread = working + 1, asked
        asked, event = came.get()
        seen(asked, event)
        if asked is unread and not (
            isinstance(event, PrefillProgress) and event.done < event.total
        ):
            unread = None
        if isinstance(event, (GeneratedToken, Finished)):
            asked.texts.append(event.text)
        if isinstance(event, (Finished, Failed)):
            working -= 1
            asked.end = event if isinstance(event, Finished) else None
            asked.error = event.error if isinstance(event, Failed) else None
            yield asked


def _into(
    came: "SimpleQueue[tuple[BatchAnswer, GenerationEvent]]", asked: BatchAnswer
) -> Callable[[GenerationEvent], None]:
    def told(event: GenerationEvent) -> None:
        came.put((asked, event))

    return told
