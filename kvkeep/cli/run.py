"""The run of a command in one session: prefill, generation, saving, and the closing statistics."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Never

from tqdm import tqdm

from kvkeep import Sampling
from kvkeep.cli.compression import UNCALIBRATED_ARCHIVE_HINT, gains_from_calibration
from kvkeep.cli.memory import warn_prefix_cache_off
from kvkeep.cli.options import OutputOptions, is_given
from kvkeep.cli.output import TextPrinter, format_mb, plural, progress_bar, say
from kvkeep.cli.session_file import OpenedSession, SessionWriter
from kvkeep.errors import KvkeepError
from kvkeep.runtime.memory import peak_rss_bytes
from kvkeep.session.streaming import CONTEXT_TOKENS, TextStream
from kvkeep.storage.files.atomic import write_atomic


@dataclass
class Throughput:
    tokens: int = 0  # evaluated in `seconds`
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds else None


@dataclass(frozen=True)
class AnswerDisplay:
    """The text of an answer in another form than the model's.

    pieces: generates it. text_of: returns all of it, of pieces as of `TextStream.push_pieces`.
    """

    pieces: Iterator[str]
    text_of: Callable[[Sequence[str | int]], str]


class SessionRun:
    """The session of a command: it is measured, saved at the end, and reported on."""

    def __init__(
        self, command: str, opened: OpenedSession, output: OutputOptions, seed: int | None = None
    ):
        self.model, self.session, self.output = opened.model, opened.session, output
        self.writer: SessionWriter | None = None  # None: the session is not saved
        self.prefill, self.decode = Throughput(), Throughput()
        self.reused_tokens = opened.restored_tokens  # from a file and the prefix cache
        self.prefix_unusable_tokens = 0
        self.prefix_differs_at: int | None = None  # see `_summary`
        self.perplexity: float | None = None  # set by `kvkeep perplexity`
        self.details: dict[str, Any] = {}  # of the command, which the report has besides
        self.accepted_tokens, self.drafted_tokens = 0, 0  # see `Session.speculated`
        self._command, self._seed = command, seed

    def feed(self, ids: Sequence[int]) -> None:
        """Prefill tokens, with a progress bar."""
        with self.token_progress_bar(len(ids), "reading") as bar, self.measuring(self.prefill):

            def report_progress(token_count: int) -> None:
                bar.update(token_count)

            result = self.session.feed(ids, progress=report_progress)
        self.prefill.tokens -= result.reused
        self.reused_tokens += result.reused
        self.prefix_unusable_tokens += result.stored - result.reused
        if result.differs_at is not None:
            self.prefix_differs_at = result.differs_at
        if result.store_error is not None:
            warn_prefix_cache_off(result.store_error)

    def generate(
        self,
        max_tokens: int | None,
        sampling: Sampling,
        ignore_eos: bool = False,
        printer: TextPrinter | None = None,
        display: AnswerDisplay | None = None,
        speculate: bool = False,
    ) -> str:
        """Generate text and print it, by default unchanged; return the finish reason."""
        start, printer = len(self.session.tokens), printer or TextPrinter()
        stream = self.session.stream(max_tokens, sampling, ignore_eos, speculate)
        pieces, text_of = (display.pieces, display.text_of) if display else (stream, _text_of)
        with self.measuring(self.decode):
            try:
                for piece in pieces:
                    printer.write(piece)
            except KeyboardInterrupt:
                # The last token is in the cache, so its text must be printed, too.
                text = text_of(self.pieces(start, len(self.session.tokens), sampling.stop))
                with suppress(OSError):
                    printer.write(text[printer.written_characters :])
                raise
            finally:
                accepted, drafted = self.session.speculated
                self.accepted_tokens += accepted
                self.drafted_tokens += drafted
                if not isinstance(sys.exception(), OSError):
                    with suppress(OSError):
                        printer.end()
        return self.session.finish_reason or "length"

    def pieces(self, start: int, end: int, stop: tuple[str, ...] = ()) -> list[str | int]:
        """Return the text of tokens `start ... end - 1`, with the ids of control tokens in it."""
        tokens = self.session.tokens
        context = tokens[max(0, start - CONTEXT_TOKENS) : start]
        stream = TextStream(self.model.text, stop, context)
        pieces = [piece for token in tokens[start:end] for piece in stream.push_pieces(token)]
        return [*pieces, stream.flush()]

    def token_progress_bar(self, total: int, label: str) -> "tqdm[Never]":
        """Return a progress bar over tokens; it appears after 0.3 s."""
        return progress_bar(
            total,
            self.output.progress,
            desc=label,
            unit=" tokens",
            unit_scale=True,
            delay=0.3,
            leave=False,
        )

    @contextmanager
    def measuring(self, throughput: Throughput) -> Iterator[None]:
        """Add the tokens and seconds of the block to a throughput."""
        # `cache.time` is the number of tokens evaluated so far.
        start_tokens, start_seconds = self.session.cache.time, time.perf_counter()
        try:
            yield
        finally:
            throughput.seconds += time.perf_counter() - start_seconds
            throughput.tokens += self.session.cache.time - start_tokens

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Close the run if an interrupt or an error ends the block; then re-raise it."""
        try:
            yield
        except KeyboardInterrupt:
            self.close("interrupt")
            raise
        except BrokenPipeError:
            self.close("closed")
            raise
        except (KvkeepError, OSError):
            if self.session.cache.time:  # else nothing was evaluated
                self.close("error")
            raise

    def close(self, finish_reason: str) -> None:
        """Save the session, print the closing line and write the report file."""
        try:
            # A prompt that failed halfway is not saved, so that it can be given again.
            if self.writer and (finish_reason != "error" or self.decode.tokens):
                self.writer.save()
        finally:
            self._report(finish_reason)

    def _report(self, finish_reason: str) -> None:
        summary = self._summary(finish_reason)
        if not self.output.quiet:
            save_outcome = self.writer.save_outcome if self.writer else ""
            say(_closing_line(summary) + (f" | {save_outcome}" if save_outcome else ""))
            if gains_from_calibration(self.session) and not is_given("method"):
                say(UNCALIBRATED_ARCHIVE_HINT)
        if self.output.report is not None:
            text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False)
            write_atomic(self.output.report, f"{text}\n".encode())

    def _summary(self, finish_reason: str) -> dict[str, Any]:
        """Return the closing numbers; None if not measured, or not applicable to the command.

        settings: the policy's own. prompt_tokens: evaluated in this run. reused_tokens: from a file
        or the prefix cache. prefix_differs_at: the first token that differs from the nearest cached
        prompt, if more could have been reused. prefix_unusable_tokens: in the cache, but after the
        newest checkpoint that the model needs, and evaluated again. finish_reason: "length", "eos",
        "stop", "end" (of the text or the chat), "interrupt" (Ctrl-C), "closed" (standard output) or
        "error". accepted_tokens, drafted_tokens: see `Session.speculated`.
        """
        session, writer, perplexity = self.session, self.writer, self.perplexity
        return {
            "command": self._command,
            "model": self.model.name,
            "policy": session.policy,
            "max_kv_size": session.max_kv_size,
            "keep": session.keep,
            "settings": session.settings,
            "kv_bits": session.bits.kv,
            "far_bits": session.bits.far,
            "seed": self._seed,
            "prompt_tokens": self.prefill.tokens,
            "prefill_tokens_per_s": self.prefill.tokens_per_s,
            "generated_tokens": self.decode.tokens,
            "decode_tokens_per_s": self.decode.tokens_per_s,
            "accepted_tokens": self.accepted_tokens,
            "drafted_tokens": self.drafted_tokens,
            "peak_rss_bytes": peak_rss_bytes(),
            "kv_cells": session.cache.cells,
            "kv_bytes": session.cache.nbytes,
            "reused_tokens": self.reused_tokens,
            "prefix_differs_at": self.prefix_differs_at,
            "prefix_unusable_tokens": self.prefix_unusable_tokens,
            "saved_bytes": None if writer is None or writer.is_unsaved else writer.saved_bytes,
            "perplexity": perplexity if perplexity and math.isfinite(perplexity) else None,
            **self.details,
            "finish_reason": finish_reason,
        }


def _text_of(pieces: Sequence[str | int]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


def _closing_line(summary: Mapping[str, Any]) -> str:
    parts = [f"prompt {summary['prompt_tokens']}{_rate_text(summary['prefill_tokens_per_s'])}"]
    prefix_counts = ("reused_tokens", "prefix_unusable_tokens")
    if any(map(summary.get, prefix_counts)) or summary["prefix_differs_at"] is not None:
        differs_at = summary["prefix_differs_at"]
        differs_text = f", first differs at token {differs_at}" if differs_at else ""
        unusable = summary["prefix_unusable_tokens"]
        checkpoint_text = f", {unusable} more have no checkpoint" if unusable else ""
        reused_text = plural(summary["reused_tokens"], "token")
        parts.append(f"reused {reused_text}{checkpoint_text}{differs_text}")
    cells = f"cells {summary['kv_cells']} of {summary['max_kv_size']}"
    drafted = summary["drafted_tokens"]
    accepted_text = f", {summary['accepted_tokens']} of {drafted} drafted" if drafted else ""
    rate_text = _rate_text(summary["decode_tokens_per_s"])
    parts += [
        f"generated {summary['generated_tokens']}{rate_text}{accepted_text}",
        f"{cells}, {format_mb(summary['kv_bytes'])}",
        f"peak RAM {format_mb(summary['peak_rss_bytes'])}",
    ]
    if summary["finish_reason"] == "interrupt":
        parts.append("interrupted")
    return " | ".join(parts)


def _rate_text(rate: float | None) -> str:
    return f" at {rate:,.1f} tok/s" if rate is not None else " tokens"
