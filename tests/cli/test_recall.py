"""`kvkeep passkey` and `needle` print, report and plot their results."""

import json
from pathlib import Path

import pytest

from kvkeep import __version__, load_model
from kvkeep.cli.evaluate import EVALUATIONS
from kvkeep.cli.main import COMMANDS
from kvkeep.compression.calibration.stored import add_calibration
from kvkeep.evaluate.calibrate import calibrate
from kvkeep.evaluate.datasets import PasskeyDataset
from kvkeep.evaluate.tasks import TASKS

SMALL = {"passkey": ("--junk", 20), "needle": ("--tokens", 500)}


def test_one_sample_is_printed_in_detail(invoke, tiny) -> None:
    result = invoke("passkey", "--junk", 30, "--group", 2, "--pos", 9, *tiny)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    key = PasskeyDataset(30).sample(0).facts[0].answer
    assert lines[0].startswith("n_len = ")
    assert "n_ctx = 8192, ratio = 2" in lines[0]
    assert lines[1].startswith(f"passkey = {key}, at token ")
    assert lines[2] == "position 9 / 30"
    assert lines[3].startswith("cells ")
    assert lines[4].startswith("chunk 0: cells ")
    assert lines[4].endswith(" ms")
    assert "found, log-probability -" in lines[-1]
    assert "(uncompressed: " in lines[-1]
    assert "ratio 2 | " in result.stderr


@pytest.mark.parametrize("command", SMALL)
def test_a_report_has_every_sample(invoke, tiny, tmp_path: Path, command: str) -> None:
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    result = invoke(
        *(command, *SMALL[command], "--task", "second", "--keys", "words", "--ratio", 3),
        *("--depths", "0,50,100", "--method", "keydiff", "--seed", 5),
        *("--report", report, "--plot", plot, *tiny),
    )
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 4
    figures = json.loads(report.read_text())
    expected = {"command": command, "method": "keydiff", "ratio": 3.0, "seed": 5, "samples": 3}
    assert {name: figures[name] for name in expected} == expected
    assert figures["rate"] == figures["found"] / 3
    assert figures["found_uncompressed"] is not None
    assert figures["log_probability"] < 0 > figures["log_probability_uncompressed"]
    assert figures["cells_after"] <= figures["cells_before"] / 3 + 1
    assert figures["bytes_after"] < figures["bytes_before"]
    assert all(ms > 0 for ms in figures["ms_per_chunk"])
    assert figures["finish_reason"] == "end"
    assert len(figures["each"]) == 3
    for row in figures["each"]:
        assert len(row["key"]) == len(row["answer"]) == len(row["found_each"]) == 2
        assert row["cells_after"] < row["cells_before"]
    assert [row["budget_cells"] for row in figures["each"]] == [None] * 3
    settings = ("device", "dtype", "weights", "prefill_step", "max_kv_size", "calibration")
    assert [figures[name] for name in settings] == ["cpu", "float32", None, 512, None, None]
    assert figures["kvkeep"] == __version__
    depths = [row["depth"] for row in figures["each"]]
    assert depths == pytest.approx([0, 50, 100], abs=5)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("task", ["variables", "common"])
def test_a_task_may_be_hidden_in_either_text(invoke, tiny, tmp_path: Path, task: str) -> None:
    report = tmp_path / "report.json"
    asked = ("--tokens", 400, "--task", task, "--haystack", "docstrings", "--report", report)
    result = invoke("needle", *asked, *tiny)
    assert result.exit_code == 0, result.stderr
    figures = json.loads(report.read_text())
    assert (figures["task"], figures["haystack"]) == (task, "docstrings")
    assert figures["keys"] == TASKS[task].key_types[0]
    [row] = figures["each"]
    assert len(row["found_each"]) == len(row["key"])


def test_a_report_names_the_calibration(invoke, tiny, tiny_folder: Path, tmp_path: Path) -> None:
    model = load_model(str(tiny_folder), dtype="float32")
    calibration = calibrate(model, [token % 200 + 1 for token in range(1536)])
    file, report = tmp_path / "my.kvcal", tmp_path / "report.json"
    calibration.save(file)
    asked = ("passkey", "--junk", 20, "--calibration", file, "--report", report)
    result = invoke(*asked, "--streaming", "--ratio", 3, *tiny)
    assert result.exit_code == 0, result.stderr
    figures = json.loads(report.read_text())
    assert figures["calibration"] == "my.kvcal"
    assert figures["calibration_digest"] == calibration.digest
    [row] = figures["each"]
    assert row["budget_cells"] == -(-row["cells_before"] // 3)


def test_the_same_seed_gives_the_same_result(invoke, tiny, tmp_path: Path) -> None:
    rows = []
    for name in ("one", "other"):
        report = tmp_path / name
        arguments = ("--samples", 2, "--method", "random", "--report", report, *tiny)
        assert invoke("passkey", "--junk", 12, *arguments).exit_code == 0
        rows.append(json.loads(report.read_text())["each"])
    assert rows[0] == rows[1]


def test_memory_can_be_compressed_during_prefill(invoke, tiny, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = invoke(
        *("passkey", "--junk", 60, "--streaming", "--max-kv-size", 1024, "--ratio", 4),
        *("--report", report, *tiny),
    )
    assert result.exit_code == 0, result.stderr
    figures = json.loads(report.read_text())
    assert figures["streaming"]
    assert (figures["max_kv_size"], figures["each"][0]["budget_cells"]) == (1024, 1024)
    assert figures["cells_after"] <= 1024 < figures["cells_before"]
    assert figures["found_uncompressed"] is not None


@pytest.mark.parametrize(
    ("arguments", "methods"),
    [
        ((), ("kvzip", "kvzip")),
        (("--streaming", "--max-kv-size", 256), ("fitted", "kvzap")),
        (("--method", "kvzap"), (None, "kvzap")),
        (("--method", "keydiff"), ("keydiff", "keydiff")),
    ],
    ids=["compress", "archive", "kvzap", "keydiff"],
)
def test_the_method_is_that_of_compress_or_an_archive(
    invoke,
    tiny,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    methods: tuple[str | None, str],
) -> None:
    """methods: without a stored calibration, None for a refusal; and with one."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    report, asked = tmp_path / "report.json", ("passkey", "--junk", 20, *arguments, *tiny)
    for is_calibrated, method in enumerate(methods):
        if is_calibrated:
            model = load_model(str(tiny_folder), dtype="float32")
            add_calibration(calibrate(model, [token % 200 + 1 for token in range(1536)]))
        result = invoke(*asked, "--report", report)
        assert result.exit_code == (0 if method else 2), result.stderr
        if method:
            figures = json.loads(report.read_text())
            assert figures["method"] == method
            is_used = is_calibrated and method == "kvzap"
            assert figures["calibration_digest"] == (model.calibration.digest if is_used else None)
            assert f"method = {method}\n" in result.stdout
            assert f"{method}, ratio 2 | " in result.stderr


def test_an_interrupt_keeps_finished_measurements(invoke, tiny, tmp_path: Path, ctrl_c_at) -> None:
    report = tmp_path / "report.json"
    ctrl_c_at(100)
    asked = ("--junk", 10, "--samples", 5000, "--report", report)
    interrupted = invoke("passkey", *asked, *tiny)
    assert interrupted.exit_code == 130
    figures = json.loads(report.read_text())
    assert figures["finish_reason"] == "interrupt"
    assert 1 <= figures["samples"] < 100
    assert len(figures["each"]) == figures["samples"]
    assert interrupted.stdout.splitlines()[-1].startswith("found ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--junk", 0], "expected 1 or more"),
        (["--junk", 20, "--pos", 20], "must be 0 to 19"),
        (["--pos", 1, "--depths", "0,100"], "--pos and --depths"),
        (["--junk", 2, "--task", "several"], "found 2 repetitions"),
        (["--depths", "0,101"], "expected 0 to 100, found 101"),
        (["--depths", "start"], "expected a number, found 'start'"),
        (["--ratio", 0.5], "expected 1 or more, found 0.5"),
        (["--ratio", 1], "expected a number above 1, found 1"),
        (["--group", 1], "expected 2 or more, found 1"),
        (["--ratio", "nan"], "found nan"),
        (["--ratio", "inf"], "found inf"),
        (["--method", "magic"], "found 'magic'"),
        (["--method", "keydiff:each"], "expected keydiff:heads or keydiff:uniform"),
        (["--method", "kvzap"], "add --calibration"),
        (["--keys", "letters"], "'letters' is not one of"),
        (["--samples", 0], "expected 1 or more"),
        (["--seed", -1], "expected 0 or more"),
        (["--max-kv-size", 100], "add --streaming"),
        (["--calibration", "no-such-file"], "does not exist"),
        (["--plot", "plot.gif"], "must end in one of .png"),
        (["--report", "/no/such/folder/report.json"], "cannot be written"),
    ],
)
def test_bad_input_is_refused_before_the_model_loads(
    invoke, arguments, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))  # without a calibration
    result = invoke("passkey", *arguments, "-m", "no-such-model")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "third"], "'third' is not one of"),
        (["--task", "common", "--keys", "number"], "expected one of words; found 'number'"),
        (["--task", "common", "--depths", "0,50"], "has no depth: leave out --depths"),
        (["--task", "frequent", "--plot", "plot.png"], "has no depth: leave out --plot"),
        (["--haystack", "novel"], "'novel' is not one of"),
    ],
)
def test_an_impossible_task_is_refused_before_the_model_loads(invoke, arguments, said) -> None:
    result = invoke("needle", *arguments, "-m", "no-such-model")
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["passkey", "--junk", 500], "8192"),
        (["needle", "--tokens", 200_000], "use fewer"),
    ],
)
def test_text_longer_than_the_memory_is_refused(invoke, tiny, arguments, said) -> None:
    result = invoke(*arguments, *tiny, "--quiet")
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]


def test_each_evaluation_is_also_a_top_level_command() -> None:
    assert sorted(EVALUATIONS) == ["grid", "needle", "passkey", "perplexity"]
    for name, command in EVALUATIONS.items():
        assert COMMANDS[name] is command
