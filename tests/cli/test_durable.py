"""Sessions and prompts in files: a restored one continues as if it never stopped."""

import fcntl
import json
import os
import pty
import resource
import shutil
import signal
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from full_disk import small_files_only
from safetensors.torch import load_file, save_file
from timeouts import PATIENCE

from kvkeep import Snapshot
from kvkeep.models.hub.source import DEFAULT_MODEL
from kvkeep.session.conversation import turn_numbers

GREEDY = ["--temperature", "0", "--repetition-penalty", "1"]
TEXT = "One two three four five six seven eight nine ten big small."
PROMPT = b"\x1b[?2004h"  # from here on the terminal marks pasted text (bracketed paste)
QUIET = ["--no-progress", "--ignore-eos"]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _saved(home: Path, name: str) -> Snapshot:
    return Snapshot.load(home / "sessions" / f"{name}.kvkeep")


def _require_same(one: Snapshot, other: Snapshot) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert torch.equal(one.logits, other.logits)
    assert one.sampler == other.sampler
    assert one.cells == other.cells


def _refused(result, *said: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("kvkeep: error: ")
    for text in said:
        assert text in lines[0]


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
    _require_same(_saved(home, "s"), _saved(home, "whole"))
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
    _require_same(_saved(home, "s"), _saved(home, "whole"))


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
    assert _saved(home, "s").tokens.tolist() == _saved(home, "whole").tokens.tolist()


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
    assert _saved(home, "s").tokens.tolist() == _saved(home, "whole").tokens.tolist()


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
    replace(_saved(home, "s"), model=name).save(file)
    assert invoke("sessions", "import", file, "t").exit_code == 0
    assert invoke("sessions", "verify", "t").exit_code == 0
    for command in (
        *(["generate", "--restore-prompt", file], ["generate", "--session", "t"]),
        *(["chat", "--session", "t"], ["chat", "-c"], ["sessions", "fork", "t", "u", "--at", 9]),
    ):
        _refused(invoke(*command), repr(name), *([] if "~" in name else ["pass it with --model"]))
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
    assert _saved(home, "s").policy["keep"] == 13
    assert invoke(*asked, "--keep", 6, "--max-kv-size", 24).exit_code == 0
    assert _saved(home, "s").policy["keep"] == 6
    assert invoke(*asked, "--keep", -1).exit_code == 0
    assert _saved(home, "s").policy["keep"] == 13
    invoke(*asked)
    assert _saved(home, "s").policy["keep"] == 13
    before = _saved(home, "s").tokens.tolist()
    _refused(invoke(*asked, "--keep", 24), "found 24")
    _refused(invoke(*asked, "--max-kv-size", 32), "--max-kv-size is 32", "saved with 24")
    _refused(invoke(*asked, "--policy", "full"), "--policy is full", "saved with sliding")
    _refused(invoke(*asked, "--dtype", "bfloat16"), "float32 saved, bfloat16 loaded")
    assert _saved(home, "s").tokens.tolist() == before


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
    _refused(invoke("generate", "-p", "x", *arguments, "-m", "no-such-model"), said)
    assert not home.exists()


# Interrupted


def test_ctrl_c_saves_the_generated_text(invoke, tiny, home, ctrl_c_at) -> None:
    asked = [*QUIET, "--max-kv-size", 24, "--temperature", 1, "--seed", 3, *tiny]
    ctrl_c_at(30)
    interrupted = invoke("generate", "--session", "s", "-p", TEXT, "-n", -1, *asked)
    assert interrupted.exit_code == 130
    assert "session s saved" in interrupted.stderr.splitlines()[-1]
    count = len(_saved(home, "s").tokens) - 13
    assert count > 0
    invoke("generate", "--session", "s", "-n", 5, *asked)
    invoke("generate", "--session", "whole", "-p", TEXT, "-n", count + 5, *asked)
    _require_same(_saved(home, "s"), _saved(home, "whole"))


def _wait_for(happened) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_closed_pipe_loses_nothing(start, tiny, home) -> None:
    process = start("generate", "--session", "s", "-p", TEXT, "-n", -1, *QUIET, *tiny)
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 141
    assert len(_saved(home, "s").tokens) > 13


def test_a_full_memory_saves_the_generated_text(invoke, tiny, home) -> None:
    asked = ["--policy", "full", "--max-kv-size", 20, *QUIET, *tiny]
    assert invoke("generate", "--session", "s", "-p", TEXT, *asked).exit_code == 2
    assert len(_saved(home, "s").tokens) == 20
    _refused_prompt = invoke("generate", "--session", "new", "-p", TEXT * 3, *asked)
    _refused(_refused_prompt, "at most 20 tokens")
    assert not (home / "sessions" / "new.kvkeep").exists()


def test_a_session_in_use_is_refused(start, invoke, tiny, home) -> None:
    process = start("chat", "--session", "s", *tiny)
    _wait_for((home / "sessions" / ".s.lock").exists)
    for command in (["generate", "-p", "x"], ["chat"]):
        result = invoke(*command, "--session", "s", "-m", "no-such-model")
        _refused(result, "session 's' is in use by another process")
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
    _refused(invoke("generate", "--session", "s", "-n", 2, *tiny), said, str(file))
    _refused(invoke("chat", "--session", "s", *tiny, input="Hi\n"), said, str(file))
    _refused(invoke("generate", "--restore-prompt", file, "-n", 2, *tiny), said, str(file))
    assert file.read_bytes() == bad


def test_another_model_is_refused(invoke, tiny, tiny_folder, tmp_path: Path, home) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 0.001
    save_file(tensors, other / "model.safetensors")
    invoke("generate", "--session", "s", "-p", TEXT, "-n", 2, *tiny)
    before = (home / "sessions" / "s.kvkeep").read_bytes()
    _refused(invoke("generate", "--session", "s", "-m", other), "the weights differ")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    _refused(invoke("generate", "--session", "s", "-m", other), "the rope differs")
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


# Prompts in files


def test_a_restored_prompt_equals_an_evaluated_one(invoke, tiny, tmp_path: Path) -> None:
    file, report = tmp_path / "prompt.kvkeep", tmp_path / "report.json"
    cached = invoke("generate", "-p", "One two three", "--cache-prompt", file, *tiny)
    assert cached.stdout == ""
    assert f"{file} saved" in cached.stderr
    whole = invoke("generate", "-p", "One two three four five", "-n", 20, *GREEDY, *tiny).stdout
    asked = ["generate", "--restore-prompt", file, "-n", 20, *GREEDY, "--report", report]
    assert invoke(*asked, "-p", " four five").stdout == whole
    figures = json.loads(report.read_text())
    assert (figures["prompt_tokens"], figures["reused_tokens"]) == (2, 3)
    before = file.read_bytes()
    assert invoke(*asked, input=" four five").stdout == whole
    assert invoke(*asked).stdout not in ("", whole)
    assert json.loads(report.read_text())["prompt_tokens"] == 0
    assert file.read_bytes() == before


def test_a_codec_without_a_basis_is_refused_before_the_prompt_is_evaluated(
    invoke, tiny, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.kvkeep"
    options = [*tiny, "--prompt", "Hello there.", "--cache-prompt", file, "--codec", "small"]
    result = invoke("generate", *options)
    assert result.exit_code == 2
    assert "need a basis of this model" in result.stderr
    assert "tok/s" not in result.stderr
    assert not file.exists()


def test_codecs_trade_size_for_exactness(invoke, tiny, tmp_path: Path) -> None:
    sizes, texts, report = {}, {}, tmp_path / "report.json"
    for codec in ("exact", "none", "zstd", "int8"):
        file = tmp_path / codec
        options = ["--codec", codec, "--report", report]
        invoke("generate", "-p", TEXT * 40, "--cache-prompt", file, *options, *tiny)
        sizes[codec] = json.loads(report.read_text())["saved_bytes"]
        assert sizes[codec] == file.stat().st_size
        texts[codec] = invoke("generate", "--restore-prompt", file, "-n", 20, *GREEDY).stdout
    assert sizes["none"] > sizes["zstd"] > sizes["int8"]
    assert texts["none"] == texts["zstd"] == texts["exact"]


def test_a_file_that_is_not_a_snapshot_is_not_overwritten(invoke, tiny, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    _refused(invoke("generate", "-f", file, "--cache-prompt", file, *tiny), "is not a snapshot")
    assert file.read_text() == TEXT


def test_the_prefix_cache_is_used_and_the_first_difference_reported(
    invoke, tiny, tmp_path: Path
) -> None:
    report, words = tmp_path / "report.json", [f"word{n}" for n in range(300)]
    asked = ["generate", "-n", 8, "--prefix-cache", "--report", report, *GREEDY, *tiny]

    def run(text: str) -> tuple[str, str, dict]:
        result = invoke(*asked, "-p", text)
        return result.stdout, result.stderr, json.loads(report.read_text())

    text = " ".join(words)
    first, _, figures = run(text)
    total = figures["prompt_tokens"]
    assert (figures["reused_tokens"], figures["prefix_differs_at"]) == (0, 0)
    again, said, figures = run(text)
    stored = total // 256 * 256
    assert again == first
    assert (figures["reused_tokens"], figures["prompt_tokens"]) == (stored, total - stored)
    assert figures["prefix_differs_at"] is None
    assert f"reused {stored} tokens |" in said
    words[200] = "another"
    _, said, figures = run(" ".join(words))
    differs = figures["prefix_differs_at"]
    assert 256 <= figures["reused_tokens"] <= differs < total
    assert f"reused {figures['reused_tokens']} tokens, first differs at token {differs}" in said
    words[200] = "third"
    why = invoke("why", "-p", " ".join(words), *tiny)
    assert f"at token {differs:,}:" in why.stdout
    assert "word199>>> third word201" in " ".join(why.stdout.split("\n")).replace(" >>>", ">>> ")
    found = json.loads(invoke("why", "-p", " ".join(words), "--json", *tiny).stdout)
    assert found["differs_at"] == differs
    assert found["stored_tokens"] == figures["reused_tokens"]
    assert "begins with its first token" in invoke("why", "-p", "!" * 4000, *tiny).stdout
    assert "less than a block" in invoke("why", "-p", "Hello", *tiny).stdout


# Chats


CHAT = ["chat", "-n", 6, "--max-kv-size", 64, "--seed", 1, "--no-progress"]
SYSTEM = ["--system", "You speak of roses."]


def test_the_limit_of_checkpoints_is_saved(invoke, hybrid_folder: Path, home: Path) -> None:
    asked = ("generate", "--session", "s", "-n", 2, *QUIET, "-m", hybrid_folder)
    invoke(*asked, "-p", TEXT, "--checkpoints", "3MB")
    for given, expected in (((), 3_000_000), (("--checkpoints", "0"), 0), ((), 0)):
        assert invoke(*asked, *given).exit_code == 0
        assert _saved(home, "s").checkpoints.max_bytes == expected


def test_a_chat_resumes(invoke, tiny, home) -> None:
    invoke(*CHAT, *SYSTEM, "--session", "s", *tiny, input="One?\n")
    invoke(*CHAT, "-c", *tiny, input="Two?\n")
    invoke(*CHAT, *SYSTEM, "--session", "s", input="Three?\nFour?\n/undo\n")
    invoke(*CHAT, *SYSTEM, "--session", "w", *tiny, input="One?\nTwo?\nThree?\nFour?\n/undo\n")
    one, other = _saved(home, "s"), _saved(home, "w")
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.notes == other.notes
    assert torch.equal(one.logits, other.logits)
    assert turn_numbers(one.settings["spans"]) == [1, 2, 3]


def test_a_turn_can_be_undone_after_a_restart(invoke, tiny, home) -> None:
    asked = ["chat", "-n", 6, "--seed", 1, "--no-progress"]
    invoke(*asked, *SYSTEM, "--session", "s", *tiny, input="One?\n")
    tokens = _saved(home, "s").tokens.tolist()
    invoke(*asked, "-c", input="Two?\n")
    assert "1 turn left" in invoke(*asked, "-c", input="/undo\n").stderr
    assert _saved(home, "s").tokens.tolist()[: len(tokens)] == tokens
    invoke(*asked, "-c", input="/undo\n")
    invoke(*asked, "-c", input="One?\n")
    assert _saved(home, "s").tokens.tolist()[:20] == tokens[:20], "the system prompt is known still"


def test_the_latest_chat_is_continued_and_no_other_session(invoke, tiny, home) -> None:
    _refused(invoke("chat", "-c", input="Hi\n"), "no chat to continue")
    for name in ("a", "b", "a"):
        invoke(*CHAT, "--session", name, *tiny, input="Hi\n")
    invoke("generate", "--session", "text", "-p", TEXT, "-n", 1, *tiny)
    turns = turn_numbers(_saved(home, "a").settings["spans"])
    invoke(*CHAT, "-c", *tiny, input="Hi\n")
    assert turn_numbers(_saved(home, "a").settings["spans"]) == [*turns, turns[-1] + 1]
    _refused(invoke("chat", "-c", "--session", "a"), "use either it or --session")
    _refused(invoke("chat", "-c", *SYSTEM, input="Hi\n"), "--system must match")


def test_the_latest_chat_is_continued_past_a_damaged_file(invoke, tiny, home) -> None:
    for name in ("s", "newer"):
        invoke(*CHAT, "--session", name, *tiny, input="One?\n")
    damaged = home / "sessions" / "newer.kvkeep"
    damaged.write_bytes(damaged.read_bytes()[:100])
    done = invoke(*CHAT, "-c", *tiny, input="Two?\n")
    assert done.exit_code == 0, done.stderr
    assert f"skipped: {damaged}" in done.stderr
    assert turn_numbers(_saved(home, "s").settings["spans"]) == [1, 2]


def test_each_turn_is_saved_when_it_is_answered(start, invoke, tiny, home) -> None:
    process = start(*CHAT, "--session", "s", *tiny)
    file = home / "sessions" / "s.kvkeep"
    process.stdin.write(b"One?\n")
    process.stdin.flush()
    _wait_for(file.exists)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=PATIENCE)
    assert turn_numbers(_saved(home, "s").settings["spans"]) == [1]
    assert "session s saved" in invoke(*CHAT, "-c", input="Two?\n").stderr


def test_a_save_that_is_refused_or_fails_changes_nothing(invoke, tiny, home, tmp_path) -> None:
    """The other session is free for others, and the chat is saved where it was."""
    invoke(*CHAT, "--session", "one", *tiny, input="One?\n")
    (home / "sessions" / "two.kvkeep").symlink_to(tmp_path / "missing" / "file")
    typed = "One?\n/save one\n/save one\n/save two\n/save two\nTwo?\n/save\n"
    done = invoke(*CHAT, "--session", "kept", *tiny, input=typed)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("session one already exists") == 2
    assert done.stderr.count("could not be written (No such file or directory)") == 2
    assert turn_numbers(_saved(home, "kept").settings["spans"]) == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", [["chat"], ["generate", "-p", TEXT, "--ignore-eos"]])
def test_a_signal_during_an_answer_saves_the_partial_answer(
    invoke, tiny, home, command, number, ctrl_c_at
) -> None:
    asked = ["--session", "s", "-n", -1, "--temperature", 3, "--top-k", 0, "--max-kv-size", 64]
    ctrl_c_at(30, number)
    interrupted = invoke(*command, *asked, "--seed", 1, *tiny, input="Tell me a story.\n")
    assert interrupted.exit_code == 128 + number
    assert "session s saved" in interrupted.stderr.splitlines()[-1]
    assert len(_saved(home, "s").tokens) > 30


def _in_a_terminal() -> None:
    """Make standard input the controlling terminal of the process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("in_an_answer", [True, False])
def test_a_closed_terminal_loses_nothing(start, tiny, home, in_an_answer: bool) -> None:
    ours, theirs = pty.openpty()

    def read_until(wanted: bytes, least: int = 0) -> None:
        seen = b""
        while wanted not in seen or len(seen) < least:
            seen += os.read(ours, 1000)

    asked = ["chat", "--session", "s", "--temperature", 3, "--top-k", 0, "--seed", 1]
    asked += ["--max-kv-size", 64, *tiny]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    count = -1 if in_an_answer else 4
    process = start(*asked, "-n", count, "-q", **streams, preexec_fn=_in_a_terminal)
    os.close(theirs)
    read_until(PROMPT)
    os.write(ours, b"Tell me a story.\n")
    if in_an_answer:
        read_until(b"story", 400)
    else:
        read_until(PROMPT)
        os.write(ours, b"/pin last.question\n")
        read_until(b"is pinned")
    os.close(ours)
    # Which comes first, a read error, end of file or SIGHUP, depends on the system.
    assert process.wait(timeout=PATIENCE) in (129, 0, 2)
    assert len(_saved(home, "s").tokens) > 12
    assert in_an_answer or _saved(home, "s").memory.pins


def test_the_effects_of_chat_commands_are_saved(invoke, tiny, home) -> None:
    script = 'One?\nTwo?\n/pin 1\n/edit 1 "Uno?"\n/branch b\n/forget 2\nThree?\n'
    said = invoke(*CHAT, *SYSTEM, "--session", "s", *tiny, input=script).stderr
    assert "branch b is session s\nbranch main is session s-main\n" in said
    saved = _saved(home, "s")
    spans = saved.settings["spans"]
    assert turn_numbers(spans) == [1, 2]
    assert len(saved.memory.pins) == spans["turn 1"][1] - spans["turn 1"][0]
    said = invoke(*CHAT, "-c", input="/unpin 1\n/forget 2\n/memory\n").stderr
    assert "turn 1 is unpinned" in said
    assert turn_numbers(_saved(home, "s").settings["spans"]) == [1]
    assert not _saved(home, "s").memory.pins


def _turns(home: Path) -> dict[str, list[int]]:
    """The text of each session in the folder, except files that are being written."""
    names = [file.stem for file in (home / "sessions").glob("[!.]*.kvkeep")]
    return {name: turn_numbers(_saved(home, name).settings["spans"]) for name in names}


def test_every_branch_of_a_named_chat_is_saved(invoke, tiny, home) -> None:
    """Each is a session. The current one has the chat's name and no second copy."""
    script = "One?\n/branch b\nTwo?\n/branch ü.c\nThree?\n/switch main\nFour?\n/switch b\n"
    said = invoke(*CHAT, "--session", "s.x.y", *tiny, input=script).stderr
    expected = {"s.x.y": [1, 2], "s-x-y-main": [1, 2], "s-x-y--c": [1, 2, 3]}
    assert _turns(home) == expected
    for branch, name in [("b", "s.x.y"), ("main", "s-x-y-main"), ("ü.c", "s-x-y--c")]:
        assert said.count(f"branch {branch} is session {name}\n") == 1
    again = invoke(*CHAT, "--session", "s-x-y-main", input="/branch b\nFive?\n/branches\n")
    assert "* b     3 turns" in again.stderr
    invoke(*CHAT, "--continue", input="/undo\n/branch b\n")
    assert _turns(home) == expected | {
        "s-x-y-main": [1, 2],
        "s-x-y-main-main": [1, 2],
        "s-x-y-main-main-2": [1, 2],
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_saves_every_branch(start, tiny, home, number: int) -> None:
    process = start(*CHAT, "--session", "s", *tiny)
    process.stdin.write(b"One?\n/branch b\nTwo?\n/switch main\n")
    process.stdin.flush()
    expected = {"s": [1], "s-b": [1, 2]}
    _wait_for(lambda: (home / "sessions" / "s-b.kvkeep").exists() and _turns(home) == expected)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert _turns(home) == expected


def test_saving_a_chat_under_a_name_saves_its_branches(invoke, tiny, home) -> None:
    invoke(*CHAT, *tiny, input="One?\n/branch b\nTwo?\n/save s\nThree?\n")
    assert _turns(home) == {"s": [1, 2, 3], "s-main": [1]}


def test_a_branch_that_cannot_be_saved_is_named(invoke, tiny, home) -> None:
    invoke(*CHAT, "--session", "s", *tiny, input="One?\n")
    with small_files_only():
        said = invoke(*CHAT, "-c", input="/branch b\n").stderr
    assert "could not be written" in said
    assert "branch main is not saved\n" in said


def test_a_full_disk_does_not_end_a_chat(invoke, tiny, home) -> None:
    invoke(*CHAT, "--session", "s", *tiny, input="One?\n")
    before = (home / "sessions" / "s.kvkeep").read_bytes()
    with small_files_only():
        talked = invoke(*CHAT, "-c", input="Two?\nThree?\n")
    assert talked.exit_code == 2, "what was said is not on disk"
    assert talked.stdout.count("\n") >= 2
    assert talked.stderr.count("could not be written") == 3
    assert talked.stderr.splitlines()[-2].endswith(" | session s not saved")
    assert (home / "sessions" / "s.kvkeep").read_bytes() == before


def test_a_failed_save_is_retried_at_the_end(start, tiny, home, tmp_path: Path) -> None:
    def allow(size: int, process: int = 0) -> None:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    report = tmp_path / "report.json"
    process = start(
        *(*CHAT, "--session", "s", "--report", report, *tiny), preexec_fn=lambda: allow(9000)
    )
    process.stdin.write(b"One?\n")
    process.stdin.flush()
    assert b"could not be written" in process.stderr.readline()
    allow(resource.RLIM_INFINITY, process.pid)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "session s saved" in said.decode().splitlines()[-1]
    assert turn_numbers(_saved(home, "s").settings["spans"]) == [1]
    size = (home / "sessions" / "s.kvkeep").stat().st_size
    assert json.loads(report.read_text())["saved_bytes"] == size


def test_a_failed_last_save_is_not_reported_as_saved(start, tiny, home, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = start(*CHAT, "--session", "s", "--report", report, *tiny)
    process.stdin.write(b"One?\n")
    process.stdin.flush()
    _wait_for((home / "sessions" / "s.kvkeep").exists)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    _, said = process.communicate(b"Two?\n", timeout=PATIENCE)
    assert process.returncode == 2
    lines = said.decode().splitlines()
    assert lines[-2].endswith(" | session s not saved")
    assert "could not be written" in lines[-1]
    assert json.loads(report.read_text())["saved_bytes"] is None
    assert turn_numbers(_saved(home, "s").settings["spans"]) == [1]


def test_a_failing_prefix_cache_is_one_warning_and_costs_no_answer(
    invoke, tiny, tmp_path: Path, monkeypatch
) -> None:
    text = " ".join(f"word{n}" for n in range(300))
    asked = ["generate", "-n", 8, "-p", text, *GREEDY, *tiny]
    plain = invoke(*asked)
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path))
    (tmp_path / "prefixes").write_text("in the way")
    unusable = invoke(*asked, "--prefix-cache")
    (tmp_path / "prefixes").unlink()
    (tmp_path / "prefixes" / "lock").mkdir(parents=True)
    unwritable = invoke(*asked, "--prefix-cache")
    for result in (unusable, unwritable):
        assert (result.exit_code, result.stdout) == (0, plain.stdout)
        assert result.stderr.count("continuing without the prefix cache") == 1
