"""Every snippet of the README and of docs/ runs, and prints what the page says that it prints."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from patience import PATIENCE
from snippets import KINDS, Snippet, indented_code, snippets
from topics import topic_text

import kvkeep
from kvkeep.cli.main import COMMANDS, main
from kvkeep.compiled.binding import library
from kvkeep.model import Model
from kvkeep.models.hub.library import home, store_model
from kvkeep.models.hub.source import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]
SEA = "The sea is wide and the night is long. A light goes out, and another one comes on. " * 12


def of(*kinds: str, run: bool = True) -> Any:
    """Those of these kinds, by where they stand."""
    chosen = [s for s in SNIPPETS if s.kind in kinds and (s.not_run is None) == run]
    return pytest.mark.parametrize("snippet", chosen, ids=lambda snippet: snippet.where)


def pages_with(kind: str) -> Any:
    chosen = [page for page in PAGES if any(s.page == page and s.kind == kind for s in SNIPPETS)]
    return pytest.mark.parametrize("page", chosen, ids=lambda page: page.name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that snippets read."""
    (tmp_path / "manual.txt").write_text(topic_text()[:7000])
    (tmp_path / "sea.txt").write_text(SEA)
    (tmp_path / "ada.txt").write_text("My name is Ada.\n")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "The sea is"}\n' * 3)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "sea.txt").write_text(SEA)
    shutil.copy(ROOT / "docs" / "architecture.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_snippet_says_what_it_is(page: Path) -> None:
    assert indented_code(page) == []
    assert {snippet.kind for snippet in snippets(page)} <= set(KINDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sources_that_are_named_are_there(page: Path) -> None:
    there = {file.name for file in (ROOT / "kvkeep" / "compiled" / "src").iterdir()}
    named = set(re.findall(r"`(\w+\.(?:cpp|h))`", page.read_text(encoding="utf-8")))
    assert named <= there


@pages_with("python")
def test_python_runs(
    page: Path, folder: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of one page in one namespace, in their order."""
    names: dict[str, Any] = {}
    for snippet in snippets(page):
        if snippet.kind == "python" and snippet.not_run is None:
            exec(snippet.before, names)
            code = "\n" * snippet.line + snippet.text
            capsys.readouterr()
            exec(compile(code, str(page), "exec"), names)
        if snippet.kind == "output":
            require_said(snippet.text.splitlines(), (capsys.readouterr().out,), snippet.where)


@pytest.mark.parametrize(
    "snippet",
    [s for s in SNIPPETS if s.page.name == "README.md" and s.kind == "python" and not s.not_run],
    ids=lambda snippet: snippet.where,
)
def test_each_of_the_first_page_runs_by_itself(
    snippet: Snippet, folder: Path, smollm2: Model
) -> None:
    """Whoever tries one has a model, and nothing of those before it."""
    exec(snippet.before, names := {"kvkeep": kvkeep, "model": smollm2})
    exec(compile(snippet.text, snippet.where, "exec"), names)


@of("sh")
def test_commands_run(
    snippet: Snippet, folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model in the default one's place: they are about what can be said."""
    monkeypatch.setenv("KVKEEP_HOME", str(folder / "home"))
    (folder / "manual.txt").write_text(topic_text()[:17_500])

    def tiny(models: Path) -> None:
        shutil.copytree(tiny_folder, models, dirs_exist_ok=True)
        # One token in 32 ends an answer: it knows no words to end one with.
        size = json.loads((models / "config.json").read_text())["vocab_size"]
        ends = {"eos_token_id": list(range(0, size, 32))}
        (models / "generation_config.json").write_text(json.dumps(ends))

    store_model(DEFAULT_MODEL, DEFAULT_MODEL, "tiny", tiny, progress=False)
    for command, _ in snippet.commands():
        run(command)


@pages_with("console")
def test_commands_say_what_is_shown(
    page: Path, folder: Path, smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the default model; sessions and prefixes are the test's own."""
    models = home() / "models"
    (folder / "home").mkdir()
    (folder / "home" / "models").symlink_to(models)
    monkeypatch.setenv("KVKEEP_HOME", str(folder / "home"))
    for snippet in snippets(page):
        if snippet.kind == "console" and snippet.not_run is None:
            for command, said in snippet.commands():
                fails = any(line.startswith("kvkeep: error") for line in said)
                require_said(said, run(command, fails), snippet.where)


@of("sh", "console", run=False)
def test_commands_that_are_not_run_exist(snippet: Snippet) -> None:
    for command in (part for whole, _ in snippet.commands() for part in whole.split("|")):
        words = shlex.split(command)
        if words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        elif words[0] == "kvkeep":
            require_options(COMMANDS[words[1]].load(), words[2:])
        elif words[:2] == ["python", "-m"]:
            require_options(measurement(words[2]), words[3:])
        else:
            assert words[0] in ("pip", "git")


def measurement(module: str) -> click.Command:
    """The command that `python -m module` runs."""
    if hasattr(importlib.import_module(module), "__path__"):
        module += ".__main__"
    found = vars(importlib.import_module(module)).values()
    return next(each for each in found if isinstance(each, click.Command))


def require_options(command: click.Command, words: list[str]) -> None:
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def run(command: str, fails: bool = False) -> tuple[str, str]:
    """What it says to standard output, and to standard output and error together."""
    if set("|>") & set(command):
        shell = f'kvkeep() {{ "{sys.executable}" -m kvkeep "$@"; }}; set -e -o pipefail; {command}'
        done = subprocess.run(
            ["bash", "-c", shell], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stdout + done.stderr
    words = shlex.split(command)
    assert words.pop(0) == "kvkeep"
    result = CliRunner().invoke(main, words, input="Hi there.\n")
    assert result.exit_code == (2 if fails else 0), (command, result.output)
    return result.stdout, result.output


def require_said(lines: list[str], said: tuple[str, ...], where: str) -> None:
    """That these lines are one of what was said; `...` stands for anything, a figure for any other.

    Nothing shown: it is not said what is said. What the model writes is the same where the same
    kernels compute it, but for what hangs on the last bit of a prompt: that is the library's, which
    rounds otherwise on another processor.
    """
    if not lines or library() is None:
        return
    pattern = r"\s*\n".join(any_figures(line) for line in lines)
    fits = [re.fullmatch(rf"{pattern}\s*", each.strip("\n")) for each in said]
    assert any(fits), f"{where} printed:\n{said[-1]}"


def any_figures(line: str) -> str:
    pattern = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
    pattern = re.sub(r"(\\ )+", " +", pattern)
    return re.sub(r"\d(\d|,|:|\\\.|\\-)*", r"[\\d,.:-]+", pattern)
