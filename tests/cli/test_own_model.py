"""Models of the user: GGUF files, names for them, and repositories of the hub."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import gguf
import pytest
from cli.conftest import Invoke, Start
from hub_server import HubServer
from tiny_gguf import tiny_llama, write_gguf

import kvkeep
from kvkeep.models.hub.library import pulled_models
from kvkeep.models.hub.names import named_models

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }} {{ message['content'] }}<|stop|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    def add_template(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template(TEMPLATE)

    return write_gguf(tmp_path / "file.gguf", tiny_llama(num_hidden_layers=1), edit=add_template)


def listed(invoke: Invoke, *command: str) -> dict[str, dict[str, object]]:
    return {row["name"]: row for row in json.loads(invoke(*command, "--json").stdout)}


def test_chat_with_a_gguf_file_uses_its_tokenizer_and_template(invoke: Invoke, file: Path) -> None:
    chat = ("chat", "-m", "./file.gguf", "--max-tokens", 3, "--session", "talk")
    answered = invoke(*chat, input="hello\n")
    assert answered.exit_code == 0, answered.stderr
    shown = invoke("sessions", "show", "talk").stdout
    assert "<|start|>user hello<|stop|><|start|>assistant " in shown
    assert f"model    {file}" in shown


def test_a_spinner_is_shown_for_loading_and_not_for_fetching(
    invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch has progress bars, which a spinner would break up."""
    shown: list[bool] = []

    def spinner(label: str, shown_now: bool) -> AbstractContextManager[None]:
        shown.append(shown_now)
        return nullcontext()

    monkeypatch.setattr("kvkeep.cli.model_options.spinner", spinner)
    for _ in range(2):
        assert invoke("generate", "-m", file, "-p", "hello", "-n", 1).exit_code == 0
    assert shown == [False, True]


def test_an_unknown_name_lists_added_names(invoke: Invoke, file: Path) -> None:
    invoke("models", "add", "mine", file)
    assert "a name (smollm2-135m-instruct, mine)" in invoke("pull", "mnie").stderr


def test_added_name_is_taken_in_the_place_of_a_file(
    invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    added = invoke("models", "add", "mine", "file.gguf")
    assert (added.exit_code, added.stdout) == (0, f"mine is {file}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    options = ("-p", "hello", "-n", 2, "--session", "s")
    assert invoke("generate", "-m", "mine", *options).exit_code == 0
    assert invoke("generate", "-m", "mine", *options).exit_code == 0
    assert kvkeep.load_model("mine").folder == kvkeep.load_model(str(file)).folder
    assert "LlamaForCausalLM" in invoke("models", "show", "mine").stdout
    assert [model.source for model in pulled_models()] == [str(file)]


def test_model_folder_with_a_name_is_read_in_place(
    invoke: Invoke, tiny_folder: Path, own_home: Path
) -> None:
    assert invoke("models", "add", "mine", tiny_folder).exit_code == 0
    assert kvkeep.load_model("mine").folder == tiny_folder
    assert not (own_home / "models").exists()


def test_list_shows_size_and_last_use(invoke: Invoke, file: Path, own_home: Path) -> None:
    invoke("models", "add", "mine", file)
    for path in (own_home / "names").iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    assert "1970-01-01" in invoke("models", "list").stdout
    assert "1970-01-01" not in invoke("models").stdout
    kvkeep.load_model("mine")
    rows = listed(invoke, "models", "list")
    assert rows["mine"]["bytes"] == file.stat().st_size
    assert rows["mine"]["folder"] == str(file)
    assert rows["mine"]["used"] > 1e9
    (stored,) = pulled_models()
    os.utime(stored.path, (0, 0))
    kvkeep.load_model(str(file))
    assert listed(invoke, "models", "list")[str(file)]["used"] > 1e9
    assert rows["smollm2-135m-instruct"]["used"] is None
    assert invoke("models").stdout.split("\n")[0].split() == ["NAME", "SIZE", "SOURCE", "FOLDER"]


def test_name_whose_file_is_gone_says_so(invoke: Invoke, file: Path) -> None:
    invoke("models", "add", "mine", file)
    file.unlink()
    refused = invoke("generate", "-m", "mine", "-p", "x")
    assert refused.exit_code == 2
    assert f"mine points to {file}, which does not exist" in refused.stderr
    assert "(gone)" in invoke("models", "list").stdout
    assert invoke("models", "rm", "mine").exit_code == 0
    assert named_models() == {}


def test_rm_of_an_added_name_leaves_its_file_and_conversion(invoke: Invoke, file: Path) -> None:
    invoke("models", "add", "mine", file)
    kvkeep.load_model("mine")
    assert invoke("models", "rm", "mine").stdout == f"removed the name mine; {file} remains\n"
    assert file.exists()
    assert len(pulled_models()) == 1
    assert invoke("models", "rm", "file.gguf").stdout.startswith(f"removed {file}, ")
    assert pulled_models() == []


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x.gguf", "a:b", "-x", "a" * 101])
def test_invalid_names_are_refused(invoke: Invoke, file: Path, name: str) -> None:
    refused = invoke("models", "add", "--", name, file)
    assert refused.exit_code == 2
    assert "is not a valid model name" in refused.stderr


def test_name_that_is_taken_is_refused(invoke: Invoke, file: Path, tiny_folder: Path) -> None:
    invoke("models", "add", "mine", file)
    refused = invoke("models", "add", "mine", tiny_folder)
    assert refused.exit_code == 2
    assert f"mine is {file}; `kvkeep models rm mine` frees the name" in refused.stderr


def test_other_files_among_the_names_are_ignored(
    invoke: Invoke, file: Path, own_home: Path
) -> None:
    (own_home / "names").mkdir(parents=True)
    for name in (".DS_Store", "notes"):
        (own_home / "names" / name).write_text("")
    assert invoke("models", "add", "mine", file).exit_code == 0
    assert named_models().keys() == {"mine"}
    refused = invoke("models", "add", "notes", file)
    assert refused.exit_code == 2
    assert f"{own_home / 'names' / 'notes'} is not a link to a model" in refused.stderr


def test_repository_of_gguf_files_is_removed_by_its_name(
    hub: HubServer, invoke: Invoke, start: Start, tmp_path: Path, own_home: Path
) -> None:
    with hub:
        pull = start("pull", "owner/tiny", environment=environment(hub.url, tmp_path))
        _, messages = pull.communicate()
        assert pull.returncode == 0, messages
    assert [model.name for model in pulled_models()] == ["owner/tiny:Q4_K_M"]
    removed = invoke("models", "rm", "owner/tiny", "owner/tiny:Q4_K_M")
    assert removed.stdout.startswith("removed owner/tiny:Q4_K_M, ")
    assert removed.stdout.count("\n") == 1
    assert list((own_home / "models").iterdir()) == []


def test_only_models_can_have_a_name(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model")
    (tmp_path / "folder").mkdir()
    for path in ("notes.txt", "folder", "missing.gguf"):
        assert invoke("models", "add", "mine", path).exit_code == 2
    assert named_models() == {}


def test_name_of_the_default_model_may_be_given_to_a_file(invoke: Invoke, file: Path) -> None:
    assert invoke("models", "add", "smollm2-135m-instruct", file).exit_code == 0
    assert kvkeep.load_model().folder == kvkeep.load_model(str(file)).folder
    assert listed(invoke, "models")["smollm2-135m-instruct"]["folder"] == str(file)


def test_rm_asks_in_a_terminal(invoke: Invoke, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvkeep.load_model(str(file))
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda stream: True)
    assert invoke("models", "rm", file, input="n\n").exit_code == 130
    assert len(pulled_models()) == 1
    assert "Remove " in invoke("models", "rm", file, input="y\n").stdout
    assert pulled_models() == []
    kvkeep.load_model(str(file))
    assert "Remove " not in invoke("models", "rm", "--yes", file).stdout
    assert pulled_models() == []


def test_added_names_are_completed(invoke: Invoke, file: Path) -> None:
    invoke("models", "add", "mine", file)
    completion = subprocess.run(
        [sys.executable, "-c", "from kvkeep.cli.start import run; run()"],
        env=os.environ
        | {
            "COMP_WORDS": "kvkeep chat -m mi",
            "COMP_CWORD": "3",
            "_KVKEEP_COMPLETE": "bash_complete",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert completion.stdout == "plain,mine\n"


@pytest.fixture
def hub(tmp_path: Path, file: Path) -> HubServer:
    target = tmp_path / "hub" / "owner" / "tiny"
    target.mkdir(parents=True)
    shutil.copy(file, target / "tiny-Q4_K_M.gguf")
    shutil.copy(file, target / "tiny-Q8_0.gguf")
    return HubServer(tmp_path / "hub")


def environment(hub_url: str, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path / "cache")}


def test_commands_pull_a_gguf_file_from_the_hub(
    start: Start, hub: HubServer, tmp_path: Path, invoke: Invoke
) -> None:
    with hub:
        variables = environment(hub.url, tmp_path)
        pull = start("pull", "owner/tiny:q4_k_m", environment=variables)
        output, messages = pull.communicate()
        assert pull.returncode == 0, messages
        assert output.startswith(b"owner/tiny:q4_k_m is in ")
        chat = start("chat", "-m", "owner/tiny:Q8_0", "--max-tokens", "2", environment=variables)
        _, messages = chat.communicate(b"hello\n")
        assert chat.returncode == 0, messages
        wrong = start("generate", "-m", "owner/tiny:Q5", "-p", "x", environment=variables)
        assert b"owner/tiny has no Q5; the nearest is" in wrong.communicate()[1]
        assert wrong.returncode == 2
    assert hub.downloads == [("tiny-Q4_K_M.gguf", 0), ("tiny-Q8_0.gguf", 0)]
    assert invoke("models", "rm", "hf.co/owner/tiny:q8_0", "owner/tiny:Q4_K_M").exit_code == 0
    assert pulled_models() == []


def test_interrupted_pull_leaves_no_model(start: Start, hub: HubServer, tmp_path: Path) -> None:
    with hub:
        hub.cut_after = 0
        pull = start("pull", "owner/tiny:Q4_K_M", environment=environment(hub.url, tmp_path))
        assert b"Pull 'owner/tiny' again" in pull.communicate()[1]
    assert pulled_models() == []
