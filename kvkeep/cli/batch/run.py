"""The run of a batch in one engine: it prefills prompts one by one, and decodes them together."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvkeep.cli.batch.requests import PreparedRequest
from kvkeep.cli.batch.results import BatchResults
from kvkeep.cli.options import OutputOptions
from kvkeep.cli.output import plural, progress_bar, say
from kvkeep.engine import (
    Engine,
    Failed,
    Finished,
    GeneratedToken,
    GenerationEvent,
    PrefillProgress,
)
from kvkeep.errors import NoRoom
from kvkeep.storage.files.atomic import write_atomic

if TYPE_CHECKING:
    from kvkeep.chat.output_reader import OutputReader

_EXTRA_FIELDS = ("reasoning_content", "tool_calls")  # of a message, in results of another format


@dataclass
class BatchAnswer:
    """A request and its answer so far. If it failed, `error` is set, and `finished` is not."""

    prepared: PreparedRequest
    text: str = ""
    finished: Finished | None = None  # the last event
    error: BaseException | None = None

    @cached_property
    def reader(self) -> "OutputReader | None":
        """The reader of a chat's answer; None for another prompt."""
        return self.prepared.chat.new_reader() if self.prepared.chat else None

    def result_line(self, model: str) -> dict[str, Any]:
        """Return the line for the results file, in OpenAI's format for OpenAI requests."""
        request = self.prepared.request
        digest_field = {"request": request.digest}
        if self.finished is None:
            error = {"code": type(self.error).__name__, "message": str(self.error)}
            id_field = {"custom_id": request.id} if request.is_openai else {"id": request.id}
            return {**id_field, "response": None, "error": error, **digest_field}
        message = self._message()
        finish_reason = "stop" if self.finished.reason in ("eos", "stop") else "length"
        if finish_reason == "stop" and self.reader and self.reader.output.calls_to_run:
            finish_reason = "tool_calls"
        usage = {
            "prompt_tokens": self.finished.usage.prompt,
            "completion_tokens": self.finished.usage.generated,
            "total_tokens": self.finished.usage.prompt + self.finished.usage.generated,
            "prompt_tokens_details": {"cached_tokens": self.finished.usage.reuse.tokens},
        }
        if not request.is_openai:
            extras = {key: message[key] for key in _EXTRA_FIELDS if key in message}
            text = {"text": message["content"] or ""}
            answer = {**text, **extras, "finish_reason": finish_reason, "usage": usage}
            return {"id": request.id, **answer, **digest_field}
        content = {"message": message} if request.is_chat else {"text": self.text}
        body = {
            "id": f"chatcmpl-{request.digest}",
            "created": int(time.time()),
            "model": model,
            "object": "chat.completion" if request.is_chat else "text_completion",
            "choices": [{"index": 0, **content, "finish_reason": finish_reason}],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": request.digest, "body": body}
        ids = {"id": f"batch_req_{request.digest}", "custom_id": request.id}
        return {**ids, "response": response, "error": None, **digest_field}

    def append(self, event: GeneratedToken | Finished) -> None:
        """Append the text of an event."""
        self.text += event.text
        if reader := self.reader:
            reader.push(event.pieces if isinstance(event, GeneratedToken) else [event.text])
            if isinstance(event, Finished):
                reader.finish()

    def _message(self) -> dict[str, Any]:
        """Return the answer as OpenAI's message: its text, reasoning and calls."""
        from kvkeep.chat.openai_chat import format_output

        if self.reader is None:
            return {"role": "assistant", "content": self.text}
        return format_output(self.reader.output)


@dataclass
class BatchReport:
    """The numbers of a batch, for the closing line and the report file."""

    requests: int
    before: int  # answers of an earlier run
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    accepted_tokens: int = 0  # of `drafted_tokens`, those that were sampled
    drafted_tokens: int = 0
    seconds: float = 0.0
    finish_reason: str = "end"

    def count(self, answer: BatchAnswer) -> None:
        """Count the prompt's tokens. A failed answer is counted, and its error printed."""
        if answer.finished is None:
            self.failed += 1
            say(f"{answer.prepared.request.location}: {answer.error}")
        else:
            self.prompt_tokens += answer.finished.usage.prompt
            self.reused_tokens += answer.finished.usage.reuse.tokens
            self.accepted_tokens += answer.finished.usage.drafts.accepted
            self.drafted_tokens += answer.finished.usage.drafts.drafted

    def closing_line(self) -> str:
        total = f"{self.before + self.answered} of {plural(self.requests, 'answer')}"
        failed = f", {self.failed} failed" if self.failed else ""
        rate = f" at {self.generated_tokens / self.seconds:,.1f} tok/s" if self.seconds else ""
        accepted, drafted = self.accepted_tokens, self.drafted_tokens
        drafts = f", {accepted} of {drafted} drafted" if drafted else ""
        return (
            f"{total}{failed} | prompts {self.prompt_tokens} tokens, {self.reused_tokens} reused | "
            f"generated {self.generated_tokens}{rate}{drafts} | {self.seconds:,.1f} s"
        )

    def close(self, output: OutputOptions) -> None:
        """Write the report and print the closing line."""
        if output.report is not None:
            text = json.dumps({"command": "batch", **asdict(self)}, indent=2)
            write_atomic(output.report, f"{text}\n".encode())
        if not output.quiet:
            say(self.closing_line())


def say_warnings(requests: Sequence[PreparedRequest]) -> None:
    """Print what of the requests is not followed: each warning once, with its first request."""
    prepared = [(request, request.chat.warnings if request.chat else ()) for request in requests]
    counts = Counter(warning for _, warnings in prepared for warning in set(warnings))
    for request, warnings in prepared:
        for warning in warnings:
            if count := counts.pop(warning, 0):
                others = f" (and {plural(count - 1, 'other request')})" if count > 1 else ""
                say(f"{request.request.location}{others}: {warning}")


def run_batch(
    engine: Engine,
    requests: Sequence[PreparedRequest],
    max_running: int,
    results: BatchResults,
    report: BatchReport,
    output: OutputOptions,
) -> None:
    """Answer the requests, `max_running` at a time. Each complete answer is written to disk."""
    start = time.perf_counter()
    bar = progress_bar(report.requests, output.progress, initial=report.before, unit=" answers")
    try:
        with bar:
            for answer in _complete_answers(engine, requests, max_running, report):
                results.add(answer.result_line(engine.model.name))
                report.count(answer)
                bar.update()
    except KeyboardInterrupt:
        report.finish_reason = "interrupt"
        raise
    finally:
        report.seconds, report.answered = time.perf_counter() - start, results.new_answers
        if report.finish_reason == "interrupt":
            report.close(output)
            say(results.hint_to_continue)


def _complete_answers(
    engine: Engine, requests: Sequence[PreparedRequest], max_running: int, report: BatchReport
) -> Iterator[BatchAnswer]:
    """Yield each answer when it is complete or has failed; count generated tokens in the report.

    Prompts are sorted and submitted one by one, each once the one before is prefilled, so that it
    reuses their common prefix. This costs no time: the engine prefills one prompt at a time.
    """
    # `pop` takes the end
    waiting = sorted(requests, key=lambda r: r.generation_request.prompt, reverse=True)
    events = SimpleQueue[tuple[BatchAnswer, GenerationEvent]]()
    running, prefilling_answer = 0, None

    def listener_for(answer: BatchAnswer) -> Callable[[GenerationEvent], None]:
        return lambda event: events.put((answer, event))

    while waiting or running:
        if waiting and prefilling_answer is None and running < max_running:
            answer = BatchAnswer(waiting[-1])
            try:
                request = waiting[-1].constrained_request()
                engine.submit(request, listener=listener_for(answer)).result()
            except Exception as error:
                if not (running and isinstance(error, NoRoom) and error.retry_after < math.inf):
                    waiting.pop()  # this request cannot be answered; others can
                    answer.error = error
                    yield answer
                    continue
            else:
                waiting.pop()
                running, prefilling_answer = running + 1, answer
        answer, event = events.get()  # waits
        if answer is prefilling_answer and not (
            isinstance(event, PrefillProgress) and event.done < event.total
        ):
            prefilling_answer = None
        report.generated_tokens += isinstance(event, GeneratedToken)
        if isinstance(event, (GeneratedToken, Finished)):
            answer.append(event)
        if isinstance(event, (Finished, Failed)):
            running -= 1
            answer.finished = event if isinstance(event, Finished) else None
            answer.error = event.error if isinstance(event, Failed) else None
            yield answer
