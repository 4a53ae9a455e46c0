"""Measuring of recall: samples are compressed and asked; results are printed and reported."""

import dataclasses
import statistics
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from kvkeep import Calibration, Model
from kvkeep.cli.compression import load_calibration_file
from kvkeep.cli.evaluate.options import ModelOptions, RecallOptions
from kvkeep.cli.options import OutputOptions
from kvkeep.cli.output import format_mb, progress_bar, say
from kvkeep.errors import KvkeepError
from kvkeep.evaluate import recall
from kvkeep.evaluate.datasets import Dataset
from kvkeep.evaluate.plots import draw_recall
from kvkeep.evaluate.samples import Sample
from kvkeep.runtime.memory import peak_rss_bytes
from kvkeep.storage.files.atomic import write_atomic, write_json


@dataclass
class RecallRun:
    """The measuring of a dataset by a command. settings: task settings, for the report."""

    command: str
    dataset: Dataset
    settings: dict[str, Any]
    model: Model
    model_options: ModelOptions
    options: RecallOptions
    ratio: float
    output: OutputOptions
    results: list[recall.RecallResult] = field(default_factory=list)
    method: str = field(init=False)
    calibration: Calibration | None = field(init=False, default=None)  # the one in use

    def run(self) -> None:
        """Measure and print all samples, then report. After an error, report what there is."""
        calibration = load_calibration_file(self.model_options.calibration, self.model)
        options = self.options
        self.method = options.method or recall.default_method(
            self.model, calibration, options.streaming
        )
        self.calibration = recall.used_calibration(self.model, self.method, calibration)
        compression = recall.CompressionSettings(
            self.method, self.ratio, options.seed, self.calibration, options.max_kv_size
        )
        try:
            self._measure(compression)
        except (KeyboardInterrupt, KvkeepError, OSError) as error:
            self._finish(_finish_reason(error))
            raise
        self._finish("end")

    def _measure(self, compression: recall.CompressionSettings) -> None:
        streaming, total = self.options.streaming, self.options.sample_count
        measure = recall.measure_streaming_compression if streaming else recall.measure_compression
        progress = self.output.progress
        with progress_bar(total, progress, desc="measuring", unit=" samples", leave=False) as bar:
            for index in range(total):
                sample = self.dataset.sample(index)
                if total == 1:
                    self._print_sample(sample, compression)
                # A different seed for each sample, or random methods would pick the same cells.
                settings = dataclasses.replace(compression, seed=self.options.seed + index)
                result = measure(self.model, sample, settings, self.model_options.prefill_step)
                self.results.append(result)
                self._print_result(result)
                bar.update(1)

    def _print_sample(self, sample: Sample, compression: recall.CompressionSettings) -> None:
        """Print the sizes and the hidden facts, in the format of llama.cpp's passkey example."""
        encode, text = self.model.text.encode, sample.text
        num_tokens = len(encode(text))
        num_question_tokens = max(len(encode(fact.question + fact.answer)) for fact in sample.facts)
        num_cells = self.model.spec.max_positions
        if self.options.streaming:
            num_cells = compression.budget_cells(num_tokens)
        _print(
            f"n_len = {num_tokens + num_question_tokens + recall.EXTRA_TOKENS}, "
            f"n_ctx = {num_cells}, ratio = {self.ratio:g}, method = {self.method}"
        )
        for fact in sample.facts:
            token_index = len(encode(text[: text.index(fact.sentence)]))
            _print(f"{self.command} = {fact.answer}, at token {token_index}")
        _print(f"position {sample.position} / {sample.position_count}")

    def _print_result(self, result: recall.RecallResult) -> None:
        """Print one line if there are several samples, or else details."""
        sample, compressed, full = result.sample, result.compressed, result.uncompressed
        if self.options.sample_count > 1:
            answers = ", ".join(fact.answer for fact in sample.facts)
            position = f"{answers} at {sample.position} of {sample.position_count}"
            cells = f"{result.tokens:,} -> {compressed.cells:,} cells"
            _print(f"{len(self.results):3d}: {position}, {cells}: {_outcome(result)}")
            return
        full_size = f"{format_mb(full.nbytes)} -> " if full else ""
        size = format_mb(compressed.nbytes)
        _print(f"cells {result.tokens} -> {compressed.cells}, {full_size}{size}")
        for index, chunk in enumerate(result.chunks):
            _print(
                f"chunk {index}: cells {chunk.cells_before} -> {chunk.cells_after}, "
                f"merged {chunk.merged:.1f}, {chunk.seconds * 1000:.1f} ms"
            )
        for answer in compressed.answers:
            _print(f"answer: {answer.text!r}")
        _print(_outcome(result))

    def _finish(self, finish_reason: str) -> None:
        """Print the closing lines, draw the plot and write the report, if there are results."""
        if not self.results:
            return
        summary = recall.summarise(self.results)
        with suppress(BrokenPipeError):
            if self.options.sample_count > 1:
                _print(_closing_line(summary))
            if not self.output.quiet:
                say(self._cost_line(summary))
        options = self.options
        if options.plot is not None:
            title = f"{self.command}, {options.task}: {self.method} at ratio {self.ratio:g}"
            write_atomic(options.plot, draw_recall(self.results, title, options.plot.suffix))
        report = {
            "command": self.command,
            "model": self.model.name,
            **self.model_options.record(self.calibration),
            "task": options.task,
            **self.settings,
            "method": self.method,
            "ratio": self.ratio,
            "streaming": options.streaming,
            "max_kv_size": options.max_kv_size,
            "seed": options.seed,
            **summary,
            "finish_reason": finish_reason,
        }
        write_json(self.output.report, report)

    def _cost_line(self, summary: dict[str, Any]) -> str:
        """Return a line about the time of compression, the cells and the memory."""
        chunk_ms = summary["ms_per_chunk"]
        median = statistics.median(chunk_ms) if chunk_ms else 0
        return (
            f"{self.method}, ratio {self.ratio:g} | "
            f"{len(chunk_ms)} chunks at {median:.1f} ms | "
            f"cells {summary['cells_before']:,} -> {summary['cells_after']:,} | "
            f"peak RAM {format_mb(peak_rss_bytes())}"
        )


def _finish_reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    return "closed" if isinstance(error, BrokenPipeError) else "error"


def _outcome(result: recall.RecallResult) -> str:
    """Return whether the keys were found, and their log-probability; also without compression."""
    compressed, full = result.compressed, result.uncompressed
    log_probability = f"log-probability {compressed.log_probability:.3f} per token"
    line = f"{_found_text(compressed.found)}, {log_probability}"
    if full is None:
        return f"{line} (uncompressed: does not fit)"
    return f"{line} (uncompressed: {_found_text(full.found)}, {full.log_probability:.3f})"


def _found_text(is_found: bool) -> str:
    return "key found" if is_found else "key not found"


def _closing_line(summary: dict[str, Any]) -> str:
    line = "found {found} of {samples}, {log_probability:.3f} per token"
    if summary["found_uncompressed"] is not None:
        line += "; uncompressed {found_uncompressed} of {samples_uncompressed}, "
        line += "{log_probability_uncompressed:.3f}"
    return line.format(**summary)


def _print(line: str) -> None:
    """Print to standard output, above the progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
