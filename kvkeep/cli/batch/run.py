"""Running of a batch in one engine: prompts prefilled one by one, answers decoded together."""

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
    """A request and its answer so far.

    end: the final event; None while the request runs, or if it failed, with `error`.
    """

    request: BatchRequest
    ask: GenerationRequest
    texts: list[str] = field(default_factory=list)
    end: Finished | None = None
    error: BaseException | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def line(self, model: str) -> dict[str, Any]:
        """Return the request's line in the results file, in OpenAI's format if it came in that."""
        request, digest = self.request, {"request": self.request.digest}
        if self.end is None:
            error = {"code": type(self.error).__name__, "message": str(self.error)}
            name = {"custom_id": request.name} if request.openai else {"id": request.name}
            return {**name, "response": None, "error": error, **digest}
        usage = self._usage()
        if not request.openai:
            reason = {"finish_reason": self._reason}
            return {"id": request.name, "text": self.text, **reason, "usage": usage, **digest}
        body = {"id": f"chatcmpl-{request.digest}", "created": int(time.time()), "model": model}
        content = {"message": {"role": "assistant", "content": self.text}}
        choice = {"index": 0, **(content if request.chat else {"text": self.text})}
        body["object"] = "chat.completion" if request.chat else "text_completion"
        body["choices"] = [{**choice, "finish_reason": self._reason}]
        body["usage"] = usage
        response = {"status_code": 200, "request_id": request.digest, "body": body}
        head = {"id": f"batch_req_{request.digest}", "custom_id": request.name}
        return {**head, "response": response, "error": None, **digest}

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
    on_event: Callable[[BatchAnswer, GenerationEvent], None],
) -> Iterator[BatchAnswer]:
    """Yield each answer when it is complete or has failed.

    on_event: called for every event of every request. A prompt is submitted when the one before it
    is prefilled: it can then reuse their common prefix, and no time is lost since the engine
    prefills one prompt at a time. Requests are sorted so that common prefixes are adjacent.
    """
    waiting = sorted(requests, key=lambda pair: pair[1].prompt, reverse=True)
    events = SimpleQueue[tuple[BatchAnswer, GenerationEvent]]()
    running, prefilling = 0, None
    while waiting or running:
        if waiting and prefilling is None and running < at_once:
            answer = BatchAnswer(*waiting[-1])
            try:
                engine.submit(answer.ask, owner=OWNER, listener=_listener(events, answer)).result()
            except Exception as error:
                if not (running and isinstance(error, NoRoom) and error.retry_after < math.inf):
                    waiting.pop()  # this request cannot be answered; others can
                    answer.error = error
                    yield answer
                    continue
            else:
                waiting.pop()
                running, prefilling = running + 1, answer
        answer, event = events.get()
        on_event(answer, event)
        if answer is prefilling and not (
            isinstance(event, PrefillProgress) and event.done < event.total
        ):
            prefilling = None
        if isinstance(event, (GeneratedToken, Finished)):
            answer.texts.append(event.text)
        if isinstance(event, (Finished, Failed)):
            running -= 1
            answer.end = event if isinstance(event, Finished) else None
            answer.error = event.error if isinstance(event, Failed) else None
            yield answer


def _listener(
    events: "SimpleQueue[tuple[BatchAnswer, GenerationEvent]]", answer: BatchAnswer
) -> Callable[[GenerationEvent], None]:
    """Return a listener that puts a request's events into the queue."""

    def listener(event: GenerationEvent) -> None:
        events.put((answer, event))

    return listener
