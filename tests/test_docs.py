"""Every snippet of the README and of docs/ runs and prints the output that the page shows.

CI runs those of the README, the quickstart and the tutorials, and requires of all others that what
they name exists.
"""

import ast
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
from snippets import KINDS, Snippet, indented_code, snippets
from timeouts import PATIENCE
from topics import topic_text

import kvkeep
from kvkeep.cli.main import COMMANDS, main
from kvkeep.compiled.binding import kernel_library
from kvkeep.model import Model
from kvkeep.models.hub.library import home, store_model
from kvkeep.models.hub.source import DEFAULT_MODEL

ROOT = Path(__file__).parent.parent
PACKAGE = Path(kvkeep.__file__).parent  # not in ROOT where a release is tried
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [snippet for page in PAGES for snippet in snippets(page)]
# Programs of others, whose options are not checked.
INSTALLERS = (
    *(
        ".",
        "cd",
        "chmod",
        "curl",
        "docker",
        "export",
        "git",
        "openssl",
        "pip",
        "pipx",
        "python",
        "source",
    ),
    "uv",
    *("echo", "printf", "sed", "tail"),
)
SEA = "The sea is wide and the night is long. A light goes out, and another one comes on. " * 12


def snippets_of_kinds(*kinds: str, run: bool = True) -> Any:
    """Parametrize a test with the snippets of these kinds, by page and line."""
    chosen = [s for s in SNIPPETS if s.kind in kinds and (s.not_run is None) == run]
    return pytest.mark.parametrize("snippet", chosen, ids=lambda snippet: snippet.location)


def pages_with(kind: str) -> Any:
    chosen = [page for page in PAGES if any(s.page == page and s.kind == kind for s in SNIPPETS)]
    return pytest.mark.parametrize("page", chosen, ids=lambda page: page.name)


# What snippets name of other libraries.
OTHERS = (
    *("topics", "loads", "hexdigest", "reshape", "frombuffer", "astype", "from_bytes"),
    *("from_pretrained", "return_tensors", "past_key_values", "max_new_tokens", "min_new_tokens"),
    *("bfloat16", "cat", "no_grad", "equal", "topk"),
)


@pytest.fixture(scope="module")
def known_names() -> set[str]:
    """The functions, classes, parameters and attributes that kvkeep defines anywhere."""
    names = {name for kind in (str, bytes, dict, list, set) for name in dir(kind)} | set(OTHERS)
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
    return names


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
def test_every_snippet_has_a_known_kind(page: Path) -> None:
    assert indented_code(page) == []
    assert {snippet.kind for snippet in snippets(page)} <= set(KINDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_to_files(page: Path) -> None:
    """They are followed in the repository, too, where pages that the site generates are missing."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
    paths = [link for link in links if not re.match("[a-z]+:", link)]
    assert [path for path in paths if not (page.parent / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_sources_of_kernels_exist(page: Path) -> None:
    existing = {file.name for file in (PACKAGE / "compiled" / "src").iterdir()}
    named = set(re.findall(r"`(\w+\.(?:cpp|h))`", page.read_text(encoding="utf-8")))
    assert named <= existing


@pages_with("python")
def test_python_snippets_run(
    page: Path, folder: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippets of one page run in order in one namespace."""
    names: dict[str, Any] = {}
    for snippet in snippets(page):
        if snippet.kind == "python" and snippet.not_run is None:
            exec(snippet.before, names)
            code = "\n" * snippet.line + snippet.text
            capsys.readouterr()
            exec(compile(code, str(page), "exec"), names)
        if snippet.kind == "output":
            require_output(snippet.text.splitlines(), (capsys.readouterr().out,), snippet.location)


@snippets_of_kinds("python")
def test_what_python_snippets_name_exists(snippet: Snippet, known_names: set[str]) -> None:
    for node in ast.walk(ast.parse(snippet.text)):
        match node:
            case ast.Import(names=imported):
                for each in imported:
                    importlib.import_module(each.name)
            case ast.ImportFrom(module=str(module), names=imported):
                for each in imported:
                    assert hasattr(importlib.import_module(module), each.name)
            case ast.Attribute(value=ast.Name(id="kvkeep"), attr=name):
                assert hasattr(kvkeep, name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                assert name in known_names


@pytest.mark.parametrize(
    "snippet",
    [s for s in SNIPPETS if s.page.name == "README.md" and s.kind == "python" and not s.not_run],
    ids=lambda snippet: snippet.location,
)
def test_each_python_snippet_of_the_readme_runs_by_itself(
    snippet: Snippet, folder: Path, smollm2: Model
) -> None:
    """Each has a loaded model, and no variables of earlier snippets."""
    exec(snippet.before, names := {"kvkeep": kvkeep, "model": smollm2})
    exec(compile(snippet.text, snippet.location, "exec"), names)


@snippets_of_kinds("sh")
def test_shell_snippets_run(
    snippet: Snippet, folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model replaces the default one: the test checks that the commands run."""
    monkeypatch.setenv("KVKEEP_HOME", str(folder / "home"))
    (folder / "manual.txt").write_text(topic_text()[:17_500])

    def write_tiny_model(models: Path) -> None:
        shutil.copytree(tiny_folder, models, dirs_exist_ok=True)
        # One token in 32 ends a generation: the random model would rarely generate the real one.
        size = json.loads((models / "config.json").read_text())["vocab_size"]
        ends = {"eos_token_id": list(range(0, size, 32))}
        (models / "generation_config.json").write_text(json.dumps(ends))

    store_model(DEFAULT_MODEL, DEFAULT_MODEL, "tiny", write_tiny_model, progress=False)
    for command, _ in snippet.commands():
        run(command)


@pages_with("console")
def test_console_snippets_print_the_shown_output(
    page: Path, folder: Path, smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model runs them, with separate sessions and prefixes."""
    models = home() / "models"
    (folder / "home").mkdir()
    (folder / "home" / "models").symlink_to(models)
    monkeypatch.setenv("KVKEEP_HOME", str(folder / "home"))
    for snippet in snippets(page):
        if snippet.kind == "console" and snippet.not_run is None:
            for command, expected_lines in snippet.commands():
                fails = any(line.startswith("kvkeep: error") for line in expected_lines)
                require_output(expected_lines, run(command, fails), snippet.location)


@pytest.mark.parametrize(
    "snippet", [s for s in SNIPPETS if s.kind in ("sh", "console")], ids=lambda s: s.location
)
def test_commands_have_the_named_options(snippet: Snippet) -> None:
    for part in (part for whole, _ in snippet.commands() for part in whole.split("|")):
        words = shlex.split(part)
        if words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        elif words[0] == "kvkeep":
            command = COMMANDS[words[1]].load()
            if isinstance(command, click.Group) and words[2:]:
                command = command.get_command(click.Context(command), words[2]) or command
            require_options(command, words[2:])
        elif words[:2] == ["python", "-m"] and words[2] not in ("build", "venv"):
            require_options(command_of_module(words[2]), words[3:])
        else:
            assert words[0] in INSTALLERS


def command_of_module(module: str) -> click.Command:
    """The command that `python -m module` runs."""
    if hasattr(importlib.import_module(module), "__path__"):
        module += ".__main__"
    members = vars(importlib.import_module(module)).values()
    return next(value for value in members if isinstance(value, click.Command))


def require_options(command: click.Command, words: list[str]) -> None:
    known = {option for parameter in command.params for option in parameter.opts}
    own_words = words[: words.index("--")] if "--" in words else words
    flags = {word for word in own_words if word.startswith("--") and " " not in word}
    assert flags <= known


def run(command: str, fails: bool = False) -> tuple[str, str]:
    """Run a command. Returns its standard output, and its standard output and error together."""
    if set("|>") & set(command):
        shell = f'kvkeep() {{ "{sys.executable}" -m kvkeep "$@"; }}; set -e -o pipefail; {command}'
        process = subprocess.run(
            ["bash", "-c", shell], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert process.returncode == 0, process.stderr
        return process.stdout, process.stdout + process.stderr
    words = shlex.split(command)
    assert words.pop(0) == "kvkeep"
    typed = "Hi there.\n" if words[0] == "chat" else ""
    result = CliRunner().invoke(main, words, input=typed)
    assert result.exit_code == (2 if fails else 0), (command, result.output)
    return result.stdout, result.output


def require_output(lines: list[str], outputs: tuple[str, ...], location: str) -> None:
    """Require that one of the outputs matches these lines.

    `...` matches anything, at the end of a line also the indented lines below it, and a number
    matches any other number. Without lines, any output passes.
    Outputs are compared only where the kernels compute: torch rounds differently on other
    processors, which can change the generated text.
    """
    if not lines or kernel_library() is None:
        return
    pattern = r"\s*\n".join(any_figures(line) for line in lines)
    fits = [re.fullmatch(rf"{pattern}\s*", value.strip("\n")) for value in outputs]
    assert any(fits), f"{location} printed:\n{outputs[-1]}"


def any_figures(line: str) -> str:
    pattern = re.escape(line.rstrip()).replace(r"\.\.\.", ".*")
    if pattern.endswith(".*"):
        pattern += r"(\n +.*)*"
    pattern = re.sub(r"(\\ )+", " +", pattern)
    return re.sub(r"\d(\d|,|:|\\\.|\\-)*", r"[\\d,.:-]+", pattern)
