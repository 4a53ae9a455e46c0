"""Measurement of recall for a command: samples one by one, closing lines and report."""

import dataclasses
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Never

from tqdm import tqdm

from kvkeep import Model
from kvkeep.cli.evaluate.options import ModelChoice, RecallChoice
from kvkeep.cli.options import OutputChoice
from kvkeep.cli.output import megabytes, say
from kvkeep.errors import KvkeepError
from kvkeep.evaluate.facts import Sample, Samples
from kvkeep.evaluate.recall import (
    SPARE,
    Compressing,
    Outcome,
    compress_after_reading,
    compress_while_reading,
)
from kvkeep.evaluate.recall_summary import Summary, summarise
from kvkeep.runtime.memory import peak_rss
from kvkeep.storage.files.atomic import write_atomic, write_json


@dataclass(frozen=True)
class Experiment:
    """The measurement that a command runs. settings: the command's own options, for the report."""

    command: str
    samples: Samples
    settings: dict[str, Any]


def run_recall(
    experiment: Experiment,
    model: Model,
    choice: ModelChoice,
    recall: RecallChoice,
    ratio: float,
    output: OutputChoice,
) -> None:
    """Measure and print all samples, then report. The report is also written on an early end."""
    calibration = choice.calibrated(model)
    how = Compressing(recall.method, ratio, recall.seed, calibration, recall.max_kv_size)
    RecallRun(experiment, model, how, recall, output).run(choice.prefill_step)


class RecallRun:
    """The measurement of an experiment's samples. An interrupt loses no finished sample."""

    def __init__(
        self,
        experiment: Experiment,
        model: Model,
        how: Compressing,
        recall: RecallChoice,
        output: OutputChoice,
    ):
        self._experiment, self._model, self._how = experiment, model, how
        self._recall, self._output = recall, output
        self._measured: list[Outcome] = []

    def run(self, prefill_step: int) -> None:
        measure = compress_while_reading if self._recall.streaming else compress_after_reading
        with self._reported(), self._bar() as bar:
            for index in range(self._recall.count):
                sample = self._experiment.samples.sample(index)
                if self._recall.count == 1:
                    self._announce(sample)
                # A different seed for each sample, or random methods would pick the same cells.
                how = dataclasses.replace(self._how, seed=self._how.seed + index)
                self._measured.append(measure(self._model, sample, how, prefill_step))
                self._show(self._measured[-1])
                bar.update(1)

    def _bar(self) -> "tqdm[Never]":
        return tqdm(
            total=self._recall.count,
            desc="measuring",
            unit=" samples",
            leave=False,
            disable=None if self._output.progress else True,
        )

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self._close("interrupt")
            raise
        except BrokenPipeError:
            self._close("closed")
            raise
        except (KvkeepError, OSError):
            self._close("error")
            raise
        self._close("end")

    def _announce(self, sample: Sample) -> None:
        """Print the sizes and the hidden facts, in the format of llama.cpp's passkey example."""
        encode, text = self._model.text.encode, sample.text
        tokens = len(encode(text))
        question = max(len(encode(fact.question + fact.answer)) for fact in sample.asked)
        trained = self._model.spec.max_positions
        context = self._how.cells(tokens) if self._recall.streaming else trained
        _say(
            f"n_len = {tokens + question + SPARE}, n_ctx = {context}, "
            f"ratio = {self._how.ratio:g}, method = {self._how.method}"
        )
        for fact in sample.asked:
            place = len(encode(text[: text.index(fact.sentence)]))
            _say(f"{self._experiment.command} = {fact.answer}, at token {place}")
        _say(f"position {sample.position} / {sample.places}")

    def _show(self, measured: Outcome) -> None:
        """Print the result of a sample: one line if there are several samples, else details."""
        compressed = measured.compressed
        if self._recall.count > 1:
            key = ", ".join(fact.answer for fact in measured.sample.asked)
            where = f"{key} at {measured.sample.position} of {measured.sample.places}"
            held = f"{measured.tokens:,} -> {compressed.cells:,} cells"
            _say(f"{len(self._measured):3d}: {where}, {held}: {_outcome(measured)}")
            return
        before = measured.uncompressed.nbytes if measured.uncompressed else None
        shrunk = f"{megabytes(before)} -> " if before is not None else ""
        _say(
            f"cells {measured.tokens} -> {compressed.cells}, {shrunk}{megabytes(compressed.nbytes)}"
        )
        for number, chunk in enumerate(measured.chunks):
            _say(
                f"chunk {number}: cells {chunk.cells_before} -> {chunk.cells_after}, "
                f"merged {chunk.merged:.1f}, {chunk.seconds * 1000:.1f} ms"
            )
        for answer in compressed.answers:
            _say(f"answer: {answer.text!r}")
        _say(_outcome(measured))

    def _close(self, finish_reason: str) -> None:
        """Print the closing lines, draw the plot and write the report, if anything was measured."""
        if not self._measured:
            return
        summary = summarise(self._measured)
        with suppress(BrokenPipeError):
            if self._recall.count > 1:
                _say(_closing(summary))
            if not self._output.quiet:
                say(self._costs(summary))
        if self._recall.plot is not None:
            self._draw()
        write_json(
            self._output.report,
            {**self._about(), **summary.as_json(), "finish_reason": finish_reason},
        )

    def _about(self) -> dict[str, Any]:
        return {
            "command": self._experiment.command,
            "model": self._model.name,
            "task": self._recall.task,
            **self._experiment.settings,
            "method": self._how.method,
            "ratio": self._how.ratio,
            "streaming": self._recall.streaming,
            "seed": self._recall.seed,
        }

    def _costs(self, summary: Summary) -> str:
        chunk_ms = summary.ms_per_chunk
        median = statistics.median(chunk_ms) if chunk_ms else 0
        return " | ".join(
            [
                f"{self._how.method}, ratio {self._how.ratio:g}",
                f"{len(chunk_ms)} chunks at {median:.1f} ms",
                f"cells {summary.cells_before:,} -> {summary.cells_after:,}",
                f"peak RAM {megabytes(peak_rss())}",
            ]
        )

    def _draw(self) -> None:
        from kvkeep.evaluate.recall_plot import draw_depths

        plot = self._recall.plot
        assert plot is not None
        title = (
            f"{self._experiment.command}, {self._recall.task}: {self._how.method} at ratio "
            f"{self._how.ratio:g}"
        )
        write_atomic(plot, draw_depths(self._measured, title, plot.suffix))


def _outcome(measured: Outcome) -> str:
    compressed, whole = measured.compressed, measured.uncompressed
    result = f"{_found(compressed.found)}, log-probability {compressed.log_probability:.3f} a token"
    if whole is None:
        return f"{result} (uncompressed: does not fit)"
    return f"{result} (uncompressed: {_found(whole.found)}, {whole.log_probability:.3f})"


def _found(found: bool) -> str:
    return "key found" if found else "key not found"


def _closing(summary: Summary) -> str:
    line = f"found {summary.found} of {summary.samples}, {summary.log_probability:.3f} a token"
    if summary.found_uncompressed is None:
        return line
    return (
        f"{line}; uncompressed {summary.found_uncompressed} of {summary.samples_uncompressed}, "
        f"{summary.log_probability_uncompressed:.3f}"
    )


def _say(line: str) -> None:
    """Print to standard output, above a progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()
