"""`kvkeep serve` as a subprocess: start, shutdown, and errors."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from timeouts import PATIENCE

from kvkeep.cli.main import main
from kvkeep.cli.options import parse_size
from kvkeep.cli.output import format_size
from kvkeep.loader import load_model

COMMAND = [sys.executable, "-c", "from kvkeep.cli.start import run; run()", "serve"]


@contextmanager
def serving(
    folder: Path, store: Path | str, *options: str, code: str = COMMAND[2]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address. code: what it runs."""
    command = [*COMMAND[:2], code, "serve", "--model", str(folder), "--port", "0"]
    command += ["--store", str(store), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, process.communicate()
        yield process, found.group()
    finally:
        process.kill()
        process.wait()


def refused(*options: str) -> str:
    """Return what the command says of wrong options; it runs in this process."""
    done = CliRunner().invoke(main, ["serve", *options])
    assert done.exit_code == 2, done
    return done.stderr


def test_the_server_answers_once_it_prints_its_address(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path, "--alias", "tiny") as (_, url):
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert model["id"] == "tiny"


@pytest.mark.parametrize("options", [(), ("-v",)], ids=["default", "verbose"])
def test_requests_are_logged_if_that_is_asked_for(
    tiny_folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    with serving(tiny_folder, tmp_path, *options) as (process, url):
        prompt = {"prompt": list(range(10, 40)), "max_tokens": 3, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=prompt, timeout=PATIENCE)
        httpx.get(f"{url}/no%0Asuch?key=secret")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    lines = [line for line in log.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)]
    if not options:
        assert lines == []
        return
    generation, completion, missing = (re.sub(r"[0-9.]+ s\b", "S s", line) for line in lines)
    assert "prompt 30 tokens, 0 of them cached; waited S s, prefill S s; 3 gen" in generation
    assert generation.endswith("; length")
    assert completion.endswith(" POST /v1/completions 200 S s")
    assert missing.endswith("GET /no\\nsuch 404 S s")


def test_quiet_and_verbose_exclude_each_other() -> None:
    assert "leave out --quiet or --verbose" in refused("-q", "-v")


def test_the_prefix_cache_stays_within_its_limit(tiny_folder: Path, tmp_path: Path) -> None:
    """Blocks of three prompts do not fit in the space of two."""
    prompts = [[10 + (number * step) % 190 for step in range(520)] for number in (1, 3, 7)]

    def stored_bytes(folder: Path, *options: str) -> int:
        with serving(tiny_folder, folder, "--prefix-cache", *options) as (_, url):
            for ids in prompts:
                body = {"prompt": ids, "max_tokens": 1}
                httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
        files = [path for path in (folder / "prefixes").rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    everything = stored_bytes(tmp_path / "whole")
    limit = everything * 2 // 3
    limited = stored_bytes(tmp_path / "limited", "--prefix-cache-bytes", str(limit))
    assert 0 < limited <= limit
    said = refused("--prefix-cache-bytes", "1GB", "--model", str(tiny_folder))
    assert "add --prefix-cache" in said


def test_ctrl_c_as_soon_as_the_address_is_shown_is_a_shutdown(
    tiny_folder: Path, tmp_path: Path
) -> None:
    code = """if True:
        import builtins, os, signal
        from kvkeep.cli.start import run
        real_print = print
        def print_and_interrupt(*words, **settings):
            real_print(*words, **settings)
            if "kvkeep serves" in words[0]:
                os.kill(os.getpid(), signal.SIGINT)
        builtins.print = print_and_interrupt
        run()
    """
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--store", str(tmp_path)]
    done = subprocess.run(
        [*command, "--model", str(tiny_folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_sigterm_the_server_finishes_requests_and_saves_sessions(
    tiny_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    asked = {"max_tokens": 100, "ignore_eos": True, "stream": True}
    with serving(tiny_folder, tmp_path, "--grace", "60") as (process, url):
        httpx.post(f"{url}/v1/sessions", json={"name": "a"})
        httpx.post(f"{url}/v1/sessions/a/feed", json={"text": "Once upon a time"})
        with httpx.stream(
            "POST", f"{url}/v1/sessions/a/generate", json=asked, timeout=PATIENCE
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: token"
            process.send_signal(number)
            whole = [line for line in lines if line.startswith("data: ")]
        assert json.loads(whole[-1][6:])["finish_reason"] == "length"
        assert process.wait(PATIENCE) == 0
    with serving(tiny_folder, tmp_path) as (_, url):
        entry = httpx.get(f"{url}/v1/sessions/a").json()
        assert not entry["in_memory"]
        assert entry["saved_revision"] == 2
        text = httpx.get(f"{url}/v1/sessions/a/text").json()
        assert text["total"] > 100


def test_an_answer_without_its_client_has_the_grace_too(tiny_folder: Path, tmp_path: Path) -> None:
    ends = {str(token): -100 for token in load_model(str(tiny_folder)).end_token_ids}
    turn = {"content": "Once", "max_tokens": 200, "stream": True, "detached": True}
    turn |= {"logit_bias": ends}
    with serving(tiny_folder, tmp_path, "--grace", "60") as (process, url):
        httpx.post(f"{url}/v1/sessions", json={"name": "a"})
        path = f"{url}/v1/sessions/a/turns"
        with httpx.stream("POST", path, json=turn, timeout=PATIENCE) as sent:
            assert "event: token" in sent.iter_lines()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    with serving(tiny_folder, tmp_path) as (_, url):
        memory = httpx.get(f"{url}/v1/sessions/a/memory", timeout=PATIENCE).json()
        answer = memory["spans"]["turn 1 answer"]
        assert answer["end"] - answer["start"] == 200


@pytest.mark.parametrize(
    ("number", "is_early"),
    [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGINT, False)],
)
def test_a_second_signal_ends_the_grace_and_sessions_are_saved(
    tiny_folder: Path, tmp_path: Path, number: signal.Signals, is_early: bool
) -> None:
    """Early, while connections are closed; later, while the engine waits for an answer."""
    turn = {"content": "Once", "max_tokens": 100_000, "stream": True, "detached": True}
    turn |= {"logit_bias": {str(token): -100 for token in load_model(tiny_folder).end_token_ids}}
    with serving(tiny_folder, tmp_path, "--grace", "600") as (process, url):
        for name in ("a", "idle"):
            httpx.post(f"{url}/v1/sessions", json={"name": name, "policy": "sliding"})
            httpx.post(f"{url}/v1/sessions/{name}/feed", json={"text": "Once upon a time"})
        path = f"{url}/v1/sessions/a/turns"
        with httpx.stream("POST", path, json=turn, timeout=PATIENCE) as sent:
            assert "event: token" in sent.iter_lines()
        process.send_signal(signal.SIGTERM)
        with suppress(httpx.TransportError):  # until no connection is accepted
            while not is_early:
                httpx.get(f"{url}/health")
        time.sleep(0.05 if is_early else 1)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
    with serving(tiny_folder, tmp_path) as (_, url):
        for name in ("a", "idle"):
            entry = httpx.get(f"{url}/v1/sessions/{name}").json()
            assert entry["saved_revision"] == entry["revision"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sessions/a/generate", {"text": "Once"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "model": "m"}),
    ],
)
def test_a_stream_that_outlasts_the_grace_ends_with_an_error(
    tiny_folder: Path, tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    body = {**body, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with serving(tiny_folder, tmp_path, "--grace", "0") as (process, url):
        httpx.post(f"{url}/v1/sessions", json={"name": "a"})
        with httpx.stream("POST", f"{url}{path}", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            process.send_signal(signal.SIGTERM)
            data = [line[6:] for line in lines if line.startswith("data: {")]
        assert "the server is shutting down" in json.loads(data[-1])["error"]["message"]
        assert process.wait(PATIENCE) == 0
        assert process.stderr is not None
        errors = process.stderr.read()
        assert "Traceback" not in errors
        assert "ERROR" not in errors


def test_after_a_kill_the_server_reports_what_was_lost(tiny_folder: Path, tmp_path: Path) -> None:
    with serving(tiny_folder, tmp_path) as (process, url):
        httpx.post(f"{url}/v1/sessions", json={"name": "a"})
        httpx.post(f"{url}/v1/sessions/a/save")
        httpx.post(f"{url}/v1/sessions/a/feed", json={"text": "Once upon a time"})
        process.kill()
    with serving(tiny_folder, tmp_path) as (process, url):
        entry = httpx.get(f"{url}/v1/sessions/a").json()
        assert entry["lost_revision"] in (None, 1)
        assert entry["revision"] == (0 if entry["lost_revision"] else 1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
        assert ("'a' resumes at revision 0" in errors) is (entry["lost_revision"] == 1)


ENDLESS_WORK = """if True:
    import time
    from kvkeep.cli.start import run
    from kvkeep.engine import Engine
    take_turn = Engine.yield_turn
    def take_turns(engine, tokens=0):
        while True:
            take_turn(engine)
            time.sleep(0.002)
    Engine.yield_turn = take_turns
    run()
"""


def test_sigterm_during_a_long_change_leaves_the_session_as_it_was(
    tiny_folder: Path, tmp_path: Path
) -> None:
    path, tokens = "/v1/sessions/a", list(range(50, 250))
    with (
        serving(tiny_folder, tmp_path, "--grace", "1", code=ENDLESS_WORK) as (process, url),
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        client.post("/v1/sessions", json={"name": "a"})
        client.post(f"{path}/feed", json={"tokens": tokens})
        wanted = {"tokens": tokens[1:], "mode": "exact"}
        change = threads.submit(httpx.post, url + f"{path}/align", json=wanted, timeout=PATIENCE)
        while not client.get(path).json()["busy"]:
            assert not change.done()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        with suppress(httpx.TransportError):
            assert change.result().status_code >= 500
    with serving(tiny_folder, tmp_path) as (_, url):
        text = httpx.get(f"{url}{path}/text", timeout=PATIENCE).json()
        assert (text["revision"], [piece["id"] for piece in text["pieces"]]) == (1, tokens)


SLOW_DRAIN = """if True:
    import asyncio, functools
    from kvkeep.cli.start import run
    from kvkeep.server import lifecycle
    async def drain(*arguments):
        print("drains", flush=True)
        await asyncio.sleep(1)
    lifecycle.run_server = functools.partial(lifecycle.run_server, drain=drain)
    run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_drain_loses_no_session(
    tiny_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with serving(tiny_folder, tmp_path, code=SLOW_DRAIN) as (process, url):
        httpx.post(f"{url}/v1/sessions", json={"name": "a"})
        httpx.post(f"{url}/v1/sessions/a/feed", json={"text": "Once upon a time"})
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert "drains\n" in process.stdout
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
    assert _saved_revision(tiny_folder, tmp_path) == 1


STUCK_THREAD = """if True:
    import threading
    from kvkeep.cli.start import run
    from kvkeep.models.text.codec import TextCodec
    encode = TextCodec.encode
    def encode_or_wait(codec, text, *arguments, **options):
        if text == "slow":
            threading.Event().wait()
        return encode(codec, text, *arguments, **options)
    TextCodec.encode = encode_or_wait
    run()
"""


def test_a_thread_that_works_keeps_no_server(tiny_folder: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_folder, tmp_path, "--grace", "0", code=STUCK_THREAD) as (process, url),
        ThreadPoolExecutor(1) as threads,
    ):
        httpx.post(f"{url}/v1/sessions", json={"name": "a"})
        httpx.post(f"{url}/v1/sessions/a/feed", json={"text": "Once upon a time"})
        path, body = f"{url}/v1/sessions/a/feed", {"text": "slow"}
        request = threads.submit(httpx.post, path, json=body, timeout=PATIENCE)
        time.sleep(0.5)  # usually it is in its thread by then
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        with suppress(httpx.TransportError):
            assert request.result().status_code >= 500
    assert _saved_revision(tiny_folder, tmp_path) == 1


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_server_whose_terminal_is_closed_ends_unless_that_is_ignored(
    tiny_folder: Path, tmp_path: Path, is_ignored: bool
) -> None:
    """`nohup` ignores it."""
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); " + COMMAND[2]
    code = ignoring if is_ignored else COMMAND[2]
    with serving(tiny_folder, tmp_path, code=code) as (process, url):
        httpx.post(f"{url}/v1/sessions", json={"name": "a"})
        httpx.post(f"{url}/v1/sessions/a/feed", json={"text": "Once upon a time"})
        process.send_signal(signal.SIGHUP)
        if is_ignored:
            for _ in range(5):
                assert httpx.get(f"{url}/health").status_code == 200
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert _saved_revision(tiny_folder, tmp_path) == 1


def _saved_revision(model: Path, store: Path) -> int | None:
    with serving(model, store) as (_, url):
        entry = httpx.get(f"{url}/v1/sessions/a").json()
        assert entry["lost_revision"] is None
        revision: int | None = entry["saved_revision"]
        return revision


KILLED_IN_LONG_WORK = """if True:
    import os, signal
    from kvkeep.cli.start import run
    from kvkeep.engine import Engine
    Engine.yield_turn = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    run()
"""


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_a_kill_loses_no_acknowledged_alignment_and_leaves_none_half_done(
    tiny_folder: Path, tmp_path: Path, kind: str
) -> None:
    """Killed after its first step, and after its response."""
    store = str(tmp_path) if kind == "folder" else tmp_path.as_uri()
    options = ("--policy", "full", "--max-kv-size", "1024", "--prefill-step", "32")
    text = [7 + number * number % 199 for number in range(600)]
    changed = [*text[:9], *range(50, 250), *text[20:], 5]
    wanted, key = {"tokens": changed, "min_saved": 9}, {"Idempotency-Key": "k"}
    greedy = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    path = "/v1/sessions/a"
    with serving(tiny_folder, store, *options) as (process, url):
        client = httpx.Client(base_url=url, timeout=PATIENCE)
        client.post("/v1/sessions", json={"name": "a"})
        client.post(f"{path}/feed", json={"tokens": text})
        before = client.post(f"{path}/save").json()
        client.post(f"{path}/fork", json={"name": "before"})
        expected = client.post("/v1/sessions/before/generate", json=greedy).json()["tokens"]
        process.kill()
    with serving(tiny_folder, store, *options, code=KILLED_IN_LONG_WORK) as (process, url):
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}{path}/align", json=wanted, headers=key, timeout=PATIENCE)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    with serving(tiny_folder, store, *options) as (process, url):
        client = httpx.Client(base_url=url, timeout=PATIENCE)
        assert client.get(path).json()["revision"] == before["revision"]
        client.post(f"{path}/fork", json={"name": "again"})
        assert client.post("/v1/sessions/again/generate", json=greedy).json()["tokens"] == expected
        aligned = client.post(f"{path}/align", json=wanted, headers=key).json()
        assert aligned["result"]["mode"] == "in_place"
        if kind == "folder":
            client.post(f"{path}/save")
        process.kill()
    with serving(tiny_folder, store, *options) as (_, url):
        client = httpx.Client(base_url=url, timeout=PATIENCE)
        assert client.get(f"{path}/text").json()["total"] == len(changed)
        assert client.get(path).json()["revision"] == aligned["revision"]
        if kind == "objects":  # the response is in the store
            again = client.post(f"{path}/align", json=wanted, headers=key).json()
            assert again == aligned
            assert client.get(path).json()["revision"] == aligned["revision"]
        client.post(f"{path}/fork", json={"name": "aligned"})
        report = client.post("/v1/prefix/explain", json={"tokens": changed}).json()
        assert (report["reused"], report["reason"]) == (0, "edited")
        answer = client.post("/v1/completions", json={"prompt": changed, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_other_hosts_need_api_keys(tiny_folder: Path, tmp_path: Path) -> None:
    assert "--api-key-file" in refused("--host", "0.0.0.0", "--model", str(tiny_folder))
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-1\n")
    with serving(tiny_folder, tmp_path / "store", "--api-key-file", str(keys)) as (_, url):
        assert httpx.post(f"{url}/v1/sessions", json={}).status_code == 401
        headers = {"Authorization": "Bearer a-key-of-sixteen-1"}
        assert httpx.post(f"{url}/v1/sessions", json={}, headers=headers).status_code == 201


@pytest.mark.parametrize("origin", ["*", "null"])
def test_pages_of_any_origin_need_api_keys(tiny_folder: Path, origin: str) -> None:
    """Otherwise every page in the user's browser could read and delete all sessions."""
    message = refused("--allow-origin", origin, "--model", str(tiny_folder))
    assert "--api-key-file" in message
    assert f"--allow-origin {origin}" in message


def test_hosts_and_origins_that_match_nothing_are_refused() -> None:
    model = ("--model", "nothing")
    for host in ("http://example.com", "*", "a b", "example.com/"):
        assert "expected one such as example.com" in refused(*model, "--allow-host", host)
    for origin in ("example.com", "http://*.example.com", "http://example.com/page", "http://"):
        assert "expected one such as http://example.com" in refused(
            *model, "--allow-origin", origin
        )


@pytest.mark.parametrize(
    ("options", "edits"),
    [
        ((), True),
        (("--allow-host", "box"), False),
        (("--no-allow-edit",), False),
        (("keys",), False),
    ],
)
def test_the_page_may_edit_for_the_one_user_of_this_machine(
    tiny_folder: Path, tmp_path: Path, options: tuple[str, ...], edits: bool
) -> None:
    """And not with API keys or other host names, unless --allow-edit is given."""
    keys = tmp_path / "keys"
    keys.write_text("k" * 16)
    given = ("--api-key-file", str(keys)) if options == ("keys",) else options
    with serving(tiny_folder, tmp_path / "store", *given) as (_, url):
        headers = {"Origin": url, "Authorization": "Bearer " + "k" * 16}
        settings = httpx.get(f"{url}/v1/page", headers=headers).json()
        created = httpx.post(f"{url}/v1/sessions", json={}, headers=headers)
        foreign = httpx.post(f"{url}/v1/sessions", json={}, headers={"Origin": "http://x.example"})
    assert settings["edits"] is edits
    assert created.status_code == (201 if edits else 403)
    assert foreign.status_code == 403


def test_invalid_options_are_one_line_errors(tiny_folder: Path, tmp_path: Path) -> None:
    model = ["--model", str(tiny_folder), "--store", str(tmp_path)]
    assert "8GB" in refused("--memory", "much")
    assert "port" in refused("--port", "99999")
    assert "keep" in refused(*model, "--max-kv-size", "3", "--keep", "5")
    empty = tmp_path / "none"
    empty.write_text("")
    assert "no key" in refused(*model, "--api-key-file", str(empty))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in refused(*model, "--port", str(taken.getsockname()[1]))


def test_memory_too_small_for_a_full_session_is_refused_at_the_start(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """The error names a sufficient memory and the longest session that fits; both work."""
    model = ["--model", str(tiny_folder), "--store", str(tmp_path)]
    said = refused(*model, "--memory", "100KB")
    found = re.search(r"use --memory (\S+) or more, or --max-kv-size (\d+) or less", said)
    assert found, said
    enough, longest = found.groups()
    with serving(tiny_folder, tmp_path / "a", "--memory", enough) as (_, url):
        assert _chat(url) == 200
    few = ("--memory", "100KB", "--max-kv-size")
    with serving(tiny_folder, tmp_path / "b", *few, longest) as (_, url):
        assert _chat(url) == 200
    assert "--memory" in refused(*model, *few, str(int(longest) + 1))


def test_the_longest_session_that_fits_is_found_above_what_it_keeps(tiny_folder: Path) -> None:
    """Budgets below --keep are invalid; the longest valid one may be just above them."""
    model = ["--model", str(tiny_folder), "--keep", "300"]
    said = refused(*model, "--memory", "1KB", "--max-kv-size", "301")
    found = re.search(r"use --memory (\S+) or more", said)
    assert found, said
    said = refused(*model, "--memory", found[1], "--max-kv-size", "4096")
    hint = re.search(r"or --max-kv-size (\d+) or less", said)
    assert hint, said
    assert 301 <= int(hint[1]) < 400


def _chat(url: str) -> int:
    """The status of a chat request without a limit on its answer."""
    said = {"messages": [{"role": "user", "content": "Hi"}], "stop": [" ", "e", "a"]}
    return httpx.post(f"{url}/v1/chat/completions", json=said, timeout=PATIENCE).status_code


@pytest.mark.parametrize(
    ("count", "shown"),
    [(999, "1KB"), (1_000_000, "1MB"), (1_000_001, "1.1MB"), (17_200_000_000, "17.2GB")],
)
def test_sizes_are_rounded_up_and_read_back(count: int, shown: str) -> None:
    assert format_size(count) == shown
    assert parse_size(shown) >= count
