"""A session at work for a command: measured, shown, and closed with a report."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Never

from tqdm import tqdm

from kvkeep import Sampling
from kvkeep.cli.compression import UNCALIBRATED_ARCHIVE, gains_from_calibration
from kvkeep.cli.memory import say_without_prefixes
from kvkeep.cli.options import OutputChoice, given
from kvkeep.cli.output import counted, megabytes, say
from kvkeep.cli.restore import OpenedSession
from kvkeep.cli.screen import Screen
from kvkeep.cli.session_writer import SessionWriter
from kvkeep.errors import KvkeepError
from kvkeep.runtime.memory import peak_rss
from kvkeep.session.streaming import SEAM, TextStream
from kvkeep.storage.files.atomic import write_atomic


@dataclass(frozen=True)
class Report:
    """The fields of the JSON file. Null: not measured, or without meaning for the command.

    prompt_tokens: of prompts, evaluated in this run. reused_tokens: those that came evaluated from
    a file or the prefix cache. prefix_differs_at: the first token at which the nearest prompt in
    the prefix cache differs, where more of it could have been reused. saved_bytes: of the file to
    which the session was saved last. kv_bits, far_bits: in which cells are kept, "8", "8/4" or "4".
    settings: of the policy, such as an archive's method and ratio.
    keep, kv_cells: tokens. kv_bytes: memory that keys and values take at the end. seed: the one
    that was used. finish_reason: "length", "eos", "stop", "end" (of the text or the chat),
    "interrupt" (Ctrl-C), "closed" (the reader of standard output went away) or "error".
    """

    command: str
    model: str
    policy: str
    max_kv_size: int
    keep: int
    settings: dict[str, int | float | str]
    kv_bits: str | None
    far_bits: str | None
    seed: int | None
    prompt_tokens: int
    prefill_tokens_per_s: float | None
    generated_tokens: int
    decode_tokens_per_s: float | None
    peak_rss_bytes: int
    kv_cells: int
    kv_bytes: int
    reused_tokens: int
    prefix_differs_at: int | None
    saved_bytes: int | None
    perplexity: float | None
    finish_reason: str

    def line(self) -> str:
        parts = [
            f"prompt {self.prompt_tokens}{_at(self.prefill_tokens_per_s)}",
            *self._reused(),
            f"generated {self.generated_tokens}{_at(self.decode_tokens_per_s)}",
            f"cells {self.kv_cells} of {self.max_kv_size}, {megabytes(self.kv_bytes)}",
            f"peak RAM {megabytes(self.peak_rss_bytes)}",
            *(["interrupted"] if self.finish_reason == "interrupt" else []),
        ]
        return " | ".join(parts)

    def _reused(self) -> list[str]:
        if not self.reused_tokens and self.prefix_differs_at is None:
            return []
        where = f", first differs at token {self.prefix_differs_at}"
        reused = f"reused {counted(self.reused_tokens, 'token')}"
        return [reused + (where if self.prefix_differs_at else "")]

    def write(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
        write_atomic(path, f"{text}\n".encode())


def _at(rate: float | None) -> str:
    return f" at {rate:,.1f} tok/s" if rate is not None else " tokens"


@dataclass
class Tally:
    """Tokens that went by, and the time that they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds else None


class Run:
    """Feeds and writes with a session, counts what that took, and says so at the end.

    writer: what saves the session; None where nothing does.
    """

    def __init__(
        self,
        command: str,
        opened: OpenedSession,
        output: OutputChoice,
        seed: int | None = None,
    ):
        self.model = opened.model
        self.session = opened.session
        self.output = output
        self.writer: SessionWriter | None = None
        self.prefill, self.decode = Tally(), Tally()
        self.reused = opened.restored
        self.differs_at: int | None = None
        self.perplexity: float | None = None
        self._command, self._seed = command, seed

    def feed(self, ids: Sequence[int]) -> None:
        """Evaluates tokens, under a progress bar where that takes a moment."""
        with self.bar(len(ids), "reading") as bar, self.counting(self.prefill):
            fed = self.session.feed(ids, progress=lambda count: _advance(bar, count))
        self.prefill.tokens -= fed.reused
        self.reused += fed.reused
        if fed.differs_at is not None:
            self.differs_at = fed.differs_at
        if fed.store_error is not None:
            say_without_prefixes(fed.store_error)

    def write(
        self,
        max_tokens: int | None,
        how: Sampling,
        ignore_eos: bool = False,
        on: Screen | None = None,
    ) -> str:
        """Streams text to standard output, ends it with a new line and returns why it ended.

        on: how it is shown there; None for as it is.
        """
        first, screen = len(self.session.tokens), on or Screen()
        with self.counting(self.decode):
            try:
                for piece in self.session.stream(max_tokens, how, ignore_eos):
                    screen.write(piece)
            except KeyboardInterrupt:
                # The last token is in memory; its text must not be missing on the screen.
                tokens = self.session.tokens
                before = tokens[max(0, first - SEAM) : first]
                stream = TextStream(self.model.text, how.stop, before)
                written = stream.all_of(tokens[first:])
                with suppress(OSError):
                    screen.write(written[screen.taken :])
                raise
            finally:
                if not isinstance(sys.exception(), OSError):
                    with suppress(OSError):
                        screen.end()
        return self.session.finish_reason or "length"

    def bar(self, total: int, what: str) -> "tqdm[Never]":
        return tqdm(
            total=total,
            desc=what,
            unit=" tokens",
            unit_scale=True,
            delay=0.3,
            leave=False,
            disable=None if self.output.progress else True,
        )

    @contextmanager
    def counting(self, tally: Tally) -> Iterator[None]:
        before, begun = self.session.cache.time, time.perf_counter()
        try:
            yield
        finally:
            tally.seconds += time.perf_counter() - begun
            tally.tokens += self.session.cache.time - before

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Whatever ends the block early, the report says what was done until then."""
        try:
            yield
        except KeyboardInterrupt:
            self.close("interrupt")
            raise
        except BrokenPipeError:
            self.close("closed")
            raise
        except (KvkeepError, OSError):
            if self.session.cache.time:
                self.close("error")
            raise

    def close(self, finish_reason: str) -> None:
        """Saves the session, where it is kept; then the closing line, and the report file."""
        try:
            # A prompt that failed halfway would only stand in the way of giving it again.
            if self.writer and (finish_reason != "error" or self.decode.tokens):
                self.writer.save()
        finally:
            self._say(self._report(finish_reason))

    def _say(self, report: Report) -> None:
        if not self.output.quiet:
            outcome = self.writer.outcome if self.writer else ""
            say(report.line() + (f" | {outcome}" if outcome else ""))
            if gains_from_calibration(self.session) and not given("method"):
                say(UNCALIBRATED_ARCHIVE)
        if self.output.report is not None:
            report.write(self.output.report)

    def _report(self, finish_reason: str) -> Report:
        session, perplexity = self.session, self.perplexity
        saved = self.writer.saved if self.writer and not self.writer.unsaved else None
        return Report(
            command=self._command,
            model=self.model.name,
            policy=session.policy,
            max_kv_size=session.max_kv_size,
            keep=session.keep,
            settings=session.settings,
            kv_bits=session.bits.kv,
            far_bits=session.bits.far,
            seed=self._seed,
            prompt_tokens=self.prefill.tokens,
            prefill_tokens_per_s=self.prefill.rate,
            generated_tokens=self.decode.tokens,
            decode_tokens_per_s=self.decode.rate,
            peak_rss_bytes=peak_rss(),
            kv_cells=session.cache.cells,
            kv_bytes=session.cache.nbytes,
            reused_tokens=self.reused,
            prefix_differs_at=self.differs_at,
            saved_bytes=saved.bytes if saved else None,
            perplexity=perplexity if perplexity and math.isfinite(perplexity) else None,
            finish_reason=finish_reason,
        )


def _advance(bar: "tqdm[Never]", count: int) -> None:
    bar.update(count)
