"""Chats that are saved after each answer, also beside signals and failing disks."""

import fcntl
import json
import os
import pty
import resource
import signal
import termios
from pathlib import Path

import pytest
import torch
from cli.durable import QUIET, TEXT, refused, saved, wait_for
from full_disk import small_files_only
from timeouts import PATIENCE

from kvkeep.session.turn_spans import turn_numbers

PROMPT = b"\x1b[?2004h"  # from here on the terminal marks pasted text (bracketed paste)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


CHAT = ["chat", "-n", 6, "--max-kv-size", 64, "--seed", 1, "--no-progress"]


SYSTEM = ["--system", "You speak of roses."]


def test_the_limit_of_checkpoints_is_saved(invoke, hybrid_folder: Path, home: Path) -> None:
    asked = ("generate", "--session", "s", "-n", 2, *QUIET, "-m", hybrid_folder)
    invoke(*asked, "-p", TEXT, "--checkpoints", "3MB")
    for given, expected in (((), 3_000_000), (("--checkpoints", "0"), 0), ((), 0)):
        assert invoke(*asked, *given).exit_code == 0
        assert saved(home, "s").checkpoints.max_bytes == expected


def test_a_chat_resumes(invoke, tiny, home) -> None:
    invoke(*CHAT, *SYSTEM, "--session", "s", *tiny, input="One?\n")
    invoke(*CHAT, "-c", *tiny, input="Two?\n")
    invoke(*CHAT, *SYSTEM, "--session", "s", input="Three?\nFour?\n/undo\n")
    invoke(*CHAT, *SYSTEM, "--session", "w", *tiny, input="One?\nTwo?\nThree?\nFour?\n/undo\n")
    one, other = saved(home, "s"), saved(home, "w")
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.notes == other.notes
    assert torch.equal(one.logits, other.logits)
    assert turn_numbers(one.settings["spans"]) == [1, 2, 3]


def test_a_turn_can_be_undone_after_a_restart(invoke, tiny, home) -> None:
    asked = ["chat", "-n", 6, "--seed", 1, "--no-progress"]
    invoke(*asked, *SYSTEM, "--session", "s", *tiny, input="One?\n")
    tokens = saved(home, "s").tokens.tolist()
    invoke(*asked, "-c", input="Two?\n")
    assert "1 turn left" in invoke(*asked, "-c", input="/undo\n").stderr
    assert saved(home, "s").tokens.tolist()[: len(tokens)] == tokens
    invoke(*asked, "-c", input="/undo\n")
    invoke(*asked, "-c", input="One?\n")
    assert saved(home, "s").tokens.tolist()[:20] == tokens[:20], "the system prompt is known still"


def test_the_latest_chat_is_continued_and_no_other_session(invoke, tiny, home) -> None:
    refused(invoke("chat", "-c", input="Hi\n"), "no chat to continue")
    for name in ("a", "b", "a"):
        invoke(*CHAT, "--session", name, *tiny, input="Hi\n")
    invoke("generate", "--session", "text", "-p", TEXT, "-n", 1, *tiny)
    turns = turn_numbers(saved(home, "a").settings["spans"])
    invoke(*CHAT, "-c", *tiny, input="Hi\n")
    assert turn_numbers(saved(home, "a").settings["spans"]) == [*turns, turns[-1] + 1]
    refused(invoke("chat", "-c", "--session", "a"), "use either it or --session")
    refused(invoke("chat", "-c", *SYSTEM, input="Hi\n"), "--system must be")


def test_the_latest_chat_is_continued_past_a_damaged_file(invoke, tiny, home) -> None:
    for name in ("s", "newer"):
        invoke(*CHAT, "--session", name, *tiny, input="One?\n")
    damaged = home / "sessions" / "newer.kvkeep"
    damaged.write_bytes(damaged.read_bytes()[:100])
    done = invoke(*CHAT, "-c", *tiny, input="Two?\n")
    assert done.exit_code == 0, done.stderr
    assert f"skipped: {damaged}" in done.stderr
    assert turn_numbers(saved(home, "s").settings["spans"]) == [1, 2]


def test_each_turn_is_saved_when_it_is_answered(start, invoke, tiny, home) -> None:
    process = start(*CHAT, "--session", "s", *tiny)
    file = home / "sessions" / "s.kvkeep"
    process.stdin.write(b"One?\n")
    process.stdin.flush()
    wait_for(file.exists)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=PATIENCE)
    assert turn_numbers(saved(home, "s").settings["spans"]) == [1]
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
    assert turn_numbers(saved(home, "kept").settings["spans"]) == [1, 2]


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
    assert len(saved(home, "s").tokens) > 30


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
    assert len(saved(home, "s").tokens) > 12
    assert in_an_answer or saved(home, "s").memory.pins


def test_the_effects_of_chat_commands_are_saved(invoke, tiny, home) -> None:
    script = 'One?\nTwo?\n/pin 1\n/edit 1 "Uno?"\n/branch b\n/forget 2\nThree?\n'
    said = invoke(*CHAT, *SYSTEM, "--session", "s", *tiny, input=script).stderr
    assert "branch b is session s\nbranch main is session s-main\n" in said
    of_chat = saved(home, "s")
    spans = of_chat.settings["spans"]
    assert turn_numbers(spans) == [1, 2]
    assert len(of_chat.memory.pins) == spans["turn 1"][1] - spans["turn 1"][0]
    said = invoke(*CHAT, "-c", input="/unpin 1\n/forget 2\n/memory\n").stderr
    assert "turn 1 is unpinned" in said
    assert turn_numbers(saved(home, "s").settings["spans"]) == [1]
    assert not saved(home, "s").memory.pins


def _turns(home: Path) -> dict[str, list[int]]:
    """The text of each session in the folder, except files that are being written."""
    names = [file.stem for file in (home / "sessions").glob("[!.]*.kvkeep")]
    return {name: turn_numbers(saved(home, name).settings["spans"]) for name in names}


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
    wait_for(lambda: (home / "sessions" / "s-b.kvkeep").exists() and _turns(home) == expected)
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
    assert turn_numbers(saved(home, "s").settings["spans"]) == [1]
    size = (home / "sessions" / "s.kvkeep").stat().st_size
    assert json.loads(report.read_text())["saved_bytes"] == size


def test_a_failed_last_save_is_not_reported_as_saved(start, tiny, home, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    process = start(*CHAT, "--session", "s", "--report", report, *tiny)
    process.stdin.write(b"One?\n")
    process.stdin.flush()
    wait_for((home / "sessions" / "s.kvkeep").exists)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    _, said = process.communicate(b"Two?\n", timeout=PATIENCE)
    assert process.returncode == 2
    lines = said.decode().splitlines()
    assert lines[-2].endswith(" | session s not saved")
    assert "could not be written" in lines[-1]
    assert json.loads(report.read_text())["saved_bytes"] is None
    assert turn_numbers(saved(home, "s").settings["spans"]) == [1]
