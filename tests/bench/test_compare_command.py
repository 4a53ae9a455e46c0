"""`python -m benchmarks.compare` as a command, at sizes of seconds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from benchmarks.compare.__main__ import compare
from benchmarks.compare.endless import _EndlessRun
from benchmarks.compare.plan import PARTS, PEERS, Plan
from benchmarks.compare.run import PARTS_BY_NAME, BenchmarkOptions, run_benchmark
from benchmarks.compare.tables import BEGIN, END
from benchmarks.peers.available import PACKAGES, find_variants
from benchmarks.peers.base import Setup
from benchmarks.peers.gguf_files import requantised, weights_of
from benchmarks.peers.remote import PeerFailed

TINY = Plan(
    rounds=2,
    prefill=(16, 64),
    stepped=80,
    step=32,
    contexts=(16, 64),
    written=4,
    budget=64,
    endless=200,
    block=50,
    shorter=4,
    remembered=100,
    deleted=10,
)
Asking = Callable[..., BenchmarkOptions]


@pytest.fixture
def asking(small_folder: Path) -> Asking:
    def make(*parts: str, peers: tuple[str, ...] = ("kvkeep", "transformers")) -> BenchmarkOptions:
        return BenchmarkOptions(parts, peers, str(small_folder), "cpu", None, TINY, quick=True)

    return make


def run(*arguments: object) -> Result:
    return CliRunner().invoke(compare, [*map(str, arguments)])


def test_every_measure_is_read_in_every_round_of_every_peer(asking: Asking) -> None:
    result = run_benchmark(asking("memory"))
    assert result.ended == "whole"
    read = {(each.measure, each.variant, each.round) for each in result.readings}
    expected = {
        (measure.key, variant, index)
        for measure in result.measures
        for variant in ("kvkeep", "transformers")
        for index in range(2)
    }
    assert expected - read == {("memory/delete", "transformers", index) for index in range(2)}
    assert all(each.value > 0 for each in result.readings)
    assert set(result.about) == {"kvkeep", "transformers"}
    # Who goes first changes from round to round.
    order = [each.variant for each in result.readings if each.measure == "memory/read"]
    assert order == ["kvkeep", "transformers", "transformers", "kvkeep"]


@pytest.mark.slow
def test_an_endless_run_is_compared_at_its_beginning_and_its_end(asking: Asking) -> None:
    result = run_benchmark(asking("endless"))
    ours, theirs = result.traces
    assert (ours.variant, ours.tokens) == ("kvkeep", [50, 100, 150, 200])
    assert theirs.tokens == [50]  # it evaluates its window anew, and writes a part of them
    assert "transformers: generated 50 endless tokens instead of 200" in result.skipped
    of = {(each.variant, each.measure): each.value for each in result.readings}
    assert of["kvkeep", "endless/growth"] == pytest.approx(
        of["kvkeep", "endless/late"] / of["kvkeep", "endless/early"]
    )
    assert ("transformers", "endless/late") not in of
    assert of["transformers", "endless/speed"] > 0
    # 64 cells and what it takes to evaluate them; nothing of the model's own size.
    assert of["kvkeep", "endless/held"] < 100


@pytest.mark.parametrize("part", ["startup", pytest.param("steps", marks=pytest.mark.slow)])
def test_steps_and_startup_have_processes_of_their_own(asking: Asking, part: str) -> None:
    asked = asking(part, peers=("kvkeep",))
    result = run_benchmark(replace(asked, plan=replace(asked.plan, rounds=1)))
    assert result.ended == "whole"
    found = {each.measure: each.value for each in result.readings}
    assert list(found) == [each.key for each in result.measures]
    assert all(value > 0 for value in found.values())
    assert set(result.about) == {"kvkeep"}


def test_an_interrupt_keeps_the_parts_that_are_complete(asking: Asking) -> None:
    def interrupt(part: str) -> None:
        if part == "decode":
            raise KeyboardInterrupt

    result = run_benchmark(asking("prefill", "decode", peers=("kvkeep",)), interrupt)
    assert result.ended == "interrupted"
    assert len(result.readings) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerFailed("its process ended")])
def test_an_endless_run_that_ends_early_keeps_its_blocks(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real, blocks = _EndlessRun.go_on, list[int]()

    def go_on(endless_run: _EndlessRun, block: int) -> int:
        if len(blocks) == 2:
            raise error
        blocks.append(block)
        return real(endless_run, block)

    monkeypatch.setattr(_EndlessRun, "go_on", go_on)
    result = run_benchmark(asking("endless", peers=("kvkeep",)))
    assert result.ended == ("interrupted" if isinstance(error, KeyboardInterrupt) else str(error))
    assert [trace.tokens for trace in result.traces] == [[50, 100]]
    measures = ["endless/speed", "endless/slowest", "endless/held"]
    assert [each.measure for each in result.readings] == measures


def test_the_command_writes_what_it_found(small_folder: Path, tmp_path: Path) -> None:
    page, out, plots = tmp_path / "page.md", tmp_path / "out.json", tmp_path / "plots"
    page.write_text(f"# Speed\n{BEGIN}\n{END}\n")
    done = run(
        *("decode", "--quick", "--rounds", 1, "--peers", "kvkeep,llama.cpp"),
        *("--model", small_folder, "--out", out, "--plots", plots, "--into", page),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert (found["quick"], found["ended"]) == (True, "whole")
    assert found["settings"]["rounds"] == 1
    assert [each.startswith("llama.cpp: ") for each in found["skipped"]] == [True]
    assert found["skipped"][0] in done.output
    assert [path.name for path in plots.iterdir()] == ["decode.png"]
    assert "| decode after 256 tokens, tokens/s |" in page.read_text()
    again = run("--table", out)
    assert again.exit_code == 0
    assert again.stdout.strip() in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sprint"], "'sprint' is not one of"),
        (["--peers", "kvkeep,vllm"], "found 'vllm'"),
        (["--rounds", "0"], "not in the range x>=1"),
        (["--endless-tokens", "10"], "not in the range x>=200"),
        (["--gguf", "nowhere.gguf"], "does not exist"),
        (["--out", "nowhere/out.json"], "cannot be written"),
        (["--into", "page.md"], "has no lines"),
        (["--table", "page.md"], "is not a result"),
        (["decode", "--table", "page.md"], "takes no parts"),
        (["--table", "page.md", "--rounds", "2"], "--table does not use --rounds"),
        (["--table", "page.md", "--peers", "kvkeep"], "--table does not use --peers"),
        (["--table", "page.md", "--quick"], "--table does not use --quick"),
        (["--table", "page.md", "--model", "x"], "--table does not use --model"),
        (["--profile", "--peers", "kvkeep"], "--profile does not use --peers"),
        (["--profile", "--rounds", "2"], "--profile does not use --rounds"),
        (["--model", "nowhere"], "no model 'nowhere'"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("nothing")
    done = run(*arguments)
    assert done.exit_code != 0
    assert said in str(done.exception) + done.output


def test_contexts_longer_than_the_model_was_trained_for_are_refused(small_folder: Path) -> None:
    done = run("--model", small_folder)
    assert done.exit_code != 0
    assert "contexts of 4,232 tokens" in str(done.exception) + done.output


def test_peers_that_are_not_here_are_named(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(str(small_folder), small_folder, "cuda", 1)
    found, skipped = find_variants(list(PEERS), setup, None, progress=False)
    assert [each.label for each in found] == ["kvkeep", "transformers"]
    assert skipped == ["llama.cpp: runs on the CPU only here", "mlx-lm: runs on the CPU only here"]
    monkeypatch.setitem(PACKAGES, "mlx-lm", ("no_module_of_this_name", "mlx-lm"))
    asked = replace(setup, device="cpu")
    found, skipped = find_variants(["kvkeep", "mlx-lm"], asked, None, progress=False)
    assert [each.label for each in found] == ["kvkeep"]
    assert skipped == ["mlx-lm: not installed (pip install mlx-lm)"]


def test_llama_cpp_gets_its_file_requantised_once(
    smollm2_gguf: Path, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    setup = Setup(str(small_folder), small_folder, "cpu", 1)
    found, skipped = find_variants(["llama.cpp"], setup, smollm2_gguf, progress=False)
    assert skipped == []
    assert [each.weights for each in found] == ["Q4_1", "Q4_0", "Q8_0"]
    made = found[1].file
    assert made is not None
    assert weights_of(made) == "Q4_0"
    before = made.stat().st_mtime_ns
    assert requantised(smollm2_gguf, "Q4_0", 1) == made
    assert made.stat().st_mtime_ns == before
    assert len(list((tmp_path / "bench").iterdir())) == 2


def test_names_written_out_for_help_are_those_that_exist() -> None:
    assert tuple(PARTS_BY_NAME) == PARTS
    assert tuple(PACKAGES) == PEERS
