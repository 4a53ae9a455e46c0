"""`kvkeep launch`: clients get their settings and end as they would alone."""

import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cli.conftest import Invoke, Start
from server.conftest import RunningServer, running_server
from small_models import small_model
from timeouts import PATIENCE

from kvkeep.cli.launch.clients import CLIENTS
from kvkeep.cli.launch.clients import RunningServer as LaunchServer
from kvkeep.cli.launch.process import run_client
from kvkeep.cli.launch.server import find_server, serves
from kvkeep.model import Model
from kvkeep.models.hub.names import name_digest
from kvkeep.server.keys import ApiKeys
from kvkeep.storage.sessions.folder import SessionFolder

NAMES = sorted(CLIENTS)
NONE = "http://127.0.0.1:9"  # where no server is
KEY = "a-key-of-sixteen-1"

# A client that writes what it got to a file, and ends with status 7.
CLIENT = f"""#!{sys.executable}
import json, os, pathlib, sys
names = [word for word in [*sys.argv, *os.environ.values()] if "kvkeep-launch-" in word]
files = {{pathlib.Path(name).name: pathlib.Path(name).read_text() for name in names}}
seen = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files}}
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(seen))
sys.exit(7)
"""
# A client that waits for a signal, and ends with status 9 then.
WAITING_CLIENT = f"""#!{sys.executable}
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(9))
print("waits", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(smollm2, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a client under all names; return the file in which it writes what it got."""
    install_client(tmp_path, monkeypatch, CLIENT)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.json"))
    return tmp_path / "seen.json"


def install_client(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for client in CLIENTS.values():
        program = folder / "bin" / client.program
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_gets_the_address_and_the_model_of_a_running_server(
    name: str, invoke: Invoke, server: RunningServer, seen: Path
) -> None:
    result = invoke("launch", name, "--server", server.url, "--", "--flag", "a word")
    assert result.exit_code == 7, result.stderr
    got = json.loads(seen.read_text())
    assert got["arguments"][-2:] == ["--flag", "a word"]
    settings = json.dumps(got)
    assert server.url in settings
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["id"] in settings
    assert str(model["n_ctx"]) in settings or name == "openwebui"


def test_settings_of_codex_are_toml_and_those_of_opencode_json() -> None:
    server = LaunchServer("http://127.0.0.1:1", 'a "model" ü', 32_768)
    flags = CLIENTS["codex"].settings(server, Path("/nowhere")).arguments
    options = tomllib.loads("\n".join(flags[1::2]))
    assert options["model"] == server.model
    assert options["model_context_window"] == 32_768
    assert options["model_providers"]["kvkeep"]["base_url"] == "http://127.0.0.1:1/v1"
    environment = CLIENTS["opencode"].settings(server, Path("/nowhere")).environment
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"] or "")
    limit = config["provider"]["kvkeep"]["models"][server.model]["limit"]
    assert limit == {"context": 32_768, "output": 8_192}


@pytest.mark.parametrize("name", NAMES)
def test_the_printed_script_gives_a_client_the_same_settings(
    name: str, invoke: Invoke, server: RunningServer, seen: Path
) -> None:
    invoke("launch", name, "--server", server.url, "--", "a word")
    launched = json.loads(seen.read_text())
    script = invoke("launch", name, "--server", server.url, "--print", "--", "a word").stdout
    script = script.replace("/kvkeep-", "/kvkeep-launch-")
    done = subprocess.run(["/bin/sh", "-c", script], timeout=PATIENCE, check=False)
    assert done.returncode == 7
    printed = json.loads(seen.read_text())
    assert printed["files"] == launched["files"]

    for variable, value in launched["environment"].items():
        if os.environ.get(variable) != value and variable != "WEBUI_SECRET_KEY":
            assert printed["environment"][variable] == value or "/kvkeep-launch-" in value
    for first, second in zip(printed["arguments"], launched["arguments"], strict=True):
        assert first == second or "/kvkeep-launch-" in first


def test_the_script_of_another_model_starts_its_server_on_another_port(
    invoke: Invoke, server: RunningServer
) -> None:
    script = invoke("launch", "claude", "--server", server.url, "-m", "other", "--print").stdout
    assert "kvkeep serve --model other --port 8081" in script.splitlines()[0]
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:8081" in script


def test_the_script_without_a_server_says_how_to_start_one(invoke: Invoke) -> None:
    options = ("--server", "http://127.0.0.1:9", "-m", "some/model", "--serve", "--memory 8GB")
    script = invoke("launch", "claude", *options, "--print").stdout
    first, *rest = script.splitlines()
    assert first == (
        "# first, in another terminal: kvkeep serve --model some/model --port 8080 "
        "--context-policy refuse --memory 8GB"
    )
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:8080" in rest
    assert "export ANTHROPIC_MODEL=model" in rest
    assert "unset ANTHROPIC_API_KEY" in rest


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_is_missing_is_named_with_the_command_that_installs_it(
    name: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = invoke("launch", name, "--server", "http://127.0.0.1:9")
    assert result.exit_code == 2
    client = CLIENTS[name]
    assert f"{client.program} is not installed: run `{client.install}`" in result.stderr


@pytest.mark.extended
def test_a_server_is_started_for_the_client_and_stopped_after_it(
    invoke: Invoke, server: RunningServer, tiny_folder: Path, seen: Path
) -> None:
    """It is started too if the running one has another model."""
    options = ("--server", server.url, "-m", tiny_folder, "--serve", "--dtype float32 --alias own")
    result = invoke("launch", "claude", *options)
    assert result.exit_code == 7, result.stderr
    assert "not " + str(tiny_folder) in result.stderr
    environment = json.loads(seen.read_text())["environment"]
    assert environment["ANTHROPIC_MODEL"] == "own"
    with pytest.raises(httpx.ConnectError):
        httpx.get(environment["ANTHROPIC_BASE_URL"])


@pytest.mark.extended
def test_a_server_that_cannot_start_says_why(invoke: Invoke, tiny_folder: Path, seen: Path) -> None:
    options = ("-m", tiny_folder, "--server", "http://127.0.0.1:9", "--serve", "--memory 1KB")
    result = invoke("launch", "codex", *options)
    assert result.exit_code == 2
    assert "kvkeep serve did not start" in result.stderr
    assert "and --memory is" in result.stderr
    assert not seen.exists()


def test_options_of_the_server_with_an_open_quote_are_refused(invoke: Invoke) -> None:
    result = invoke("launch", "codex", "--serve", "--alias 'x")
    assert result.exit_code == 2
    assert "--serve" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_to_the_client(
    number: signal.Signals,
    start: Start,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_client(tmp_path, monkeypatch, WAITING_CLIENT)
    process = start("launch", "aider", "--server", server.url)
    assert process.stdout is not None
    assert process.stdout.readline() == b"waits\n"
    process.send_signal(number)
    assert process.wait(PATIENCE) == 9


@pytest.fixture(scope="module")
def keyed(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(smollm2, tmp_path_factory.mktemp("keyed"), ApiKeys([KEY])) as running:
        yield running


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "needs an API key: use --api-key"),
        (("--api-key", "wrong"), "needs another API key"),
        (("--api-key", "cl\u00e9"), "ASCII characters only"),
    ],
)
def test_a_client_without_the_servers_key_is_not_started(
    invoke: Invoke, keyed: RunningServer, seen: Path, options: tuple[str, ...], said: str
) -> None:
    result = invoke("launch", "aider", "--server", keyed.url, *options)
    assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert not seen.exists()
    result = invoke("launch", "aider", "--server", keyed.url, "--api-key", KEY)
    assert result.exit_code == 7, result.stderr
    environment = json.loads(seen.read_text())["environment"]
    assert environment["AIDER_OPENAI_API_KEY"] == KEY


def test_a_proxy_is_not_used_for_a_server_of_this_machine(
    invoke: Invoke, server: RunningServer, seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert invoke("launch", "aider", "--server", server.url).exit_code == 7


@pytest.mark.parametrize("url", ["http://localhost:80x80", "localhost:8080"])
def test_an_address_that_is_none_is_refused(invoke: Invoke, url: str) -> None:
    result = invoke("launch", "aider", "--server", url, "--print")
    assert result.exit_code == 2
    assert "not the address of a server" in result.stderr


@pytest.mark.parametrize("option", ["-q", "--quiet", "--alias x -q"])
def test_a_server_that_prints_no_address_is_refused(invoke: Invoke, option: str) -> None:
    result = invoke("launch", "codex", "--serve", option)
    assert (result.exit_code, "leave -q out" in result.stderr) == (2, True)
    script = invoke("launch", "codex", "--server", NONE, "--serve", "--alias -q", "--print")
    assert script.exit_code == 0


def test_models_are_compared_by_their_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name / "merged" for name in ("first", "second")]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    server = LaunchServer(NONE, "merged", name_digest=name_digest(str(folders[0])))
    assert serves(server, None)
    assert serves(server, "first/merged")
    assert serves(server, str(folders[0]))
    assert not serves(server, "second/merged")
    assert not serves(server, "owner/merged")
    assert serves(server, "merged")
    monkeypatch.chdir(folders[1].parent)
    assert not serves(server, "merged"), "the folder here is another one"
    of_owner = LaunchServer(NONE, "m:Q4_K_M", name_digest=name_digest("owner/m:Q4_K_M"))
    assert serves(of_owner, "owner/m:Q4_K_M")
    assert not serves(of_owner, "other/m:Q4_K_M")
    assert serves(LaunchServer(NONE, "alias/x", name_digest="0"), "alias/x")
    assert serves(LaunchServer(NONE, "merged"), "second/merged"), "an older server"


def test_a_server_says_under_which_name_its_model_was_loaded(server: RunningServer) -> None:
    found = find_server(server.url, None)
    assert found is not None
    assert found.name_digest == name_digest(server.service.model.name)


def test_a_server_is_started_beside_another_one(
    invoke: Invoke, tiny_folder: Path, seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its sessions apart, and accepts the key that is given."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    sessions = SessionFolder(tmp_path / "home" / "server" / "sessions" / "0")
    with sessions.lock("a") as path:
        small_model().session().snapshot().save(path)
        serve = f"--dtype float32 --api-key-file {keys}"
        options = ("--server", NONE, "-m", tiny_folder, "--api-key", KEY, "--serve", serve)
        result = invoke("launch", "claude", *options)
        assert result.exit_code == 7, result.stderr
        assert "another server uses kvkeep's folder" in result.stderr
        refused = invoke("serve", "-m", tiny_folder)
        assert refused.exit_code == 2
        assert f"another server uses the sessions in {tmp_path / 'home' / 'server'}" in (
            refused.stderr
        )
        assert "--store FOLDER" in refused.stderr
    assert json.loads(seen.read_text())["environment"]["ANTHROPIC_AUTH_TOKEN"] == KEY


@pytest.mark.parametrize("options", [(), ("--print",)])
@pytest.mark.parametrize(
    ("serve", "said"),
    [
        ("--nonsense -q", "--nonsense"),
        ("--memory nothing", "expected a size"),
        ("a-model", "unexpected argument"),
        ("--api-key-file nowhere", "nowhere"),
    ],
)
def test_options_that_the_server_does_not_have_are_refused(
    invoke: Invoke, serve: str, said: str, options: tuple[str, ...]
) -> None:
    result = invoke("launch", "codex", "--server", NONE, "--serve", serve, *options)
    assert result.exit_code == 2
    assert "--serve: " in result.stderr
    assert said in result.stderr
    assert result.stdout == ""


def test_a_printed_script_has_the_address_the_key_and_the_name_of_its_server(
    invoke: Invoke, tmp_path: Path
) -> None:
    """The options of the server give both; a server on all addresses is reached by loopback."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    serve = f"--port 9000 --host :: --alias own --api-key-file {keys} --max-kv-size 20000"
    options = ("--server", NONE, "--api-key", KEY, "--serve", serve)
    script = invoke("launch", "claude", *options, "--print").stdout
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:9000\n" in script
    assert f"export ANTHROPIC_AUTH_TOKEN={KEY}\n" in script
    assert "export ANTHROPIC_MODEL=own\n" in script
    assert "export CLAUDE_CODE_AUTO_COMPACT_WINDOW=20000\n" in script
    unknown = invoke("launch", "claude", "--server", NONE, "--serve", "--port 0", "--print")
    assert unknown.exit_code == 2
    assert "leave out --port 0" in unknown.stderr


def test_a_printed_server_has_a_store_of_its_own_beside_another_one(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    command = ("launch", "claude", "--server", NONE, "--print")
    assert "--store" not in invoke(*command).stdout.splitlines()[0]
    with SessionFolder(tmp_path / "home" / "server" / "sessions" / "0").lock("a") as path:
        small_model().session().snapshot().save(path)
        assert "--store" in invoke(*command).stdout.splitlines()[0]


def test_a_client_ignores_a_closed_terminal_if_its_parent_does() -> None:
    """Such as `nohup`."""
    exits_with = "import signal, sys; sys.exit(signal.getsignal(1) is signal.SIG_IGN)"
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_client([sys.executable, "-c", exits_with], {}) == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


# A client out of the terminal's reach: it counts the interrupts that are passed on to it.
COUNTING_CLIENT = f"""#!{sys.executable}
import os, signal, sys, time
os.setpgid(0, 0)
interrupts = []
signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + len(interrupts)))
print("waits", flush=True)
while True:
    time.sleep(600)
"""
# Starts the rest of its arguments in the foreground of the terminal that is its standard error.
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_ctrl_c_reaches_the_client_once_if_standard_input_is_no_terminal(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the terminal alone: it is not passed on besides."""
    install_client(tmp_path, monkeypatch, COUNTING_CLIENT)
    ours, theirs = pty.openpty()
    launch = ("-m", "kvkeep", "launch", "aider", "--server", server.url)
    with subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *launch],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        os.write(ours, b"\x03")
        echo = b""
        while b"^C" not in echo:  # which comes after the signals
            echo += os.read(ours, 1000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 40
    os.close(ours)
    os.close(theirs)
