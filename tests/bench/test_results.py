"""Results of benchmarks: written after each part, and refused settings."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from benchmarks import against, agent_servers, files
from benchmarks.agent_servers import PromptOfTrace, require_context, rotated
from benchmarks.alignment import alignment
from benchmarks.codec import codec
from benchmarks.command import ResultFile
from benchmarks.compaction import compaction
from benchmarks.compression_loss import Plan, compression_loss, read_results
from benchmarks.picture import picture
from benchmarks.serving import running_server
from benchmarks.small_steps import main as small_steps
from benchmarks.speculation import main as speculation
from kvkeep.errors import InvalidArgument, KvkeepError


@dataclass(frozen=True)
class Row:
    sample: int
    values: tuple[int, ...]


def run(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [*map(str, arguments)])


def test_a_result_is_replaced_after_each_part(tmp_path: Path) -> None:
    out, rows = tmp_path / "out.json", list[Row]()
    result = ResultFile(out, settings={"rounds": 2})
    assert not out.exists()  # an earlier result stays until something is measured
    for sample in range(2):
        rows.append(Row(sample, (1, 2)))
        result.write(rows=rows, by_name={"first": rows[0]})
        content = json.loads(out.read_text())
        assert content["rows"] == [{"sample": n, "values": [1, 2]} for n in range(sample + 1)]
        assert content["by_name"] == {"first": {"sample": 0, "values": [1, 2]}}
        assert (content["settings"], content["machine"]["cores"] > 0) == ({"rounds": 2}, True)
    ResultFile(None).write(rows=rows)


def test_rounds_before_an_error_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, measured = tmp_path / "out.json", list[Path]()

    def measure(checkout: Path) -> dict[str, float]:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(checkout)
        return {"save_s": 2.0}

    monkeypatch.setattr(against, "measure", measure)
    done = run(against.main, tmp_path, "--rounds", 5, "--out", out)
    assert done.exit_code != 0
    content = json.loads(out.read_text())
    assert (content["rounds"], content["figures"][0]["here"]) == (1, 2.0)


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        (speculation, ("--rounds", 0), "x>=1"),
        (small_steps, ("--rounds", 1), "x>=2"),
        (compaction, ("--compactions", 1), "x>=2"),
        (compaction, ("--facts", 21), "1<=x<=20"),
        (alignment, ("--facts", 21), "1<=x<=20"),
        (codec, ("--tokens", "abc"), "expected numbers above 0"),
        (compression_loss, ("--tokens", "1000,,4"), "expected numbers above 0"),
        (picture, ("--redraw",), "add --out FILE.json"),
        (picture, ("--redraw", "--out", "missing.json"), "does not exist"),
        (files.main, ("--llama", ".", "--llama", ".", "model.gguf"), "names a folder twice"),
        (compression_loss, ("--out", "a.json"), "is no result of this benchmark"),
        (alignment, ("--case", "all", "--out", "a.json"), "is no result of this benchmark"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_the_measurement(
    command: click.Command,
    arguments: tuple[object, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    done = run(command, *arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "needed", "arguments", "said"),
    [
        ("reuse", "moto", ("--out", "nowhere/out.json"), "cannot be written"),
        ("takeover", "ray", ("--out", "nowhere/out.json"), "cannot be written"),
        ("validate", "simpy", ("--out", "nowhere/out.json"), "cannot be written"),
        ("scale", "simpy", ("--costs", "a.json", "--out", "nowhere/a.json"), "cannot be written"),
        ("scale", "simpy", ("--costs", "a.json", "--into", "a.json"), "must have the lines"),
    ],
)
def test_files_of_fleet_benchmarks_are_checked_before_the_measurement(
    name: str,
    needed: str,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    done = run(importlib.import_module(f"benchmarks.fleet.{name}").main, *arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize("command", [codec, compression_loss])
def test_a_passage_longer_than_its_text_is_refused(
    command: click.Command, tiny_folder: Path
) -> None:
    done = run(command, "--model", tiny_folder, "--tokens", 10**9)
    assert done.exit_code == 2
    assert "lower --tokens" in done.output


def test_readings_of_other_settings_are_not_kept(tiny_folder: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out.json", ("--model", tiny_folder, "--case", "all", "--facts", 1)
    done = run(alignment, *asked, "--prompts", 1, "--out", out)
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    assert content["settings"]["model"] == str(tiny_folder)
    refused = run(alignment, *asked, "--prompts", 2, "--out", out)
    assert "has results of other settings" in refused.output
    assert json.loads(out.read_text()) == content


def test_a_continued_result_has_the_machines_of_all_runs(tmp_path: Path) -> None:
    out, plan = tmp_path / "out.json", Plan("model", 1, 3, 512)
    for run_number in range(2):
        results = read_results(out, plan)
        results.machines.append({"cpu": f"number {run_number}"})
        results.write(out)
    results = read_results(out, Plan("model", 1, 2, 512))
    assert [machine["cpu"] for machine in results.machines] == ["number 0", "number 1"]
    assert results.plan.samples == 3  # as in the file, since its readings stay
    content = json.loads(out.read_text())
    content["machine"] = content.pop("machines")[0]
    out.write_text(json.dumps(content))
    assert read_results(out, plan).machines == [{"cpu": "number 0"}]
    with pytest.raises(InvalidArgument, match="other settings"):
        read_results(out, Plan("model", 2, 3, 512))


def test_builds_are_named_by_what_tells_them_apart() -> None:
    assert files.build_names([Path("/a/avx512"), Path("/a/amx")]) == ["avx512", "amx"]
    assert files.build_names([Path("/b/one/bin"), Path("/b/two/bin")]) == ["one/bin", "two/bin"]
    assert files.build_names([]) == []


def test_servers_take_turns_to_be_the_first() -> None:
    servers = ["a", "b", "c"]
    assert [rotated(servers, number)[0] for number in range(1, 5)] == ["b", "c", "a", "b"]
    assert all(sorted(rotated(servers, number)) == servers for number in range(4))


def test_prompts_longer_than_the_servers_context_are_refused() -> None:
    prompt = PromptOfTrace("", tuple(range(agent_servers.CONTEXT - 10)), tuple(range(9)))
    require_context({"agent": [prompt]})
    longer = PromptOfTrace("", prompt.prompt, tuple(range(10)))
    with pytest.raises(InvalidArgument, match="lower --scale"):
        require_context({"agent": [prompt, longer]})


def test_what_a_server_printed_before_its_end_is_shown() -> None:
    program = "import sys; sys.exit('the port is taken')"
    with (
        pytest.raises(KvkeepError, match="ended with status 1: the port is taken"),
        running_server(f'python -c "{program}"'),
    ):
        pass
