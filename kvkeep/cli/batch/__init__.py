"""`kvkeep batch`: generate answers to many prompts at once, into a JSONL file."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli import options
from kvkeep.cli.batch.requests import read_folder, read_jsonl
from kvkeep.cli.batch.results import open_results
from kvkeep.cli.memory import (
    EVICTING_POLICIES,
    SessionOptions,
    keep_option,
    session_options,
)
from kvkeep.cli.model_options import absolute_name
from kvkeep.cli.output import format_size, plural
from kvkeep.errors import InvalidArgument
from kvkeep.models.hub.source import files_digest

if TYPE_CHECKING:
    from kvkeep import Model
    from kvkeep.engine import Engine, GenerationRequest


@options.command()
@click.argument(
    "file",
    required=False,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
)
def batch(
    file: Path | None,
    folder: Path | None = options.option(
        "--each",
        metavar="FOLDER",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Make one request for each file in a folder, instead of FILE.",
    ),
    question: str | None = options.option(
        "--ask", metavar="TEXT", help="For --each: the question about each file."
    ),
    system: str | None = options.option(metavar="TEXT", help="For --each: the system prompt."),
    out: Path = options.option(
        "-o",
        metavar="FILE.jsonl",
        required=True,
        type=click.Path(dir_okay=False, path_type=Path),
        help="Output file; requests already answered in it are skipped.",
    ),
    again: bool = options.option(is_flag=True, help="Answer all requests again."),
    max_tokens: int = options.integer_option(
        "-n", default=256, help="Maximum tokens of an answer."
    ),
    at_once: int = options.integer_option(default=16, help="Requests decoded together."),
    memory_bytes: int = options.size_option(
        "--memory", "--memory-bytes", default="4GB", help="Memory for the KV cache of all requests."
    ),
    speculate: bool = options.SPECULATE_OPTION,
    settings: SessionOptions = session_options(keep_option()),
    output: options.OutputOptions = options.OUTPUT_OPTIONS,
) -> None:
    """Answer many prompts: the lines of FILE.jsonl ("-": standard input), or one prompt for each
    file of a folder.

    A line is {"prompt": "..."} or {"messages": [...]}, with optional fields such as "id",
    "max_tokens" and "temperature", or a line of an OpenAI batch, which is answered in OpenAI's
    format. Common prefixes of prompts are prefilled once, and answers are decoded together. Each
    answer is written to disk when it is complete; the same command resumes an interrupted batch.
    """
    if (file is None) == (folder is None) or (folder is None) != (question is None):
        raise InvalidArgument("give FILE.jsonl, or --each FOLDER with --ask TEXT")
    output.check()
    settings.check()
    if options.is_in_command_line("store") and not settings.prefixes.prefix_cache:
        raise InvalidArgument("--store of a batch is for its prefix cache: add --prefix-cache")
    if file is not None:
        if out.exists() and file.exists() and out.samefile(file):
            raise InvalidArgument(f"-o {out} is the file with the requests: name another one")
        requests = read_jsonl(file)
    else:
        assert folder is not None
        assert question is not None
        own_files = (out,) if output.report is None else (out, output.report)
        requests = read_folder(folder, question, system, leave_out=own_files)
    from kvkeep.cli.batch.run import BatchReport, run_batch, say_warnings

    with open_results(out, requests, _digests(settings, max_tokens), again) as results:
        remaining = [r for r in requests if r.digest not in results.answered_digests]
        report = BatchReport(len(requests), before=len(requests) - len(remaining))
        if remaining:
            model = settings.memory.load(output.progress)
            # With a fixed seed, so that a resumed batch samples the same.
            sampling = settings.sampling.resolve(model.default_sampling, saved_seed=0)
            prepared = [request.prepare(model, sampling, max_tokens) for request in remaining]
            if not output.quiet:
                say_warnings(prepared)
            generation_requests = [request.generation_request for request in prepared]
            _require_memory(model, settings, generation_requests, memory_bytes)
            with _open_engine(model, settings, memory_bytes, at_once, speculate) as engine:
                run_batch(engine, prepared, at_once, results, report, output)
        report.close(output)
        if report.failed:
            raise InvalidArgument(f"{plural(report.failed, 'request')} failed; see above")


def _digests(settings: SessionOptions, max_tokens: int) -> dict[str, str]:
    """Return digests of the options that answers depend on, and of the model's own files."""
    memory = asdict(settings.memory)
    ignored = ["model", "device", "checkpoint_bytes"]
    if settings.memory.policy not in EVICTING_POLICIES:
        ignored.append("max_kv_size")  # a request that did not fit is tried again with more
    if settings.memory.kv_bits is None and settings.memory.far_bits is None:
        ignored.append("prefill_step")
    for name in ignored:
        del memory[name]
    name = absolute_name(settings.memory.model)
    options_json = json.dumps(
        [name, asdict(settings.sampling), max_tokens, memory], sort_keys=True, default=str
    )
    digest = hashlib.sha256(options_json.encode(errors="surrogateescape")).hexdigest()[:24]
    model_files = files_digest(name)
    return {"options": digest} | ({} if model_files is None else {"model_files": model_files})


def _open_engine(
    model: "Model", settings: SessionOptions, max_bytes: int, max_running: int, speculate: bool
) -> "Engine":
    from kvkeep.engine import Engine, Limits
    from kvkeep.session.drafts import SpeculationOptions

    store = settings.open_prefix_cache(model)
    return Engine(
        model,
        settings=settings.memory.settings(model),
        limits=Limits(memory=max_bytes, running=max_running, running_per_owner=max_running),
        stores=None if store is None else lambda owner: store,
        # All answers together should be done soon; nothing waits for a single token.
        speculation=SpeculationOptions(speculate, max_delay=None),
    )


def _require_memory(
    model: "Model", settings: SessionOptions, requests: "list[GenerationRequest]", max_bytes: int
) -> None:
    """Raise InvalidArgument if even the smallest request needs more than `max_bytes`."""
    from kvkeep.engine.memory_bound import max_session_bytes

    token_count = min(len(request.prompt) + (request.max_tokens or 0) for request in requests)
    needed = max_session_bytes(settings.memory.new_session(model), token_count)
    if needed > max_bytes:
        raise InvalidArgument(
            f"the smallest request needs up to {format_size(needed)}, and --memory is "
            f"{format_size(max_bytes)}: use --memory {format_size(needed)} or more"
        )
