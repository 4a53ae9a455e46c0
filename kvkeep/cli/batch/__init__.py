"""`kvkeep batch`: generate answers to many prompts at once, into a JSONL file."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.memory import (
    MemoryChoice,
    PrefixChoice,
    keep_option,
    memory_options,
    prefix_options,
    uses_prefixes,
)
from kvkeep.cli.options import (
    OutputChoice,
    SamplingChoice,
    integer_option,
    nbytes,
    output_options,
    sampling_options,
)
from kvkeep.cli.output import counted, say, shown_bytes
from kvkeep.cli.store import store_option
from kvkeep.errors import InvalidArgument

if TYPE_CHECKING:
    from kvkeep import Model
    from kvkeep.cli.batch.requests import BatchRequest
    from kvkeep.cli.batch.results import Results
    from kvkeep.cli.batch.run import BatchAnswer
    from kvkeep.engine import Engine, GenerationEvent, GenerationRequest


@click.command()
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--each",
    "folder",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Ask of each file in a folder, in the place of FILE.",
)
@click.option("--ask", "question", metavar="TEXT", help="Of --each: what is asked of each file.")
@click.option("--system", metavar="TEXT", help="Of --each: the system prompt.")
@click.option(
    "-o",
    "--out",
    metavar="FILE.jsonl",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where answers go; those that are there are not asked for again.",
)
@click.option("--again", is_flag=True, help="Begin anew, whatever is there.")
@integer_option("-n", "--max-tokens", minimum=1, default=256, help="Of an answer.")
@integer_option("--at-once", minimum=1, default=16, help="Answers written together.")
@click.option(
    "--memory-bytes",
    metavar="SIZE",
    type=nbytes,
    default="4GB",
    help="For the cells of all of them.",
)
@memory_options(keep_option("First tokens kept."))
@store_option
@prefix_options
@sampling_options
@output_options
def batch(
    file: Path | None,
    folder: Path | None,
    question: str | None,
    system: str | None,
    out: Path,
    again: bool,
    max_tokens: int,
    at_once: int,
    memory_bytes: int,
    memory: MemoryChoice,
    prefixes: PrefixChoice,
    sampling: SamplingChoice,
    output: OutputChoice,
) -> None:
    """Answer many prompts: those of FILE.jsonl, or one about each file of a folder.

    A line is {"prompt": "..."} or {"messages": [...]}, with an "id", "max_tokens", "temperature"
    and the like if wanted; or a line of an OpenAI batch, which is answered in that form. What
    prompts have in common is evaluated once, and answers are written together. Each is on disk as
    soon as it is whole: the same command goes on where an earlier one was stopped.
    """
    if (file is None) == (folder is None) or (folder is None) != (question is None):
        raise InvalidArgument("give FILE.jsonl, or --each FOLDER with --ask TEXT")
    output.check()
    sampling.resolve()
    memory.check()
    from kvkeep.cli.batch.requests import read_folder, read_jsonl
    from kvkeep.cli.batch.results import open_results

    if file is not None:
        requests = read_jsonl(file)
    else:
        assert folder is not None
        assert question is not None
        requests = read_folder(folder, question, system)
    with open_results(out, requests, again) as results:
        remaining = [request for request in requests if request.digest not in results.done]
        job = _BatchJob(results, len(requests), len(remaining), output)
        if remaining:
            model = memory.load(output.progress)
            resolved = sampling.resolve(saved_seed=0)  # so that a resumed batch samples the same
            asks = [(r, r.ask(model, resolved, max_tokens)) for r in remaining]
            _require_room(model, memory, [ask for _, ask in asks], memory_bytes)
            with _engine(model, memory, prefixes, memory_bytes, at_once) as engine:
                job.run(engine, asks, at_once)
        job.close()


def _engine(
    model: "Model", memory: MemoryChoice, prefixes: PrefixChoice, nbytes: int, at_once: int
) -> "Engine":
    from kvkeep.engine import Engine, Limits

    store = prefixes.store(model) if uses_prefixes(memory, prefixes.prefix_cache) else None
    return Engine(
        model,
        settings=memory.settings(model),
        limits=Limits(memory=nbytes, running=at_once, running_per_owner=at_once),
        stores=None if store is None else lambda owner: store,
    )


def _require_room(
    model: "Model", memory: MemoryChoice, asks: "Sequence[GenerationRequest]", nbytes: int
) -> None:
    """Raise InvalidArgument if not even the smallest request fits in the memory."""
    from kvkeep.engine.record import max_session_bytes

    tokens = min(len(ask.prompt) + (ask.max_tokens or 0) for ask in asks)
    needed = max_session_bytes(memory.session(model), tokens)
    if needed > nbytes:
        raise InvalidArgument(
            f"the smallest request takes up to {shown_bytes(needed)}, and --memory-bytes is "
            f"{shown_bytes(nbytes)}: give --memory-bytes {shown_bytes(needed)} or more"
        )


@dataclass
class BatchReport:
    """The closing numbers of a batch.

    requests: in all. before: those answered by an earlier run. seconds: of this run.
    """

    requests: int
    before: int
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    finish_reason: str = "end"

    def line(self) -> str:
        done = f"{self.before + self.answered} of {counted(self.requests, 'answer')}"
        failed = f", {self.failed} failed" if self.failed else ""
        rate = f" at {self.generated_tokens / self.seconds:,.1f} tok/s" if self.seconds else ""
        return (
            f"{done}{failed} | prompts {self.prompt_tokens} tokens, {self.reused_tokens} reused | "
            f"generated {self.generated_tokens}{rate} | {self.seconds:,.1f} s"
        )


class _BatchJob:
    """The requests of this run: progress, results and counts."""

    def __init__(self, results: "Results", requests: int, remaining: int, output: OutputChoice):
        self._results, self._output = results, output
        self._report = BatchReport(requests, requests - remaining)

    def run(
        self, engine: "Engine", asks: "list[tuple[BatchRequest, GenerationRequest]]", at_once: int
    ) -> None:
        from tqdm import tqdm

        from kvkeep.cli.batch.run import answers

        report, begun = self._report, time.perf_counter()
        bar = tqdm(
            total=report.requests,
            initial=report.before,
            unit=" answers",
            disable=None if self._output.progress else True,
        )
        try:
            with bar:
                for answer in answers(engine, asks, at_once, self._count_token):
                    self._results.add(answer.line(engine.model.name))
                    self._count(answer)
                    bar.update()
        except KeyboardInterrupt:
            report.finish_reason = "interrupt"
            raise
        finally:
            report.seconds = time.perf_counter() - begun
            if report.finish_reason == "interrupt":
                self.close()
                say("the same command goes on from here")

    def _count_token(self, answer: "BatchAnswer", event: "GenerationEvent") -> None:
        from kvkeep.engine import GeneratedToken

        self._report.generated_tokens += isinstance(event, GeneratedToken)

    def _count(self, answer: "BatchAnswer") -> None:
        report = self._report
        if answer.end is None:
            report.failed += 1
            say(f"{answer.request.where}: {answer.error}")
            return
        report.prompt_tokens += answer.end.usage.prompt
        report.reused_tokens += answer.end.usage.reuse.tokens

    def close(self) -> None:
        """Write the report and print the closing line.

        Raises InvalidArgument if any request failed.
        """
        self._report.answered = self._results.added
        if self._output.report is not None:
            from kvkeep.storage.files.atomic import write_atomic

            text = json.dumps({"command": "batch", **asdict(self._report)}, indent=2)
            write_atomic(self._output.report, f"{text}\n".encode())
        if not self._output.quiet:
            say(self._report.line())
        if self._report.failed:
            raise InvalidArgument(f"{counted(self._report.failed, 'request')} failed; see above")
