"""Generated text in sessions that are saved: a resumed one continues as if it never stopped."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli.durable import GREEDY, QUIET, TEXT, refused, require_same, saved, wait_for
from full_disk import small_files_only
from safetensors.torch import load_file, save_file
from timeouts import PATIENCE

from kvkeep.models.hub.source import DEFAULT_MODEL


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# Resuming


def test_a_session_that_is_not_bit_exact_here_is_reported_in_one_line(invoke, tiny) -> None:
    first = ["generate", *tiny, *QUIET, "--session", "one", "-n", "3", "--max-kv-size", "24"]
    assert "bit-exactly" not in invoke(*first, "-p", TEXT).stderr
    again = ["generate", *QUIET, "--session", "one", "-n", "3", "-p", " So"]
    assert "bit-exactly" not in invoke(*again).stderr
    torch.set_num_threads(2)
    said = [line for line in invoke(*again).stderr.splitlines() if "bit-exactly" in line]
    assert len(said) == 1
    assert "threads: 1 saved, 2 here" in said[0]


@pytest.mark.parametrize("sampling", [GREEDY, ["--temperature", "1.5", "--seed", "7"]])
@pytest.mark.parametrize(
    "policy",
    [
        ["--max-kv-size", "24"],
        ["--policy", "shift", "--max-kv-size", "24", "--discard", "5"],
        ["--policy", "self_extend", "--group", "4", "--window", "16"],
        ["--policy", "full"],
    ],
    ids=lambda policy: policy[1],
)
def test_two_runs_equal_one_long_run(invoke, tiny, home, sampling, policy) -> None:
    asked = ["generate", *QUIET, *sampling, *policy, *tiny]
    first = invoke(*asked, "--session", "s", "-p", TEXT, "-n", 17)
    second = invoke(*asked, "--session", "s", "-n", 23)
    whole = invoke(*asked, "--session", "whole", "-p", TEXT, "-n", 40)
    assert first.stdout[:-1] + second.stdout[:-1] == whole.stdout[:-1]
    require_same(saved(home, "s"), saved(home, "whole"))
    assert "session s saved" in first.stderr
    assert "reused 30 tokens" in second.stderr


def test_a_new_process_continues_a_saved_session(start, invoke, tiny, home) -> None:
    """Model, dtype, budget and seed are those of the session; only its name is given."""
    asked = ["-p", TEXT, "--seed", 5, "--temperature", 1, "--max-kv-size", 16, *QUIET, *tiny]
    invoke("generate", "--session", "whole", "-n", 40, *asked)
    invoke("generate", "--session", "s", "-n", 20, *asked)
    process = start("generate", "--session", "s", "-n", 20, "--temperature", 1, *QUIET)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    require_same(saved(home, "s"), saved(home, "whole"))


def test_without_a_seed_a_session_continues_with_its_own(invoke, tiny, tmp_path: Path) -> None:
    seeds = []
    for prompt in (["-p", TEXT], []):
        report = tmp_path / "report.json"
        invoke("generate", "--session", "s", *prompt, "-n", 4, "--report", report, *tiny)
        seeds.append(json.loads(report.read_text())["seed"])
    assert seeds[0] == seeds[1]


def test_new_text_is_appended_to_a_saved_session(invoke, tiny, home) -> None:
    invoke("generate", "--session", "s", "-p", "One two", "-n", 0, *tiny)
    invoke("generate", "--session", "s", "-p", " three four", "-n", 0, input="not read")
    invoke("generate", "--session", "whole", "-p", "One two three four", "-n", 0, *tiny)
    assert saved(home, "s").tokens.tolist() == saved(home, "whole").tokens.tolist()


def test_piped_text_is_appended_to_a_saved_session(start, invoke, tiny, home) -> None:
    """An empty pipe is no text. A pipe to which nothing is written is waited for, and said so."""
    invoke("generate", "--session", "s", "-p", "One two", "-n", 0, *tiny)
    assert invoke("generate", "--session", "s", "-n", 0, input="").exit_code == 0
    invoke("generate", "--session", "s", "-n", 0, input=" three")
    process = start("generate", "--session", "s", "-n", 0)
    assert b"waiting for text on standard input" in process.stderr.readline()
    _, said = process.communicate(b" four", timeout=PATIENCE)
    assert process.returncode == 0, said
    invoke("generate", "--session", "whole", "-p", "One two three four", "-n", 0, *tiny)
    assert saved(home, "s").tokens.tolist() == saved(home, "whole").tokens.tolist()


def test_the_model_is_found_from_another_folder(invoke, tiny, tiny_folder, monkeypatch) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    invoke("generate", "--session", "s", "-p", TEXT, "-n", 1, "-m", tiny_folder.name)
    monkeypatch.chdir("/")
    assert invoke("generate", "--session", "s", "-n", 1).exit_code == 0


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "owner/other", "{home}/m.gguf", "~no-one/m"])
def test_a_session_file_never_causes_a_download_or_conversion(
    invoke, tiny, home, tmp_path, name
) -> None:
    """The model's name in a file is not trusted; only one given on the command line is."""
    invoke("chat", "--session", "s", "-n", 2, *tiny, input="Hi\n")
    (home / "m.gguf").write_bytes(b"GGUF")
    name, file = name.format(home=home), tmp_path / "theirs.kvkeep"
    replace(saved(home, "s"), model=name).save(file)
    assert invoke("sessions", "import", file, "t").exit_code == 0
    assert invoke("sessions", "verify", "t").exit_code == 0
    for command in (
        *(["generate", "--restore-prompt", file], ["generate", "--session", "t"]),
        *(["chat", "--session", "t"], ["chat", "-c"], ["sessions", "fork", "t", "u", "--at", 9]),
    ):
        refused(invoke(*command), repr(name), *([] if "~" in name else ["pass it with --model"]))
    assert repr(name) in invoke("sessions", "show", "t").stderr
    assert not (home / "models").exists()
    named = ["-m", tiny[1]]
    assert invoke("generate", "--restore-prompt", file, "-n", 1, *named).exit_code == 0
    assert invoke("chat", "--session", "t", *named, input="").exit_code == 0
    assert invoke("sessions", "fork", "t", "u", "--at", 9, *named).exit_code == 0
    assert "Hi" in invoke("sessions", "show", "t", *named).stdout


def test_the_model_of_a_session_need_not_be_named(
    invoke, smollm2_folder, monkeypatch, tmp_path
) -> None:
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / DEFAULT_MODEL).symlink_to(smollm2_folder)
    file = tmp_path / "saved.kvkeep"
    assert invoke("generate", "-p", "Hi", "--cache-prompt", file).exit_code == 0
    assert invoke("generate", "--restore-prompt", file, "-n", 1).exit_code == 0


def test_keep_can_be_changed_and_the_rest_cannot(invoke, tiny, home) -> None:
    asked = ["generate", "--session", "s", "-n", 2, *QUIET]
    invoke(*asked, "-p", TEXT, "--max-kv-size", 24, "--keep", -1, *tiny)
    assert saved(home, "s").policy["keep"] == 13
    assert invoke(*asked, "--keep", 6, "--max-kv-size", 24).exit_code == 0
    assert saved(home, "s").policy["keep"] == 6
    assert invoke(*asked, "--keep", -1).exit_code == 0
    assert saved(home, "s").policy["keep"] == 13
    invoke(*asked)
    assert saved(home, "s").policy["keep"] == 13
    before = saved(home, "s").tokens.tolist()
    refused(invoke(*asked, "--keep", 24), "found 24")
    refused(invoke(*asked, "--max-kv-size", 32), "--max-kv-size is 32", "saved with 24")
    refused(invoke(*asked, "--policy", "full"), "--policy is full", "saved with sliding")
    refused(invoke(*asked, "--dtype", "bfloat16", "-q"), "float32 saved, bfloat16 loaded")
    assert saved(home, "s").tokens.tolist() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--session", "../s"], "name must be"),
        (["--session", "s", "--cache-prompt", "x"], "leave out --cache-prompt"),
        (["--session", "s", "--restore-prompt", "x"], "leave out --cache-prompt"),
        (["--codec", "zstd"], "use --session, --cache-prompt"),
        (["--cache-prompt", "/no/such/folder/x"], "cannot be written"),
        (["--cache-prompt", "/dev/null"], "device"),
        (["--restore-prompt", "nothing-there"], "nothing-there cannot be read: No such file"),
        (["--cache-prompt", "x", "--codec", "rar"], "'rar' is not one of"),
        (["--prefix-cache", "--prefix-cache-bytes", 0], "expected a size"),
        (["--prefix-cache-bytes", "1GB"], "add --prefix-cache"),
        (
            ["--prefix-cache", "--prefix-cache-bytes", "1GB", "--store", "file:///tmp/x"],
            "limits a prefix cache in a folder",
        ),
    ],
)
def test_conflicting_options_are_refused_before_the_model_loads(
    invoke, home, arguments, said
) -> None:
    refused(invoke("generate", "-p", "x", *arguments, "-m", "no-such-model"), said)
    assert not home.exists()


# Interrupted


def test_ctrl_c_saves_the_generated_text(invoke, tiny, home, ctrl_c_at) -> None:
    asked = [*QUIET, "--max-kv-size", 24, "--temperature", 1, "--seed", 3, *tiny]
    ctrl_c_at(30)
    interrupted = invoke("generate", "--session", "s", "-p", TEXT, "-n", -1, *asked)
    assert interrupted.exit_code == 130
    assert "session s saved" in interrupted.stderr.splitlines()[-1]
    count = len(saved(home, "s").tokens) - 13
    assert count > 0
    invoke("generate", "--session", "s", "-n", 5, *asked)
    invoke("generate", "--session", "whole", "-p", TEXT, "-n", count + 5, *asked)
    require_same(saved(home, "s"), saved(home, "whole"))


def test_a_closed_pipe_loses_nothing(start, tiny, home) -> None:
    process = start("generate", "--session", "s", "-p", TEXT, "-n", -1, *QUIET, *tiny)
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 141
    assert len(saved(home, "s").tokens) > 13


def test_a_full_memory_saves_the_generated_text(invoke, tiny, home) -> None:
    asked = ["--policy", "full", "--max-kv-size", 20, *QUIET, *tiny]
    assert invoke("generate", "--session", "s", "-p", TEXT, *asked).exit_code == 2
    assert len(saved(home, "s").tokens) == 20
    _refused_prompt = invoke("generate", "--session", "new", "-p", TEXT * 3, *asked)
    refused(_refused_prompt, "at most 20 tokens")
    assert not (home / "sessions" / "new.kvkeep").exists()


def test_a_session_in_use_is_refused(start, invoke, tiny, home) -> None:
    process = start("chat", "--session", "s", *tiny)
    wait_for((home / "sessions" / ".s.lock").exists)
    for command in (["generate", "-p", "x"], ["chat"]):
        result = invoke(*command, "--session", "s", "-m", "no-such-model")
        refused(result, "session 's' is in use by another process")
    _, said = process.communicate(b"", timeout=PATIENCE)
    assert process.returncode == 0, said
    assert not (home / "sessions" / "s.kvkeep").exists(), "nothing was said, nothing is kept"


# Files that cannot be used


def _corrupt(content: bytes) -> bytes:
    return content[:-3000] + bytes([content[-3000] ^ 1]) + content[-2999:]


BAD = {
    "corrupt": (_corrupt, "corrupt"),
    "truncated": (lambda content: content[:-1], "truncated"),
    "no header": (lambda content: content[:40], "truncated"),
    "empty": (lambda content: b"", "not a kvkeep snapshot"),
    "foreign": (lambda content: b"GIF89a" + bytes(4000), "not a kvkeep snapshot"),
}


@pytest.mark.parametrize("harm", BAD)
def test_a_damaged_file_is_refused_and_left_unchanged(invoke, tiny, home, harm: str) -> None:
    invoke("generate", "--session", "s", "-p", TEXT, "-n", 2, *tiny)
    file = home / "sessions" / "s.kvkeep"
    change, said = BAD[harm]
    file.write_bytes(change(file.read_bytes()))
    bad = file.read_bytes()
    refused(invoke("generate", "--session", "s", "-n", 2, *tiny), said, str(file))
    refused(invoke("chat", "--session", "s", *tiny, input="Hi\n"), said, str(file))
    refused(invoke("generate", "--restore-prompt", file, "-n", 2, *tiny), said, str(file))
    assert file.read_bytes() == bad


def test_another_model_is_refused(invoke, tiny, tiny_folder, tmp_path: Path, home) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.001
    save_file(tensors, other / "model.safetensors")
    invoke("generate", "--session", "s", "-p", TEXT, "-n", 2, *tiny)
    before = (home / "sessions" / "s.kvkeep").read_bytes()
    refused(invoke("generate", "--session", "s", "-m", other), "the weights differ")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    refused(invoke("generate", "--session", "s", "-m", other), "the rope differs")
    assert (home / "sessions" / "s.kvkeep").read_bytes() == before


def test_a_failed_save_leaves_the_file_unchanged(invoke, tiny, home) -> None:
    invoke("generate", "--session", "s", "-p", TEXT, "-n", 2, *tiny)
    file = home / "sessions" / "s.kvkeep"
    before = file.read_bytes()
    with small_files_only():
        failed = invoke("generate", "--session", "s", "-n", 40, *QUIET)
    assert failed.exit_code == 2
    assert failed.stdout.strip()
    assert "could not be written (File too large)" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == [".s.lock", "s.kvkeep"]
