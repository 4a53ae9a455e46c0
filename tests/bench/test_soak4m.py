"""The benchmark of millions of tokens, at small sizes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from click.testing import CliRunner
from small_models import small_model

import benchmarks.soak4m.__main__ as soak4m
from benchmarks.soak4m.__main__ import in_order, stored_reports
from benchmarks.soak4m.plot import draw_runs
from benchmarks.soak4m.report import run_report, table, windows_report, with_windows_report
from benchmarks.soak4m.runs import Plan, Run, all_runs
from benchmarks.soak4m.state import State, Window
from benchmarks.soak4m.text import make_text, selected_files, stored_text
from benchmarks.soak4m.worker import Life
from kvkeep.errors import InvalidArgument

MODEL = small_model()
PLAN = Plan(window=40, step=20, reference_from=8, reference_every=2, kill_every=80)
RUN = Run("sliding-32", "small", {"max_kv_size": 32}, 230, PLAN)


class Killed(BaseException):
    """The process ends."""


def kill() -> NoReturn:
    raise Killed


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Path]:
    rng, folder = random.Random(0), tmp_path / "library"
    for name in ("a.py", "b.py", "sub/c.py", "test/d.py", "e.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(rng.choice("abcdefgh ") for _ in range(90)))
    (folder / "latin.py").write_bytes(b"\xe9" * 90)
    return {"library": folder}


def live(folder: Path, run: Run, lines: list[str] | None = None) -> Life:
    """Live one life of a run; return it as it was at its end."""
    library = {"library": folder.parent / "library"}
    text = stored_text(
        folder, run.text_name, lambda: make_text(library, MODEL.text.encode, run.tokens)
    )
    life = Life(run, folder, MODEL, text, kill, [].append if lines is None else lines.append)
    with suppress(Killed):
        life.live()
    return life


def test_the_text_is_the_same_for_the_same_files(roots: dict[str, Path]) -> None:
    names = [name for name, _ in selected_files(roots)]
    assert sorted(names) == [f"library/{name}" for name in ("a.py", "b.py", "latin.py", "sub/c.py")]
    text = make_text(roots, MODEL.text.encode, 300)
    assert [file.path for file in text.files] == [name for name in names if "latin" not in name]
    assert len(text.ids) == 300 < sum(file.tokens for file in text.files)
    with pytest.raises(InvalidArgument, match="expected 1,000 tokens of text"):
        make_text(roots, MODEL.text.encode, 1000)


def test_a_killed_run_goes_on_as_one_that_was_not(roots: dict[str, Path], tmp_path: Path) -> None:
    killed, whole, lines = tmp_path / "killed", tmp_path / "whole", list[str]()
    assert [live(killed, RUN, lines).state.tokens for _ in range(3)] == [80, 160, 230]
    state = State.load(killed / "sliding-32.json", RUN)
    expected = live(whole, replace(RUN, plan=replace(PLAN, kill_every=1000))).state
    assert state.is_complete
    assert state.logits == expected.logits
    assert [w.perplexity for w in state.windows] == [w.perplexity for w in expected.windows]
    assert [w.fresh for w in state.windows] == [w.fresh for w in expected.windows]
    assert [(r.tokens, r.same_logits, r.same_next) for r in state.restored] == [
        (80, True, True),
        (160, True, True),
    ]
    assert lines[-1].startswith("sliding-32: 230 of 230 tokens, perplexity ")
    assert [machine and machine["threads"] for machine in state.machines] == [
        torch.get_num_threads()
    ] * 3
    assert [path.name for path in killed.glob("*.kvkeep")] == ["sliding-32-230.kvkeep"]
    report = run_report(state, RUN, killed)
    assert report["machines"] == state.machines
    assert [report["restored"], report["restored_same_next"], report["compared"]] == [2, 2, 3]
    assert "2 of 2" in table({"sliding-32": report})
    assert draw_runs({"sliding-32": report}, ".png").startswith(b"\x89PNG")


def test_memory_is_compared_at_equal_windows_of_processes() -> None:
    """Each process begins with less memory than it ends with, and all are alike."""
    plan = [(life, window) for life in range(20) for window in range(1, 4)]
    cut_short = [Window(1, 2.0, 1.0, window, 10**9, 5, 4, 9) for window in (1, 2)]
    windows = [Window(1, 2.0, 1.0, w, 100 * w, 5, 4, 100 + life) for life, w in plan]
    report = windows_report([*windows, *cut_short])
    ends = {"first_tenth": 300, "last_tenth": 300, "least": 300, "most": 300}
    assert (report["rss_bytes"], report["whole_lives"]) == (ends, 20)
    assert report["snapshot_bytes"] == [9, 119]
    assert with_windows_report({"tokens": 7, "cells": 0, **report}) == {"tokens": 7, **report}


def test_the_stored_reports_follow_from_their_windows() -> None:
    stored = Path(__file__).parents[2] / "docs" / "results" / "soak4m.json"
    for report in json.loads(stored.read_bytes())["runs"].values():
        assert with_windows_report(report) == report


def test_a_result_keeps_runs_that_the_folder_does_not_have(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "docs" / "results" / "soak4m.json"
    earlier, runs = stored_reports(stored), all_runs("smollm2", 4_200_000, Plan())
    assert list(earlier) == list(in_order(runs, dict(reversed(earlier.items()))))
    assert earlier == json.loads(stored.read_bytes())["runs"]
    assert stored_reports(None) == stored_reports(tmp_path / "new.json") == {}
    for content in ("", "[]", "{}", '{"runs": {"sliding-512": {}}}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(InvalidArgument, match="no result of this benchmark"):
            stored_reports(tmp_path / "other.json")


def test_a_session_that_goes_on_with_other_logits_is_reported(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    live(folder, RUN)
    path = folder / "sliding-32.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"next_logits": "0" * 64}))
    with pytest.raises(InvalidArgument, match="restored at 80 tokens has other logits"):
        live(folder, RUN)
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidArgument, match="of a run with other settings"):
        live(folder, replace(RUN, settings={"max_kv_size": 64}))


def test_a_state_of_an_earlier_version_has_no_machines(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    path = folder / "sliding-32.json"
    live(folder, RUN)
    document = json.loads(path.read_text())
    del document["machines"]
    path.write_text(json.dumps(document))
    assert State.load(path, RUN).machines == [None]
    assert [machine is None for machine in live(folder, RUN).state.machines] == [True, False]


def test_states_of_other_settings_are_refused_before_hours_of_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With --only, those of the chosen runs alone."""
    runs = all_runs("small", 5000, Plan())
    other = State(json.loads(json.dumps(asdict(replace(runs["local-1024"], tokens=7)))))
    (tmp_path / "local-1024.json").write_text(json.dumps(asdict(other)))
    started = list[str]()

    def begin(run: Run, folder: Path, arguments: dict[str, object]) -> None:
        started.append(run.name)

    monkeypatch.setattr(soak4m, "_complete", begin)
    asked = ["--folder", str(tmp_path), "--tokens", "5000", "--model", "small"]
    refused = CliRunner().invoke(soak4m.soak4m, asked)
    assert "is of a run with other settings" in refused.output
    assert started == []
    done = CliRunner().invoke(soak4m.soak4m, [*asked, "--only", "sliding-512"])
    assert (done.exit_code, started) == (0, ["sliding-512"])


def test_a_command_that_is_killed_at_any_time_can_be_repeated(
    tiny_folder: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "out.json", tmp_path / "folder"
    sizes = ["--tokens", "3000", "--window", "500", "--kill-every", "1000", "--step", "250"]
    command = [sys.executable, "-m", "benchmarks.soak4m", "--folder", str(folder), *sizes]
    command += ["--model", str(tiny_folder), "--out", str(out), "--only", "sliding-512"]
    process = subprocess.Popen(command, start_new_session=True)
    while not any(folder.glob("sliding-512-*.kvkeep")):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # between two windows, or within one
    process.wait()
    subprocess.run(command, check=True)
    report = json.loads(out.read_text())["runs"]["sliding-512"]
    assert report["windows"]["tokens"] == list(range(500, 3_001, 500))
    assert report["restored"] >= 2
    assert report["restored_same_logits"] == report["restored"]
    assert report["restored_same_next"] >= 2
