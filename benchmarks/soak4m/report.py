"""The report of a complete run: its windows as columns, and what they say together."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import rounded
from benchmarks.soak4m.runs import Run
from benchmarks.soak4m.state import State, Window


def run_report(state: State, run: Run, folder: Path) -> dict[str, Any]:
    """Return the report of a complete run."""
    listing = (folder / f"{run.text_name}.json").read_bytes()
    return {
        "settings": {"model": Path(run.model).name, **run.settings, **asdict(run.plan)},
        "machines": state.machines,
        "random_weights": run.is_random,
        "tokens": state.tokens,
        "text": {
            "files": len(json.loads(listing)["files"]),
            "sha256": hashlib.sha256(listing).hexdigest(),
        },
        "restored": len(state.restored),
        "restored_same_logits": sum(r.same_logits for r in state.restored),
        # Of processes that were killed after one more step; others ended between two windows.
        "restored_next": sum(r.same_next is not None for r in state.restored),
        "restored_same_next": sum(r.same_next is True for r in state.restored),
        **windows_report(state.windows),
    }


def windows_report(windows: Sequence[Window]) -> dict[str, Any]:
    """Return the part of a report that follows from its windows."""
    compared = [w for w in windows if w.fresh is not None]
    ratios = [w.compared / w.fresh for w in compared if w.compared and w.fresh]
    # Memory of a process grows from its start, so that only equal windows of lives are compared.
    longest_life = max(w.life_windows for w in windows)
    last_of_lives = [w for w in windows if w.life_windows == longest_life]
    return {
        "compared": len(ratios),
        "compared_to_fresh": [rounded(f(ratios)) for f in (min, median, max)] if ratios else None,
        "perplexity": _ends([w.perplexity for w in windows]),
        "cpu_ms": _ends([w.cpu_ms for w in windows]),
        "whole_lives": len(last_of_lives),
        "rss_bytes": _ends([float(w.rss_bytes) for w in last_of_lives]),
        "snapshot_bytes": [f(w.snapshot_bytes for w in windows) for f in (min, max)],
        "kv_bytes": sorted({w.kv_bytes for w in windows})[-1],
        "cells": max(w.cells for w in windows),
        "windows": {f.name: [getattr(w, f.name) for w in windows] for f in fields(Window)},
    }


def with_windows_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored report with what follows from its windows, as this version reports it."""
    columns = report["windows"]
    rows = zip(*columns.values(), strict=True)
    windows = [Window(**dict(zip(columns, row, strict=True))) for row in rows]
    others = {name: value for name, value in report.items() if name != "windows"}
    return {**others, **windows_report(windows)}


def _ends(values: list[float]) -> dict[str, float]:
    """Return the medians of the first and the last tenth of the values, and the extremes."""
    tenth = max(1, len(values) // 10)
    return {
        "first_tenth": rounded(median(values[:tenth])),
        "last_tenth": rounded(median(values[-tenth:])),
        "least": rounded(min(values)),
        "most": rounded(max(values)),
    }


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Return the reports as text."""
    lines = [
        f"{'run':<14}{'tokens':>10}{'perplexity':>20}{'beside fresh':>22}"
        f"{'CPU ms/token':>20}{'memory (MB)':>18}{'restored':>14}"
    ]
    for name, report in reports.items():
        ratios = report["compared_to_fresh"]
        beside = "-" if ratios is None else f"{ratios[1]:.4f} ({ratios[0]:.3f}-{ratios[2]:.3f})"
        same = f"{report['restored_same_logits']} of {report['restored']}"
        lines.append(
            f"{name:<14}{report['tokens']:>10,}{_change(report['perplexity']):>20}{beside:>22}"
            f"{_change(report['cpu_ms']):>20}{_change(report['rss_bytes'], 1e6):>18}{same:>14}"
        )
    return "\n".join(lines)


def _change(ends: dict[str, float], unit: float = 1.0) -> str:
    return f"{ends['first_tenth'] / unit:.4g} to {ends['last_tenth'] / unit:.4g}"
