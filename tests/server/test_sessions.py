"""Sessions over HTTP equal sessions in Python, to the bit."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, running_server, without_saved_revision
from topics import topic_text

from kvkeep.model import Model
from kvkeep.server.chat_input import title_for
from kvkeep.server.keys import ApiKeys

TEXT = topic_text()
SETTINGS = {"policy": "sliding", "max_kv_size": 300, "keep": 4}
names = (f"session-{number}" for number in range(1000))


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created_response:
        yield created_response


def create(client: httpx.Client, **settings: Any) -> str:
    name = next(names)
    response = client.post("/v1/sessions", json={"name": name, **(settings or SETTINGS)})
    assert response.status_code == 201, response.text
    assert response.headers["ETag"] == '"0"'
    return name


def post_action(client: httpx.Client, name: str, action: str, /, **body: Any) -> dict[str, Any]:
    response = client.post(f"/v1/sessions/{name}/{action}", json=body)
    assert response.status_code in (200, 201), response.text
    result: dict[str, Any] = response.json()
    return result


GREEDY = {"temperature": 0, "ignore_eos": True}


def test_a_session_equals_one_in_python(client: httpx.Client, smollm2: Model) -> None:
    """After feeding, generating, editing, pinning and rewinding."""
    name = create(client)
    session = smollm2.session(300, 4, prefill_step=128)
    report = post_action(client, name, "feed", text=TEXT[:1500], span="text")
    session.feed(TEXT[:1500])
    assert report["total_tokens"] == len(session.tokens)
    generated = post_action(client, name, "generate", max_tokens=9, **GREEDY)["tokens"]
    assert generated == [session.next_token() for _ in range(9)]
    at = len(session.tokens) - 60
    post_action(client, name, "pin", start=at, end=at + 10)
    session.pin(at, at + 10)
    post_action(client, name, "edit", op="replace", start=at + 20, end=at + 25, text=" other words")
    session.replace(at + 20, at + 25, " other words")
    assert post_action(client, name, "rewind", count=3)["result"] == session.rewind(3)
    post_action(client, name, "edit", op="delete", start=at + 12, end=at + 14)
    session.delete(at + 12, at + 14)
    post_action(client, name, "edit", op="insert", at=at + 30, tokens=[5, 6, 7], recompute="suffix")
    session.insert(at + 30, [5, 6, 7], "suffix")
    result = post_action(client, name, "generate", max_tokens=20, **GREEDY)
    assert result["tokens"] == [session.next_token() for _ in range(20)]
    memory = client.get(f"/v1/sessions/{name}/memory").json()
    assert [run["standing"] for run in memory["runs"] for _ in range(run["count"])] == (
        session.token_status
    )
    assert memory["cells"] == session.cache.cells
    assert memory["spans"]["text"]["end"] > 100
    pieces = client.get(f"/v1/sessions/{name}/text", params={"start": at, "end": at + 40}).json()
    assert [piece["id"] for piece in pieces["pieces"]] == session.tokens[at : at + 40]


def test_a_stream_equals_the_whole_response(client: httpx.Client) -> None:
    name = create(client)
    post_action(client, name, "feed", text=TEXT[:900])
    first, other = (post_action(client, name, "fork")["name"] for _ in range(2))
    expected = post_action(client, first, "generate", max_tokens=12, temperature=0.8, seed=3)
    body = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "stream": True}
    events = []
    with client.stream("POST", f"/v1/sessions/{other}/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("event: "):
                event_name = line[7:]
            elif line.startswith("data: "):
                events.append((event_name, json.loads(line[6:])))
    tokens = [data["token"] for event_name, data in events if event_name == "token"]
    assert tokens == expected["tokens"]
    assert events[-1][0] == "done"
    assert events[-1][1]["text"] == expected["text"]


def test_forks_and_snapshots_continue_to_the_bit(client: httpx.Client) -> None:
    name = create(client)
    post_action(client, name, "feed", text=TEXT[:2500])
    post_action(client, name, "snapshot", name="then")
    revision = client.get(f"/v1/sessions/{name}").json()["revision"]
    ahead = post_action(client, name, "generate", max_tokens=15, **GREEDY)["tokens"]
    restored = client.post("/v1/snapshots/then/restore", json={}).json()["name"]
    continued = post_action(client, restored, "generate", max_tokens=15, **GREEDY)
    assert continued["tokens"] == ahead
    assert client.get(f"/v1/sessions/{name}").json()["revision"] == revision + 1
    assert [item["name"] for item in client.get("/v1/snapshots").json()["data"]] == ["then"]
    assert client.delete("/v1/snapshots/then").json()["deleted"]
    entry = client.get(f"/v1/sessions/{restored}").json()
    assert (entry["parent"], entry["policy"], entry["max_kv_size"]) == (name, "sliding", 300)


def test_save_responds_once_the_session_is_on_disk(client: httpx.Client) -> None:
    name = create(client)
    post_action(client, name, "feed", text=TEXT[:500])
    entry = post_action(client, name, "save")
    assert entry["saved_revision"] == entry["revision"] == 1


def test_compress_changes_the_cells_of_each_head(client: httpx.Client) -> None:
    name = create(client, policy="full", max_kv_size=1024)
    post_action(client, name, "feed", text=TEXT[:2500])
    before = client.get(f"/v1/sessions/{name}/heads").json()["cells"]
    report = post_action(client, name, "compress", ratio=4, method="knorm", budget="heads")[
        "result"
    ]
    assert report["cells_after"] * 4 <= report["cells_before"] + 4
    after = client.get(f"/v1/sessions/{name}/heads").json()["cells"]
    assert len({cells for row in before for cells in row}) == 1
    assert len({cells for row in after for cells in row}) > 1
    mean = sum(map(sum, after)) / sum(map(len, after))
    assert mean <= report["cells_after"] <= mean + 1
    runs = client.get(f"/v1/sessions/{name}/memory").json()["runs"]
    assert "compressed" in {run["standing"] for run in runs}


def test_a_title_is_kept_over_forks_and_a_restart(smollm2: Model, tmp_path: Path) -> None:
    """Also while an answer is generated."""

    def titles(client: httpx.Client) -> dict[str, str | None]:
        return {item["name"]: item["title"] for item in client.get("/v1/sessions").json()["data"]}

    with running_server(smollm2, tmp_path) as server, server.client() as client:
        client.post("/v1/sessions", json={"name": "a", "title": "Rivers", **SETTINGS})
        post_action(client, "a", "feed", text=TEXT[:100])
        post_action(client, "a", "fork", name="b")
        post_action(client, "a", "fork", name="c", title="Lakes")
        body = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/sessions/c/generate", json=body) as response:
            lines = response.iter_lines()  # closing it disconnects
            assert next(lines) == "event: token"
            with server.client() as other:
                renamed = other.put("/v1/sessions/c/title", json={"title": "Seas"}).json()
        assert (renamed["title"], renamed["busy"]) == ("Seas", True)
        assert client.put("/v1/sessions/b/title", json={"title": ""}).status_code == 400
        client.put("/v1/sessions/b/title", json={"title": None}).raise_for_status()
    with running_server(smollm2, tmp_path) as server, server.client() as client:
        assert titles(client) == {"a": "Rivers", "b": None, "c": "Seas"}
        assert client.get("/v1/sessions/a/memory").json()["title"] == "Rivers"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("  Hi there.\nMore.", "Hi there."),
        (
            "<system-reminder>\nBe terse.\n</system-reminder>\n<my_env>x</my_env>\nFix it.",
            "Fix it.",
        ),
        ("<b>bold</b> is HTML", "<b>bold</b> is HTML"),
        ("<a-b>all of it</a-b>", "<a-b>all of it</a-b>"),
        ("<a-b>never closed", "<a-b>never closed"),
        pytest.param("<a-b>" * 200_000, "<a-b>" * 11 + "<a...", id="never closed, long"),
        pytest.param("<a-b></a-b>" * 100_000 + "end", "end", id="many blocks"),
    ],
)
def test_a_title_is_the_first_line_that_is_in_no_leading_tag(text: str, title: str) -> None:
    assert title_for(text) == title


def test_a_session_that_nobody_named_has_the_first_user_message_as_its_title(
    client: httpx.Client,
) -> None:
    """Its first line, cut at 60 characters. A name that a client chose stays the title."""
    long = "Compare the rivers of Peru with those of Chile, and draw a table.\nOf five."
    title = "Compare the rivers of Peru with those of Chile, and draw ..."
    chosen, generated = (
        client.post("/v1/sessions", json=body).json()["name"] for body in ({"name": "own"}, {})
    )
    for name in (chosen, generated):
        post_action(client, name, "turns", content=long, max_tokens=1)
        post_action(client, name, "turns", content="And of Bolivia?", max_tokens=1)
    fork = post_action(client, chosen, "fork")["name"]
    post_action(client, fork, "turns", content="And of Brazil?", max_tokens=1)
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": long}]
    chat = {"messages": messages, "max_tokens": 1, "n": 2}
    client.post("/v1/chat/completions", json=chat).raise_for_status()
    entries = client.get("/v1/sessions?unnamed=true").json()["data"]
    titles = {entry["name"]: entry["title"] for entry in entries}
    assert (titles["own"], titles[generated], titles[fork]) == (None, title, None)
    assert [entry["title"] for entry in entries if not entry["named"]] == [title, title]


def test_residual_cells_are_shown_as_such(client: httpx.Client) -> None:
    name = create(client, policy="full", max_kv_size=1024)
    post_action(client, name, "feed", text=TEXT[:1500])
    path = f"/v1/sessions/{name}"
    assert client.get(f"{path}/memory").json()["residual_cells"] == 0
    post_action(client, name, "compress", ratio=4, method="kvzip")
    counts = client.get(f"{path}/heads").json()
    residual = sum(map(sum, counts["residual"]))
    assert client.get(f"{path}/memory").json()["residual_cells"] == residual > 0
    head = client.get(f"{path}/heads", params={"layer": 1, "head": 0}).json()
    assert len(head["residual"]) == counts["residual"][1][0]
    assert set(head["residual"]) <= set(head["positions"])
    assert "compressed" in {run["standing"] for run in client.get(f"{path}/memory").json()["runs"]}


def test_a_change_for_another_revision_or_a_busy_session_is_refused(
    client: httpx.Client, server: RunningServer
) -> None:
    name = create(client)
    post_action(client, name, "feed", text=TEXT[:200])
    path = f"/v1/sessions/{name}"
    for tag, status in (('"0"', 412), ("W/0", 412), ("x", 400), ('"1"', 200)):
        response = client.post(f"{path}/rewind", json={"count": 1}, headers={"If-Match": tag})
        assert response.status_code == status, response.text
    body = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with client.stream("POST", f"{path}/generate", json=body) as response:
        lines = response.iter_lines()  # closing it disconnects
        assert next(lines) == "event: token"
        with server.client() as other:
            assert other.delete(path).status_code == 409
            assert other.post(f"{path}/rewind", json={"count": 1}).status_code == 409
            assert other.get(path).json()["busy"]
    while client.get(path).json()["busy"]:
        pass
    assert client.delete(path).json()["deleted"]
    assert client.get(path).status_code == 404


CHANGES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "": ("DELETE", None),
    "/feed": ("POST", {"text": "More."}),
    "/generate": ("POST", {"max_tokens": 1}),
    "/turns": ("POST", {"content": "Hello", "max_tokens": 1}),
    "/edit": ("POST", {"op": "delete", "start": 2, "end": 5}),
    "/pin": ("POST", {"start": 2, "end": 5}),
    "/unpin": ("POST", {"start": 2, "end": 5}),
    "/spans": ("POST", {"name": "part", "start": 2, "end": 5}),
    "/rewind": ("POST", {"count": 1}),
    "/compress": ("POST", {"ratio": 2}),
    "/fork": ("POST", {}),
    "/revert": ("POST", {"to": "another"}),
    "/save": ("POST", None),
    "/snapshot": ("POST", {"name": "of-another-revision"}),
    "/resident": ("PUT", {"resident": True}),
    "/title": ("PUT", {"title": "Another"}),
    "/compact": ("POST", {}),
    "/align": ("POST", {"tokens": [5, 6, 7]}),
    "/stop": ("POST", None),
}


def test_a_reverted_session_continues_as_the_fork_and_its_revision_goes_on(
    client: httpx.Client,
) -> None:
    name = create(client, policy="full", max_kv_size=256, title="Old")
    post_action(client, name, "feed", text=TEXT[:300])
    for action in ("resident", "title"):
        body = {"resident": True} if action == "resident" else {"title": "New"}
        client.put(f"/v1/sessions/{name}/{action}", json=body).raise_for_status()
    fork = post_action(client, name, "fork", title="Old")["name"]
    post_action(client, name, "edit", op="delete", start=2, end=20)
    before = client.get(f"/v1/sessions/{name}").json()
    reverted = post_action(client, name, "revert", to=fork)
    same = ("name", "created", "resident", "parent")
    assert [reverted[field] for field in same] == [before[field] for field in same]
    assert (reverted["revision"], reverted["title"]) == (before["revision"] + 1, "Old")
    assert client.get("/v1/operations").json()["data"][0]["what"] == "revert"
    texts = [client.get(f"/v1/sessions/{each}/text").json()["pieces"] for each in (name, fork)]
    assert texts[0] == texts[1]
    answers = [
        post_action(client, each, "generate", max_tokens=6, **GREEDY)["tokens"]
        for each in (name, fork)
    ]
    assert answers[0] == answers[1]
    path = f"/v1/sessions/{name}/revert"
    for other, status in ((name, 400), ("missing", 404), ("no name", 400)):
        assert client.post(path, json={"to": other}).status_code == status


def test_a_session_that_is_made_resident_reports_an_operation(client: httpx.Client) -> None:
    """Another client, such as a tab of the web UI, learns its revision by that."""
    name = create(client)
    for _ in range(2):  # the second one changes nothing
        response = client.put(f"/v1/sessions/{name}/resident", json={"resident": True})
    operations = client.get("/v1/operations").json()["data"]
    own = [(item["what"], item["revision"]) for item in operations if item["session"] == name]
    assert own == [("resident", response.json()["revision"]), ("create", 0)]


def test_every_change_for_another_revision_is_refused_and_changes_nothing(
    client: httpx.Client,
) -> None:
    name = create(client, policy="full", max_kv_size=256)
    post_action(client, name, "feed", text=TEXT[:300])

    def state() -> tuple[Any, ...]:
        """Everything but which revisions are on disk: idle sessions are saved meanwhile."""
        session = client.get(f"/v1/sessions/{name}").json()
        sessions = client.get("/v1/sessions").json()["data"]
        names = sorted(item["name"] for item in sessions)
        return session | {"saved_revision": None}, names, client.get("/v1/snapshots").json()

    before = state()
    paths = client.get("/openapi.json").json()["paths"]
    for action, (method, body) in CHANGES.items():
        response = client.request(
            method, f"/v1/sessions/{name}{action}", json=body, headers={"If-Match": '"0"'}
        )
        assert response.status_code == 412, (action, response.text)
        assert response.json()["error"]["code"] == "wrong_revision"
        assert "at revision 1" in response.json()["error"]["message"]
        parameters = paths[f"/v1/sessions/{{name}}{action}"][method.lower()]["parameters"]
        (header,) = (item for item in parameters if item["in"] == "header")
        assert header["name"] == "if-match"
        assert "412" in header["description"]
    assert state() == before
    documented = {
        (method.upper(), path.removeprefix("/v1/sessions/{name}"))
        for path, methods in paths.items()
        for method in methods
        if path.startswith("/v1/sessions/{name}") and method != "get"
    }
    assert documented == {(method, action) for action, (method, _) in CHANGES.items()}


def test_events_stream_operations_as_they_happen(
    client: httpx.Client, server: RunningServer
) -> None:
    name, reported, ready = create(client), list[dict[str, Any]](), threading.Event()

    def listen() -> None:
        with (
            server.client() as other,
            other.stream("GET", f"/v1/sessions/{name}/events") as response,
        ):
            for line in response.iter_lines():
                ready.set()
                if line.startswith("data: "):
                    reported.append(json.loads(line[6:]))
                    if reported[-1]["what"] == "delete":
                        return

    listening = threading.Thread(target=listen)
    listening.start()
    ready.wait()
    other = create(client)
    post_action(client, name, "feed", text=TEXT[:300])
    post_action(client, other, "feed", text=TEXT[:300])
    post_action(client, name, "rewind", count=2)
    client.delete(f"/v1/sessions/{name}")
    listening.join()
    assert [item["what"] for item in reported] == ["generate", "rewind", "delete"]
    assert {item["session"] for item in reported} == {name}
    assert reported[0]["tokens"] > 50


def test_explain_reports_why_a_prompt_misses_the_cache(
    client: httpx.Client, smollm2: Model
) -> None:
    first, second = "A text that both have. " * 60, "And now another one. " * 20
    with_first = f"{first}This is how the first one ends, at some length."
    client.post("/v1/completions", json={"prompt": with_first, "max_tokens": 1})
    result = client.post("/v1/prefix/explain", json={"text": first + second}).json()
    common = len(smollm2.text.encode(first))
    assert abs(result["differs_at"] - common) <= 1
    assert 0 < result["reused"] <= common
    assert result["reason"] == "differs"
    assert "This is how" in result["nearest_text"]
    assert "And now" in result["prompt_text"]
    cold = client.post("/v1/prefix/explain", json={"text": "\u4e16 nothing like it"}).json()
    assert (cold["reused"], cold["reason"], cold["differs_at"]) == (0, "cold", None)


def test_sessions_are_invisible_to_other_keys(smollm2: Model, tmp_path: Path) -> None:
    one, two = "one-key-of-sixteen", "two-key-of-sixteen"
    with (
        running_server(smollm2, tmp_path, ApiKeys((one, two))) as server,
        server.client(one) as mine,
        server.client(two) as other,
    ):
        name = create(mine)
        post_action(mine, name, "feed", text=TEXT[:900])
        post_action(mine, name, "snapshot", name="then")
        for method, path, body in (
            ("GET", f"/v1/sessions/{name}", None),
            ("DELETE", f"/v1/sessions/{name}", None),
            ("POST", f"/v1/sessions/{name}/generate", {}),
            ("POST", f"/v1/sessions/{name}/fork", {}),
            ("POST", f"/v1/sessions/{name}/align", {"text": TEXT[300:900]}),
            ("GET", f"/v1/sessions/{name}/memory", None),
            ("GET", f"/v1/sessions/{name}/events", None),
        ):
            assert other.request(method, path, json=body).status_code == 404
        assert other.post("/v1/snapshots/then/restore", json={}).status_code == 404
        assert other.get("/v1/sessions").json()["data"] == []
        assert other.get("/v1/snapshots").json()["data"] == []
        explained = other.post("/v1/prefix/explain", json={"text": TEXT[:900]}).json()
        assert (explained["reused"], explained["reason"]) == (0, "cold")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("", {"name": "../x"}),
        ("", {"name": ""}),
        ("", {"policy": "other"}),
        ("", {"max_kv_size": 0}),
        ("", {"max_kv_size": 10**9}),
        ("", {"policy": "full", "keep": 5}),
        ("", {"policy": "shift", "max_kv_size": 100, "discard": 1000}),
        ("/NAME/feed", {}),
        ("/NAME/feed", {"text": "a", "tokens": [1]}),
        ("/NAME/feed", {"tokens": [-1]}),
        ("/NAME/feed", {"tokens": [10**6]}),
        ("/NAME/generate", {"max_tokens": 10**12}),
        ("/NAME/edit", {"op": "delete"}),
        ("/NAME/edit", {"op": "delete", "start": 5, "end": 1}),
        ("/NAME/edit", {"op": "delete", "start": 0, "end": 10**9}),
        ("/NAME/edit", {"op": "insert", "text": "a"}),
        ("/NAME/edit", {"op": "replace", "span": "none", "text": "a"}),
        ("/NAME/align", {}),
        ("/NAME/align", {"text": ""}),
        ("/NAME/align", {"text": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/NAME/align", {"messages": [{"role": "user"}, 3]}),
        ("/NAME/align", {"tokens": [10**6]}),
        ("/NAME/align", {"tokens": [5] * 3000}),
        ("/NAME/align", {"text": "a", "mode": "nearly"}),
        ("/NAME/pin", {"start": 0, "end": 10**9}),
        ("/NAME/pin", {"start": 0, "span": "a"}),
        ("/NAME/rewind", {"count": 10**9}),
        ("/NAME/compress", {"ratio": 0.5}),
        ("/NAME/compress", {"ratio": 4, "method": "other"}),
        ("/NAME/spans", {"name": "a", "start": 5, "end": 2}),
        ("/NAME/snapshot", {"name": "../../x"}),
        ("/NAME/fork", {"at": 10**6}),
    ],
    ids=repr,
)
def test_malformed_requests_are_refused_and_change_nothing(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    name = create(client)
    post_action(client, name, "feed", text=TEXT[:100])
    before = without_saved_revision(client.get(f"/v1/sessions/{name}").json())
    response = client.post(f"/v1/sessions{path.replace('NAME', name)}", json=body)
    assert response.status_code == 400, response.text
    post_action(client, name, "save")  # as the server does by itself later
    assert without_saved_revision(client.get(f"/v1/sessions/{name}").json()) == before


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/snapshots/never/restore", {}),
        ("DELETE", "/v1/snapshots/never", None),
        ("POST", "/v1/sessions", {"from_snapshot": "never"}),
        ("POST", "/slots/0?action=restore", {"filename": "never"}),
    ],
)
def test_a_missing_snapshot_is_not_found(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    response = client.request(method, path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "snapshot_not_found")
    assert error["message"].startswith("there is no snapshot 'never'")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/sessions/a b", None),
        ("GET", "/v1/sessions/a b/memory", None),
        ("DELETE", "/v1/snapshots/a b", None),
        ("POST", "/v1/sessions", {"name": "a b"}),
        ("POST", "/v1/sessions", {"name": "a b", "from_snapshot": "a"}),
        ("POST", "/v1/sessions/a/fork", {"name": "a b"}),
    ],
)
def test_the_error_of_a_wrong_name_says_what_a_name_may_have(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    response = client.request(method, path, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("name: a session name must be 1 to 100 letters, digits, ")
    assert message.endswith("found 'a b'")


@pytest.mark.parametrize("bits", [8, "8", 4, "8/4"])
def test_kv_bits_are_accepted_as_number_or_text(client: httpx.Client, bits: int | str) -> None:
    response = client.post("/v1/sessions", json={"kv_bits": bits, "policy": "full"})
    assert response.status_code == 201, response.json()
    assert response.json()["kv_bits"] == str(bits)
    assert client.post("/v1/sessions", json={"kv_bits": 5}).status_code == 400


def test_token_texts_join_to_the_whole_text(client: httpx.Client, smollm2: Model) -> None:
    """From any token on, without U+FFFD for characters of several tokens."""
    text, name = "A party 🎉, a brain 🧠.", "pieces-joined"
    client.post("/v1/sessions", json={"name": name})
    client.post(f"/v1/sessions/{name}/feed", json={"text": text})
    ids = smollm2.text.encode(text)
    pieces = client.get(f"/v1/sessions/{name}/text").json()["pieces"]
    assert "".join(piece["text"] for piece in pieces) == text
    for start in range(len(ids)):
        result = client.get(f"/v1/sessions/{name}/text", params={"start": start}).json()["pieces"]
        assert result == pieces[start:]
    for start, end, status in ((5, 5, 200), (5, 2, 400)):
        params = {"start": start, "end": end}
        assert client.get(f"/v1/sessions/{name}/text", params=params).status_code == status
    client.delete(f"/v1/sessions/{name}")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "", {"max_kv_sise": 64}),
        ("POST", "", {"from_snapshot": "strict", "policy": "full"}),
        ("PUT", "/title", {"titel": "New"}),
        ("POST", "/fork", {"att": 4}),
        ("POST", "/edit", {"op": "replace", "start": 1, "end": 3}),
        ("POST", "/edit", {"op": "replace", "start": 1, "end": 3, "txt": "a"}),
        ("POST", "/edit", {"op": "replace", "start": 1, "end": 3, "text": "a", "tokens": [5]}),
        ("POST", "/edit", {"op": "delete", "start": 1, "end": 3, "recompte": "suffix"}),
        ("POST", "/edit", {"op": "delete", "start": 1, "end": 3, "text": "a"}),
        ("POST", "/edit", {"op": "delete", "start": 1, "end": 3, "at": 2}),
        ("POST", "/edit", {"op": "insert", "text": "a"}),
        ("POST", "/edit", {"op": "insert", "at": 1, "start": 1, "text": "a"}),
        ("POST", "/pin", {"span": "all", "end": 3}),
        ("POST", "/compact", {"target": 1.5}),
        ("POST", "/compress", {"ration": 8}),
    ],
)
def test_fields_that_would_be_ignored_are_refused(
    client: httpx.Client, method: str, path: str, body: dict[str, Any]
) -> None:
    client.post("/v1/sessions", json={"name": "strict", "title": "Old"})
    client.post("/v1/sessions/strict/feed", json={"tokens": [5, 6, 7, 8]})
    client.post("/v1/sessions/strict/spans", json={"name": "all", "start": 0, "end": 4})
    client.post("/v1/sessions/strict/snapshot", json={"name": "strict"})
    before = client.get("/v1/sessions").json()
    target = f"/v1/sessions/strict{path}" if path else "/v1/sessions"
    response = client.request(method, target, json=body)
    assert response.status_code == 400, response.text
    assert client.get("/v1/sessions").json() == before
