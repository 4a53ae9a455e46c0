"""The report of a complete run: its windows as columns, and what they say together."""

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import rounded
from benchmarks.soak4m.runs import Run
from benchmarks.soak4m.state import State, Window


def run_report(state: State, run: Run, folder: Path) -> dict[str, Any]:
    """Return the report of a complete run."""
    windows = state.windows
    compared = [w for w in windows if w.fresh is not None]
    ratios = [w.compared / w.fresh for w in compared if w.compared and w.fresh]
    listing = (folder / f"{run.text_name}.json").read_bytes()
    return {
        "settings": {"model": Path(run.model).name, **run.settings, **asdict(run.plan)},
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
        "compared": len(ratios),
        "compared_to_fresh": [rounded(f(ratios)) for f in (min, median, max)] if ratios else None,
        "perplexity": _ends([w.perplexity for w in windows]),
        "cpu_ms": _ends([w.cpu_ms for w in windows]),
        # Processes begin anew, so the same windows of each are compared.
        "rss_bytes": _ends([float(w.rss_bytes) for w in windows]),
        "kv_bytes": sorted({w.kv_bytes for w in windows})[-1],
        "cells": max(w.cells for w in windows),
        "windows": {f.name: [getattr(w, f.name) for w in windows] for f in fields(Window)},
    }


def _ends(values: list[float]) -> dict[str, float]:
    """Return the medians of the first and the last tenth of the windows, and the extremes."""
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
