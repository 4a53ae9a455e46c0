"""`kvkeep chat --server`: a chat in a session on a server."""

import re
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cli.conftest import Invoke
from server.conftest import RunningServer, running_server, without_saved_revision
from timeouts import PATIENCE

from kvkeep.cli.chat.remote_conversation import RemoteChatSession
from kvkeep.cli.chat.settings import SERVER_LIMITS
from kvkeep.client import Client
from kvkeep.model import Model
from tools.terminal import Terminal

TALK = "What is the capital of France?\n/pin 1.answer\nAnd of Italy?\n/memory\n"
TALK += "/regenerate\n"
GREEDY = ("--temperature", 0, "--repetition-penalty", 1.1, "--system", "You are terse.")


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(smollm2, tmp_path_factory.mktemp("server")) as found:
        yield found


def test_a_remote_chat_prints_the_same_as_a_local_one(
    invoke: Invoke, server: RunningServer
) -> None:
    """Its commands behave the same, too."""
    here = invoke("chat", *GREEDY, "--prefill-step", 128, "--max-kv-size", 2048, input=TALK)
    there = invoke("chat", "--server", server.url, *GREEDY, input=TALK)
    assert there.exit_code == here.exit_code == 0
    assert there.stdout == here.stdout
    assert "Rome" in there.stdout
    for said in ("the answer of turn 1 is pinned", "pinned"):
        assert said in there.stderr
        assert said in here.stderr


def test_a_remote_chat_is_compacted(invoke: Invoke, server: RunningServer) -> None:
    talk = "Write down that the gate code is 4711, and the harbour code 1147.\nWhy?\n/compact 90\n"
    options = ("--policy", "full", "--max-kv-size", 512, "-n", 24)
    result = invoke("chat", "--server", server.url, *options, input=talk)
    assert result.exit_code == 0, result.output
    assert re.search(r"older part compressed .* → \d\d; freed [\d.]+ MB", result.stderr)


def test_a_named_chat_resumes(invoke: Invoke, server: RunningServer) -> None:
    first = ("chat", "--server", server.url, "--session", "kept", *GREEDY)
    assert invoke(*first, "--max-kv-size", 512, input="What is the capital of France?\n").stdout
    again = invoke(*first[:-2], input="And of Italy?\n/undo\n/undo\n/undo\n")
    assert "Rome" in again.stdout
    assert "there is no turn to remove" in again.stderr
    with Client(server.url) as client:
        info = client.session("kept").info()
        assert info["max_kv_size"] == 512
    refused = invoke(*first, "--max-kv-size", 1024, input="Hello.\n")
    assert refused.exit_code == 2
    assert "--max-kv-size is 1024, but session kept has 512" in refused.stderr
    same = ("--policy", "sliding", "--max-kv-size", 512, "--keep", 4)
    assert "tokens" in invoke(*first, *same, "-n", 2, input="Hello.\n/memory\n").stderr


def test_an_unnamed_chat_is_deleted_with_its_branches(
    invoke: Invoke, server: RunningServer
) -> None:
    with Client(server.url) as client:
        another = client.create()
        another.feed("Hello.")
        before = [without_saved_revision(each) for each in client.sessions()]
        talk = 'Hello.\n/branch side\nAnd more.\n/branches\n/edit "more" less\n/switch main\n'
        talked = invoke("chat", "--server", server.url, *GREEDY, "-n", 8, input=talk)
        assert talked.exit_code == 0
        assert "* side: session s-" in talked.stderr
        assert '"more" in the question of turn 2 is replaced' in talked.stderr
        another.save()  # as the server does by itself after a while
        assert [without_saved_revision(each) for each in client.sessions()] == before


def test_every_branch_of_a_named_chat_is_saved(invoke: Invoke, server: RunningServer) -> None:
    """Branches get names derived from the chat's; temporary sessions are deleted."""
    asked = ("chat", "--server", server.url, "--session", "named", *GREEDY, "-n", 4)
    with Client(server.url) as client:
        before = {each["name"] for each in client.sessions()}
        talked = invoke(*asked, input="Hello.\n/branch side\nAnd more.\n")
        assert {each["name"] for each in client.sessions()} - before == {"named", "named-side"}
        assert "branch main is session named\nbranch side is session named-side\n" in talked.stderr
        assert "turn 2" in client.session("named-side").info()["spans"]
        assert "turn 2" not in client.session("named").info()["spans"]


def test_a_chat_that_cannot_be_saved_under_a_name_leaves_no_session(
    invoke: Invoke, smollm2: Model, tmp_path: Path
) -> None:
    with running_server(smollm2, tmp_path) as server:
        chat = ("chat", "--server", server.url, "-n", 2)
        invoke(*chat, input="Hi.\n/save kept\n")
        (saved,) = tmp_path.rglob("kept.kvkeep")
        saved.with_name("blocked.kvkeep").symlink_to(tmp_path / "missing" / "file")
        talked = invoke(*chat, input="Hi.\n/save blocked\nOk?\n")
        assert "blocked" in talked.stderr
        assert "now in session" not in talked.stderr
        with Client(server.url) as client:
            assert [entry["name"] for entry in client.sessions()] == ["kept"]


@pytest.mark.parametrize(
    "option",
    ["--model=x", "--prefix-cache", "--weights=bf16", "--continue", "--checkpoints=1MB"],
)
def test_options_for_a_local_model_are_refused(
    invoke: Invoke, server: RunningServer, option: str
) -> None:
    refused = invoke("chat", "--server", server.url, option, input="Hello.\n")
    assert refused.exit_code == 2
    assert f"{option.partition('=')[0]} cannot be used with --server" in refused.stderr


def test_variables_for_commands_of_this_machine_do_not_matter(
    invoke: Invoke, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("s" * 32)
    monkeypatch.setenv("KVKEEP_STORE", str(tmp_path))
    monkeypatch.setenv("KVKEEP_SECRET_FILE", str(tmp_path / "secret"))
    talked = invoke("chat", "--server", server.url, "-n", 2, input="Hello.\n")
    assert talked.exit_code == 0, talked.stderr
    refused = invoke("chat", "--server", server.url, "--store", tmp_path, input="Hello.\n")
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://localhost:80x80", "not the address of a server"), ("PAGES", "not a kvkeep server")],
)
def test_what_is_no_kvkeep_server_is_an_error(invoke: Invoke, url: str, said: str) -> None:
    class Page(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as pages:
        thread = Thread(target=pages.serve_forever)
        thread.start()
        url = url.replace("PAGES", f"http://127.0.0.1:{pages.server_port}")
        try:
            refused = invoke("chat", "--server", url, input="Hello.\n")
        finally:
            pages.shutdown()
            thread.join()
    assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr


def test_a_key_that_is_not_ascii_is_named(
    invoke: Invoke, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_API_KEY", "cl\u00e9")
    refused = invoke("chat", "--server", server.url, input="Hello.\n")
    assert (refused.exit_code, "$KVKEEP_API_KEY" in refused.stderr) == (2, True)


@pytest.mark.parametrize("name", SERVER_LIMITS)
def test_settings_beyond_the_limits_of_a_server_are_refused_at_once(
    invoke: Invoke, server: RunningServer, name: str
) -> None:
    limit, option = SERVER_LIMITS[name], name.replace("_", "-")
    asked = ("chat", "--server", server.url, "-n", 1)
    done = invoke(*asked, input=f"/set {option} {10 * limit}\nHello.\n")
    assert done.exit_code == 0, done.stderr
    assert f"{option} must be at most {limit:,}" in done.stderr
    refused = invoke(*asked, f"--{option}", 10 * limit, input="Hello.\n")
    assert refused.exit_code == 2
    assert f"{option} must be at most {limit:,}" in refused.stderr


def test_settings_at_the_limits_of_a_server_are_accepted(
    invoke: Invoke, server: RunningServer
) -> None:
    limits = {**SERVER_LIMITS, "max_tokens": 1}
    lines = [f"/set {name.replace('_', '-')} {value}\n" for name, value in limits.items()]
    done = invoke("chat", "--server", server.url, input="".join([*lines, "Hello.\n"]))
    assert done.exit_code == 0, done.stderr
    assert "must be" not in done.stderr


def test_an_unreachable_server_is_an_error(invoke: Invoke) -> None:
    refused = invoke("chat", "--server", "http://127.0.0.1:1", input="Hello.\n")
    assert refused.exit_code != 0
    assert "no response from http://127.0.0.1:1" in refused.stderr


def test_a_saved_chat_keeps_its_branches(
    invoke: Invoke, server: RunningServer, tmp_path: Path
) -> None:
    (tmp_path / "word.txt").write_text("The word is lighthouse.")
    with Client(server.url) as client:
        before = {each["name"] for each in client.sessions()}
        talk = f"Hello.\n/file {tmp_path}/word.txt What is the word?\n/branch side\n/save later\n"
        talk += "/regenerate\n/save\n"
        talked = invoke("chat", "--server", server.url, *GREEDY, "-n", 12, input=talk)
        assert talked.exit_code == 0, talked.stderr
        assert "now in session later" in talked.stderr
        assert "session later is saved on the server" in talked.stderr
        *_, answer, again = talked.stdout.splitlines()
        assert answer == again, "the likeliest tokens, both times"
        assert {each["name"] for each in client.sessions()} - before == {"later", "later-main"}
        assert "branch main is session later-main\n" in talked.stderr
        spans = client.session("later").memory()["spans"]
        assert {"turn 1 answer", "turn 2 answer"} <= spans.keys()


def test_a_regenerated_answer_leaves_the_pins_of_its_question(
    invoke: Invoke, server: RunningServer
) -> None:
    asked = ("chat", "--server", server.url, "--session", "pinned", *GREEDY, "-n", 4)
    assert invoke(*asked, input="Hello.\n/pin 1.question\n/regenerate\n").exit_code == 0
    with Client(server.url) as client:
        memory = client.session("pinned").memory()
    question, runs = memory["spans"]["turn 1 question"], memory["runs"]
    pinned = [run["start"] for run in runs if run["standing"] == "pinned"]
    assert pinned == [question["start"]]


def test_a_cleared_chat_keeps_its_system_prompt(invoke: Invoke, server: RunningServer) -> None:
    """Also in a chat that is resumed by name."""
    first = (
        "chat",
        "--server",
        server.url,
        "--session",
        "bare",
        "--temperature",
        0,
        "--repetition-penalty",
        1.1,
        "-n",
        8,
    )
    system = ("--system", "You are terse.", "--max-kv-size", 128)
    assert invoke(*first, *system, input="Hello.\n").exit_code == 0
    again = invoke(*first, input="Tell me more.\nAnd more.\n/clear\nHello.\n")
    assert "all turns are removed" in again.stderr
    with Client(server.url) as client:
        session = client.session("bare")
        text = "".join(piece["text"] for piece in session.text()["pieces"])
        assert text.count("You are terse.") == 1
        assert text.count("Hello.") == 1
        assert "Tell me more." not in text


def test_an_edited_system_prompt_is_that_of_a_cleared_chat(
    invoke: Invoke, server: RunningServer
) -> None:
    """With tabs behind the command's words, too."""
    talk = "Hi\n/edit\tsystem\tSpeak of pears.\n/clear\nHi\nHi\n"
    options = ("--server", server.url, "--session", "edited", "--temperature", 0, "-n", 4)
    first = invoke("chat", *options, "--system", "Speak of figs.", input=talk)
    assert first.exit_code == 0, first.output
    invoke("chat", *options, input="/clear\nHi\n")
    with Client(server.url) as client:
        session = client.session("edited")
        text = "".join(piece["text"] for piece in session.text()["pieces"])
    assert "Speak of pears." in text
    assert "figs" not in text


@pytest.fixture
def small_steps(smollm2: Model, tmp_path: Path) -> Iterator[RunningServer]:
    """Run a server in whose steps a token has the bits that it has alone."""
    settings = {"max_kv_size": 2048, "prefill_step": 16}
    with running_server(smollm2, tmp_path / "small-steps", settings=settings) as found:
        yield found


def test_in_a_terminal(small_steps: RunningServer, tmp_path: Path) -> None:
    """The prompt, bar and memory map are those of a local chat."""
    options = ("--server", small_steps.url, "--temperature", "0", "-n", "12", "--session", "seen")
    home = {"KVKEEP_HOME": str(tmp_path)}
    with Terminal("chat", *options, environment=home) as terminal:
        terminal.wait("0 of 2,048 cells", PATIENCE)
        terminal.paste("What is the capital\n/clear\nof France?")
        terminal.type("\r")
        while not re.search(r"\b[1-9]\d* of 2,048 cells", terminal.text):
            terminal.settle()
        terminal.type("/pin 1.")
        text = terminal.complete("1.question", PATIENCE)
        assert "all turns are removed" not in text
        answer = text.partition("of France?\n")[2].partition("\n")[0]
        assert len(answer) > 10
        terminal.type("\x03", "/regenerate", "\r")
        terminal.wait(answer, PATIENCE, times=2)
        terminal.settle()
        terminal.type("\x04")
        assert terminal.ended(PATIENCE) == 0
    with Terminal("chat", *options, environment=home) as terminal:
        terminal.wait("> What is the capital", PATIENCE)
        terminal.wait(answer, PATIENCE)


class CountedSession(RemoteChatSession):
    """A session on a server that notes which tokens were fetched."""

    fetched: tuple[tuple[int, int], ...] = ()

    def text(self, start: int = 0, end: int | None = None) -> Any:
        self.fetched += ((start, -1 if end is None else end),)
        return super().text(start, end)


def test_only_the_tokens_that_are_needed_are_fetched(server: RunningServer) -> None:
    """Their number needs none, however long the chat is."""
    ids = [5 + number % 900 for number in range(4100)]
    with Client(server.url) as client:
        session = CountedSession(client, client.create(max_kv_size=512).name)
        session.feed(ids)
        assert len(session.tokens) == 4100
        assert session.fetched == ()
        assert session.tokens[3:8] == ids[3:8]
        assert session.fetched == ((3, 8),)
        assert session.tokens[:] == ids
        client.delete(session.name)
