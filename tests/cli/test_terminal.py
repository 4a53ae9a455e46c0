"""The chat at an emulated terminal, key by key."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pexpect import ExceptionPexpect
from timeouts import PATIENCE

from kvkeep import Snapshot, load_model
from kvkeep.models.hub.library import home
from tools.terminal import Terminal

READY = "Ctrl-D ends"
HINT = "/quit ends the chat; /help lists"  # after Ctrl-C at an empty prompt
UP, TAB, CTRL_C, CTRL_D, CTRL_U, ALT_ENTER = "\x1b[A", "\t", "\x03", "\x04", "\x15", "\x1b\r"
Chat = Callable[..., Terminal]


@pytest.fixture
def own_home(tmp_path: Path) -> Path:
    place = tmp_path / "home"
    place.mkdir()
    for kind in ("models", "packed", "unpacked"):
        if (home() / kind).is_dir():
            (place / kind).symlink_to(home() / kind)
    return place


@pytest.fixture
def chat(tiny: list[str], own_home: Path) -> Iterator[Chat]:
    """Start a chat in a terminal and wait for its prompt."""
    begun = list[Terminal]()

    def call(*arguments: object, model: bool = True, **options: object) -> Terminal:
        chosen = [*tiny, "--seed", "1", "-n", "12", "--max-kv-size", "256"] if model else []
        terminal = Terminal(
            *("chat", "--no-progress", *chosen, *arguments),
            environment={"KVKEEP_HOME": str(own_home), "OMP_NUM_THREADS": "1"},
            **options,  # type: ignore[arg-type]
        )
        begun.append(terminal)
        terminal.wait(READY, PATIENCE)
        terminal.wait(" cells", PATIENCE)
        return terminal

    yield call
    for each in begun:
        try:
            each.process.close(force=True)
        except ExceptionPexpect:  # a killed process takes a while to end on a busy machine
            each.process.wait()


def said(terminal: Terminal, command: str, answer: str) -> str:
    """Run a chat command and return the screen after its response."""
    terminal.type(command, "\r")
    return terminal.wait(answer, PATIENCE)


def test_pasted_text_is_one_message(chat: Chat) -> None:
    """A pasted line that begins like a command is part of the message."""
    terminal = chat()
    terminal.paste("One thing.\n/clear\nAnd a third.")
    assert "0 turns" in terminal.text.splitlines()[-1]
    terminal.type("\r")
    terminal.wait("1 turn", PATIENCE)
    assert "removed" not in terminal.text
    said(terminal, "/edit 1 Hm.", "is replaced")
    terminal.paste("/undo\nis what they say.")
    terminal.type("\r")
    terminal.wait("2 turns", PATIENCE)
    assert "removed" not in terminal.text


def test_alt_enter_and_quotes_make_multiline_messages(chat: Chat) -> None:
    terminal = chat()
    terminal.type("First line", ALT_ENTER, "second line", "\r")
    terminal.wait("1 turn", PATIENCE)
    terminal.type('"""', "\r", "third", "\r", "fourth", '"""')
    assert "2 turns" not in terminal.text
    terminal.type("\r")
    terminal.wait("2 turns", PATIENCE)


def test_multiline_messages_are_shown_when_a_chat_resumes(chat: Chat) -> None:
    terminal = chat("--session", "s")
    terminal.type("First line", ALT_ENTER, "second line", "\r")
    terminal.wait("1 turn", PATIENCE)
    terminal.type('"""', "\r", "third", "\r", "fourth", '"""', "\r")
    terminal.wait("2 turns", PATIENCE)
    terminal.type(CTRL_D)
    assert terminal.ended(PATIENCE) == 0
    again = chat("--session", "s", model=False)
    assert "> third\n> fourth" in again.text
    said(again, "/undo", "removed")
    again.type(CTRL_D)
    assert again.ended(PATIENCE) == 0
    assert "> First line\n> second line" in chat("--session", "s", model=False).text


def test_the_next_chat_has_the_input_history(chat: Chat, own_home: Path) -> None:
    first = chat()
    said(first, "/set temperature 0.5", "temperature")
    first.type("Hello there", "\r")
    first.wait("1 turn", PATIENCE)
    first.type(CTRL_D)
    assert first.ended(PATIENCE) == 0
    second = chat()
    second.type(UP)
    second.wait("> Hello there", PATIENCE)
    second.type(UP)
    second.wait("> /set temperature 0.5", PATIENCE)
    assert (own_home / "history").stat().st_mode & 0o077 == 0, "nobody else reads it"


def test_ctrl_c_clears_a_line_and_prints_a_hint_on_an_empty_one(chat: Chat) -> None:
    terminal = chat()
    terminal.type("half a line", CTRL_C)
    assert "half a line" not in terminal.text
    terminal.type(CTRL_C)
    terminal.wait("/quit ends the chat; /help lists", PATIENCE)
    terminal.type(CTRL_C)
    terminal.wait("/quit ends the chat; /help lists", PATIENCE, times=2)
    terminal.type("/quit", "\r")
    assert terminal.ended(PATIENCE) == 0
    assert "generated 0 tokens" in terminal.text


def wait_for_rows(terminal: Terminal, count: int) -> None:
    """Wait until an answer has that many."""
    until = time.monotonic() + PATIENCE
    while terminal.text.rpartition("> Tell me all\n")[2].count("\n") < count:
        assert time.monotonic() < until, terminal.text
        terminal.settle(0.05)


def test_a_stopped_answer_stays_and_is_saved(chat: Chat) -> None:
    terminal = chat("-n", "-1", "--session", "s", "--max-kv-size", "64")
    terminal.type("Tell me all", "\r")
    terminal.settle(1.0)
    terminal.type(CTRL_C)
    terminal.wait("1 turn", PATIENCE)
    terminal.type(CTRL_D)
    assert terminal.ended(PATIENCE) == 0
    assert "session s saved" in terminal.text.replace("\n", "")


@pytest.mark.parametrize(
    ("keys", "size"),
    [("", (80, 24)), ("seen later", (31, 12)), ("\x7f\r\rsent\r", (80, 12))],
)
def test_a_stopped_answer_is_on_the_screen_once(
    chat: Chat, own_home: Path, tiny_folder: Path, keys: str, size: tuple[int, int]
) -> None:
    """Keys typed during an answer do not disturb it, and appear at the next prompt."""
    terminal = chat("-n", "-1", "--session", "s", "--max-kv-size", "4096", size=size)
    terminal.type("Tell me all", "\r")
    wait_for_rows(terminal, 5)
    terminal.type(*keys, CTRL_C)
    text = terminal.wait("[stopped]", PATIENCE)
    if keys.endswith("\r"):
        text = terminal.wait("> sent", PATIENCE)
        terminal.settle(0.1)
        terminal.type(CTRL_C)
        until = time.monotonic() + PATIENCE
        while terminal.text.count("[stopped]") < 2 and HINT not in terminal.text:
            assert time.monotonic() < until, terminal.text  # the answer may also end by itself
            terminal.settle(0.05)
    elif keys:
        text = terminal.wait(f"> {keys}", PATIENCE)
        terminal.type(CTRL_C)
    shown = text.partition("> Tell me all\n")[2].partition("\n[stopped]")[0]
    terminal.type(CTRL_U, CTRL_D)
    assert terminal.ended(PATIENCE) == 0
    model = load_model(str(tiny_folder), dtype="float32")
    session = model.restore(Snapshot.load(own_home / "sessions" / "s.kvkeep"))
    start, end = session.span_ranges["turn 1 answer"]
    answer = model.text.decode(session.tokens[start:end], skip_special=True)
    assert end - start > 20
    assert shown == drawn(answer, 100_000, True, size=size).text.removesuffix("\nended")


@pytest.mark.parametrize("at_once", [True, False])
def test_ctrl_c_right_after_enter_stops_the_message(chat: Chat, at_once: bool) -> None:
    """Even while the terminal still treats Ctrl-C as a key. The message can be edited."""
    terminal = chat("-n", "-1", "--max-kv-size", "64")
    if at_once:
        terminal.process.send(f"A message\rlater{CTRL_C}")
    else:
        terminal.process.send("A message\r")
        terminal.process.send(CTRL_C)
    terminal.wait("[stopped]", PATIENCE)
    terminal.type(CTRL_U, "/quit", "\r")
    assert terminal.ended(PATIENCE) == 0


def test_two_ctrl_cs_do_not_end_a_chat(chat: Chat, own_home: Path) -> None:
    """The second one may come while the stopped answer is being saved."""
    terminal = chat("-n", "-1", "--session", "s", "--max-kv-size", "64")
    for times in (1, 2):
        terminal.type("Tell me all", "\r")
        terminal.settle(0.1)
        terminal.process.send(CTRL_C * 3)
        terminal.wait("[stopped]", PATIENCE, times=times)
        terminal.wait(" turn", PATIENCE)
    terminal.type(CTRL_U, CTRL_D)
    assert terminal.ended(PATIENCE) == 0


# Runs a program, reports the terminal's echo once Ctrl-Z stopped it, and continues it.
SHELL = """
import os, sys
report = "stty -a | grep -ow -e -*echo >> \\"$0\\""
script = f'"$@"; {report}; fg > /dev/null; {report}'
os.execvp("bash", ["bash", "-m", "-c", script, sys.argv[1], sys.executable, *sys.argv[2:]])
"""


def test_ctrl_z_restores_the_terminal_for_the_shell(chat: Chat, tmp_path: Path) -> None:
    """Including echo. Typed keys are held back again when the chat continues."""
    reports = tmp_path / "echo"  # a file: the continued answer is drawn over what the shell prints

    def wait_until(holds: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < until, terminal.text
            terminal.settle(0.05)

    def reported(lines: str) -> bool:
        return reports.exists() and reports.read_text() == lines

    program = ("-c", SHELL, str(reports), "-m", "kvkeep")
    terminal = chat("-n", "-1", "--max-kv-size", "64", program=program)
    terminal.type("Tell me all", "\r")
    question = terminal.text
    wait_until(lambda: terminal.text != question)  # until the answer is there
    terminal.settle(0.1)
    terminal.type("\x1a")
    wait_until(lambda: reported("echo\n"))
    stopped = terminal.text
    wait_until(lambda: terminal.text != stopped)  # until the answer continues
    terminal.type("seen later", CTRL_C)
    text = terminal.wait("> seen later", PATIENCE)
    assert text.count("seen later") == 1
    terminal.type(CTRL_C, CTRL_D)
    wait_until(lambda: reported("echo\necho\n"))


def test_an_interrupted_question_is_offered_for_editing(chat: Chat) -> None:
    """Here a question that does not fit."""
    terminal = chat("--policy", "full", "--max-kv-size", "128")
    question = "What is this all about? " * 20
    terminal.type(question, "\r")
    terminal.wait("holds at most 128 tokens", PATIENCE)
    assert "> What is this all about?" in terminal.text.partition("holds at most")[2]
    assert "0 turns" in terminal.text
    terminal.type(CTRL_U, CTRL_C, "Hm", "\r")
    terminal.wait("1 turn", PATIENCE)


def test_tab_completes_commands_turns_settings_and_files(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "notes of mine.txt").write_text("The sea is wide.")
    terminal = chat("--system", "Be.")
    terminal.type("Hello", "\r")
    terminal.wait("1 turn", PATIENCE)
    terminal.type("/reg", TAB)
    terminal.wait("> /regenerate", PATIENCE)
    terminal.type(CTRL_C, "/pin 1.", TAB)
    terminal.wait("1.question", PATIENCE)
    assert "1.answer" in terminal.text
    terminal.type("q", TAB)
    terminal.wait("> /pin 1.question", PATIENCE)
    terminal.type("\r")
    terminal.wait("is pinned", PATIENCE)
    terminal.type("/set mark", TAB)
    terminal.wait("> /set markdown", PATIENCE)
    terminal.type(" of", TAB)
    terminal.wait("> /set markdown off", PATIENCE)
    terminal.type("\r")
    terminal.wait("markdown            off", PATIENCE)
    terminal.type(f"/file {tmp_path}/not", TAB)
    assert "mine.txt" in "".join(terminal.text.split()), "where a long path goes on in the next row"
    terminal.type(" What is wide?", "\r")
    terminal.wait("2 turns", PATIENCE)
    terminal.type(f'/file "{tmp_path}/notes o', TAB, '" What is wide?', "\r")
    terminal.wait("3 turns", PATIENCE)


def test_paths_are_messages_and_unknown_commands_are_errors(chat: Chat) -> None:
    terminal = chat()
    said(terminal, "/regenrate", "did you mean /regenerate?")
    assert "0 turns" in terminal.text
    terminal.type("/usr/bin/env is a path", "\r")
    terminal.wait("1 turn", PATIENCE)
    terminal.type("/file /nowhere/at/all", "\r")
    terminal.wait("No such file", PATIENCE)
    terminal.type("/file", "\r")
    terminal.wait("needs the path of a text", PATIENCE)


def test_a_question_longer_than_the_memory_is_a_warning(chat: Chat) -> None:
    terminal = chat("--max-kv-size", "64")
    terminal.type("Hello", "\r")
    terminal.wait("1 turn", PATIENCE)
    terminal.paste("The sea is wide. " * 60)
    terminal.type("\r")
    text = terminal.wait("2 turns", PATIENCE).replace("\n", "")
    assert "the cache was too small for this question" in text
    assert "and the 1 turn before it" in text


def test_regenerate_clear_save_and_set(chat: Chat, own_home: Path) -> None:
    terminal = chat("--system", "Be brief.", "--temperature", "1.5")
    said(terminal, "/regenerate", "there is no answer to")
    terminal.type("Hello there", "\r")
    terminal.wait("1 turn", PATIENCE)
    said(terminal, "/save", "use /save NAME")
    terminal.type("/regenerate", "\r")
    terminal.settle(1.0)
    answer = terminal.text.rpartition("> /regenerate\n")[2].partition("\n>")[0]
    assert len(answer.strip()) > 5
    assert "1 turn" in terminal.text.splitlines()[-1]
    said(terminal, "/save kept", "session kept saved")
    assert (own_home / "sessions" / "kept.kvkeep").exists()
    said(terminal, "/clear", "all turns are removed")
    assert "0 turns" in terminal.text.splitlines()[-1]
    said(terminal, "/set temperature -1", "temperature must be")
    said(terminal, "/set top-k x", "top-k must be a whole number; found 'x'")
    said(terminal, "/set top-k", "top-k must be a whole number")
    said(terminal, "/set temperatures 1", "did you mean temperature?")
    said(terminal, "/set bar off", "bar                 off")
    terminal.type("Again", "\r")
    terminal.settle(1.0)
    assert " turn" not in terminal.text.splitlines()[-1]
    terminal.type(CTRL_D)
    assert terminal.ended(PATIENCE) == 0
    again = chat("--session", "kept", model=False)
    assert "> Again" in again.text
    assert "Hello there" not in again.text


def test_the_memory_bar_is_updated(chat: Chat) -> None:
    terminal = chat()
    assert "0 of 256 cells" in terminal.text.splitlines()[-1]
    terminal.type("Hello", "\r")
    terminal.wait("1 turn", PATIENCE)
    assert "0 of 256 cells" not in terminal.text.splitlines()[-1]
    assert terminal.text.splitlines()[-1][0] in "█░"
    said(terminal, "/branch side", "now on branch side")
    assert "branch side" in terminal.text.splitlines()[-1]


def test_invalid_bytes_do_not_end_a_chat(chat: Chat) -> None:
    terminal = chat()
    terminal.process.send(b"\xe9t\xe9 \xff")
    terminal.type("\r")
    terminal.settle(1.0)
    terminal.type("Hello", "\r")
    terminal.wait("turn", PATIENCE)
    terminal.type(CTRL_D)
    assert terminal.ended(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_prompt_saves_and_ends(chat: Chat, own_home: Path, number: int) -> None:
    terminal = chat("--session", "s")
    terminal.type("Hello", "\r")
    terminal.wait("1 turn", PATIENCE)
    os.kill(terminal.process.pid, number)
    assert terminal.ended(PATIENCE) == 128 + number
    assert (own_home / "sessions" / "s.kvkeep").exists()


TEXT = """\
# A title

Some **bold** words and a line that is longer than the terminal is wide: it has to be broken.

1. one
2. two

```python
print("a fence")

print("with an empty line in it")
```

| a | b |
|---|---|
| 1 | 2 |

The \x1b[2Jend."""
WRITES = """
import json, sys
from kvkeep.cli.chat.printer import make_printer
text, size, markdown = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "yes"
shown = make_printer(markdown)
for at in range(0, len(text), size):
    shown.write(text[at : at + size])
shown.end()
print("ended")
"""


def drawn(text: str, piece: int, markdown: bool, size: tuple[int, int] = (60, 24)) -> Terminal:
    """The screen after a text was written in pieces of that many characters."""
    terminal = Terminal(
        # As JSON, since an argument cannot hold a null byte.
        *(json.dumps(text), piece, "yes" if markdown else "no"),
        program=("-c", WRITES),
        size=size,
    )
    assert terminal.ended(PATIENCE) == 0
    return terminal


@pytest.mark.parametrize("rows", [6, 40])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_rendered_as_markdown_in_any_pieces(size: int, rows: int) -> None:
    """In pieces or at once, and longer than the screen: no line appears twice."""
    text = drawn(TEXT, size, True, (60, rows)).text
    assert text == drawn(TEXT, 1000, True, (60, 40)).text
    assert "**" not in text
    assert "```" not in text
    for words in ("A title", "a fence", "with an empty line", " 2 two", "ended"):
        assert text.count(words) == 1
    assert "─" in text or "━" in text, "a table"
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_plain_answers_are_wrapped_at_words(size: int) -> None:
    text = drawn(TEXT, size, False).text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    assert text.replace("\n", " ").split() == f"{TEXT} ended".replace("\x1b", "").split()
    assert drawn("x" * 150, size, False).text.replace("\n", "") == "x" * 150 + "ended"


LINES = """
import os, sys, time
from kvkeep.cli.chat.printer import make_printer
shown, columns = make_printer(True), os.get_terminal_size().columns
for word in sys.argv[1:]:
    shown.write(word + " ")
    time.sleep(0.1)
    while word == "resized" and os.get_terminal_size().columns == columns:
        shown.write("")  # the last redraw may have been too slow for one more
        time.sleep(0.1)
shown.end()
"""
WIDE = [
    "\u2764\ufe0f" * 3,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u6d77\u5f88\u5bbd" * 7,
    "e\u0301t\u00e9",
]


@pytest.mark.parametrize("columns", [20, 33])
def test_wide_characters_are_drawn_once(columns: int) -> None:
    """Also if the terminal counts them as wider than the preview was rendered for."""
    words = [word for _ in range(8) for word in WIDE]
    terminal = Terminal(*words, program=("-c", LINES), size=(columns, 40))
    assert terminal.ended(PATIENCE) == 0
    whole = Terminal(" ".join(words), program=("-c", LINES), size=(columns, 40))
    assert whole.ended(PATIENCE) == 0
    assert terminal.text == whole.text


@pytest.mark.parametrize("columns", [21, 60])
def test_a_plain_text_without_spaces_fills_its_lines(columns: int) -> None:
    """In a script of wide characters; one that does not fit moves to the next line."""
    text = drawn("\u6d77" * 200, 3, False, (columns, 40)).text.splitlines()
    assert [len(line.replace(" ", "")) for line in text[: 200 // (columns // 2)]] == [
        columns // 2
    ] * (200 // (columns // 2))


def test_a_narrowed_terminal_shows_each_line_once() -> None:
    """The terminal cuts lines off, as xterm and pyte do."""
    words = [f"word{number:02}" for number in range(30)]
    environment = {"COLUMNS": "", "LINES": "", "XTERM_VERSION": "XTerm(390)"}
    terminal = Terminal(
        *(*words, "resized", *words), program=("-c", LINES), environment=environment
    )
    with terminal:
        terminal.wait("resized", PATIENCE)
        terminal.screen.resize(24, 60)
        terminal.process.setwinsize(24, 60)
        assert terminal.ended(PATIENCE) == 0
        assert [terminal.text.count(word) for word in words] == [2] * 30
