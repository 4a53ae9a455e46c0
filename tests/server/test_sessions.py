"""Sessions over HTTP: the same memories as in Python, to the bit."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import Running, as_asked, running
from topics import topic_text

from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys

TEXT = topic_text()
SETTINGS = {"policy": "sliding", "max_kv_size": 300, "keep": 4}
names = (f"session-{number}" for number in range(1000))


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def created(client: httpx.Client, **settings: Any) -> str:
    name = next(names)
    answer = client.post("/v1/sessions", json={"name": name, **(settings or SETTINGS)})
    assert answer.status_code == 201, answer.text
    assert answer.headers["ETag"] == '"0"'
    return name


def done(client: httpx.Client, name: str, what: str, /, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/sessions/{name}/{what}", json=body)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_session_does_what_it_does_in_python(client: httpx.Client, smollm2: Model) -> None:
    """Fed, written from, edited, pinned, rewound."""
    name = created(client)
    session = smollm2.session(300, 4, prefill_step=128)
    report = done(client, name, "feed", text=TEXT[:1500], span="text")
    session.feed(TEXT[:1500])
    assert report["total_tokens"] == len(session.tokens)
    written = done(client, name, "generate", max_tokens=9, ignore_eos=True)["tokens"]
    assert written == [session.next_token() for _ in range(9)]
    at = len(session.tokens) - 60
    done(client, name, "pin", start=at, end=at + 10)
    session.pin(at, at + 10)
    done(client, name, "edit", op="replace", start=at + 20, end=at + 25, text=" other words")
    session.replace(at + 20, at + 25, " other words")
    assert done(client, name, "rewind", count=3)["result"] == session.rewind(3)
    done(client, name, "edit", op="delete", start=at + 12, end=at + 14)
    session.delete(at + 12, at + 14)
    done(client, name, "edit", op="insert", at=at + 30, tokens=[5, 6, 7], recompute="suffix")
    session.insert(at + 30, [5, 6, 7], "suffix")
    found = done(client, name, "generate", max_tokens=20, ignore_eos=True)
    assert found["tokens"] == [session.next_token() for _ in range(20)]
    memory = client.get(f"/v1/sessions/{name}/memory").json()
    assert [run["standing"] for run in memory["runs"] for _ in range(run["count"])] == (
        session.standing
    )
    assert memory["cells"] == session.cache.cells
    assert memory["spans"]["text"]["end"] > 100
    pieces = client.get(f"/v1/sessions/{name}/text", params={"start": at, "end": at + 40}).json()
    assert [piece["id"] for piece in pieces["pieces"]] == session.tokens[at : at + 40]


def test_a_stream_says_the_same(client: httpx.Client) -> None:
    name = created(client)
    done(client, name, "feed", text=TEXT[:900])
    one, other = (done(client, name, "fork")["name"] for _ in range(2))
    whole = done(client, one, "generate", max_tokens=12, temperature=0.8, seed=3)
    body = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "stream": True}
    events = []
    with client.stream("POST", f"/v1/sessions/{other}/generate", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                events.append((kind, json.loads(line[6:])))
    assert [data["token"] for kind, data in events if kind == "token"] == whole["tokens"]
    assert events[-1][0] == "done"
    assert events[-1][1]["text"] == whole["text"]


def test_forks_and_snapshots_go_on_to_the_bit(client: httpx.Client) -> None:
    name = created(client)
    done(client, name, "feed", text=TEXT[:2500])
    done(client, name, "snapshot", name="then")
    revision = client.get(f"/v1/sessions/{name}").json()["revision"]
    ahead = done(client, name, "generate", max_tokens=15, ignore_eos=True)["tokens"]
    restored = client.post("/v1/snapshots/then/restore", json={}).json()["name"]
    assert done(client, restored, "generate", max_tokens=15, ignore_eos=True)["tokens"] == ahead
    assert client.get(f"/v1/sessions/{name}").json()["revision"] == revision + 1
    assert [each["name"] for each in client.get("/v1/snapshots").json()["data"]] == ["then"]
    assert client.delete("/v1/snapshots/then").json()["deleted"]
    assert client.post("/v1/snapshots/then/restore", json={}).status_code == 400
    entry = client.get(f"/v1/sessions/{restored}").json()
    assert (entry["parent"], entry["policy"], entry["max_kv_size"]) == (name, "sliding", 300)


def test_saved_it_is_on_disk_when_the_answer_comes(client: httpx.Client) -> None:
    name = created(client)
    done(client, name, "feed", text=TEXT[:500])
    entry = done(client, name, "save")
    assert entry["saved_revision"] == entry["revision"] == 1


def test_compressed_it_says_which_heads_hold_what(client: httpx.Client) -> None:
    name = created(client, policy="full", max_kv_size=1024)
    done(client, name, "feed", text=TEXT[:2500])
    before = client.get(f"/v1/sessions/{name}/heads").json()["cells"]
    report = done(client, name, "compress", ratio=4, method="knorm", budget="heads")["result"]
    assert report["cells_after"] * 4 <= report["cells_before"] + 4
    after = client.get(f"/v1/sessions/{name}/heads").json()["cells"]
    assert len({cells for row in before for cells in row}) == 1
    assert len({cells for row in after for cells in row}) > 1
    mean = sum(map(sum, after)) / sum(map(len, after))
    assert mean <= report["cells_after"] <= mean + 1
    runs = client.get(f"/v1/sessions/{name}/memory").json()["runs"]
    assert "compressed" in {run["standing"] for run in runs}


def test_a_change_for_another_revision_or_of_a_busy_session_is_refused(
    client: httpx.Client, server: Running
) -> None:
    name = created(client)
    done(client, name, "feed", text=TEXT[:200])
    path = f"/v1/sessions/{name}"
    for tag, status in (('"0"', 412), ("W/0", 412), ("x", 400), ('"1"', 200)):
        answer = client.post(f"{path}/rewind", json={"count": 1}, headers={"If-Match": tag})
        assert answer.status_code == status, answer.text
    body = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with client.stream("POST", f"{path}/generate", json=body) as answer:
        lines = answer.iter_lines()  # whoever lets go of it hangs up
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
    "/save": ("POST", None),
    "/snapshot": ("POST", {"name": "of-another-revision"}),
    "/resident": ("PUT", {"resident": True}),
}


def test_every_change_for_another_revision_is_refused_and_changes_nothing(
    client: httpx.Client,
) -> None:
    name = created(client, policy="full", max_kv_size=256)
    done(client, name, "feed", text=TEXT[:300])
    before = client.get(f"/v1/sessions/{name}").json()
    sessions, snapshots = (client.get(f"/v1/{all_}").json() for all_ in ("sessions", "snapshots"))
    paths = client.get("/openapi.json").json()["paths"]
    for what, (method, body) in CHANGES.items():
        answer = client.request(
            method, f"/v1/sessions/{name}{what}", json=body, headers={"If-Match": '"0"'}
        )
        assert answer.status_code == 412, (what, answer.text)
        assert answer.json()["error"]["code"] == "wrong_revision"
        assert "at revision 1" in answer.json()["error"]["message"]
        parameters = paths[f"/v1/sessions/{{name}}{what}"][method.lower()]["parameters"]
        (header,) = (each for each in parameters if each["in"] == "header")
        assert header["name"] == "if-match"
        assert "412" in header["description"]
    assert client.get(f"/v1/sessions/{name}").json() == before
    assert client.get("/v1/sessions").json() == sessions
    assert client.get("/v1/snapshots").json() == snapshots
    documented = {
        (method.upper(), path.removeprefix("/v1/sessions/{name}"))
        for path, methods in paths.items()
        for method in methods
        if path.startswith("/v1/sessions/{name}") and method != "get"
    }
    assert documented == {(method, what) for what, (method, _) in CHANGES.items()}


def test_operations_are_told_as_they_happen(client: httpx.Client, server: Running) -> None:
    name, told, ready = created(client), list[dict[str, Any]](), threading.Event()

    def listen() -> None:
        with (
            server.client() as other,
            other.stream("GET", f"/v1/sessions/{name}/events") as answer,
        ):
            for line in answer.iter_lines():
                ready.set()
                if line.startswith("data: "):
                    told.append(json.loads(line[6:]))
                    if told[-1]["what"] == "delete":
                        return

    listening = threading.Thread(target=listen)
    listening.start()
    ready.wait()
    other = created(client)
    done(client, name, "feed", text=TEXT[:300])
    done(client, other, "feed", text=TEXT[:300])
    done(client, name, "rewind", count=2)
    client.delete(f"/v1/sessions/{name}")
    listening.join()
    assert [each["what"] for each in told] == ["generate", "rewind", "delete"]
    assert {each["session"] for each in told} == {name}
    assert told[0]["tokens"] > 50


def test_it_explains_why_a_prompt_would_be_evaluated_again(
    client: httpx.Client, smollm2: Model
) -> None:
    first, second = "A text that both have. " * 60, "And now another one. " * 20
    with_first = f"{first}This is how the first one ends, at some length."
    client.post("/v1/completions", json={"prompt": with_first, "max_tokens": 1})
    found = client.post("/v1/prefix/explain", json={"text": first + second}).json()
    common = len(smollm2.text.encode(first))
    assert abs(found["differs_at"] - common) <= 1
    assert 0 < found["reused"] <= common
    assert found["reason"] == "differs"
    assert "This is how" in found["nearest_text"]
    assert "And now" in found["prompt_text"]
    cold = client.post("/v1/prefix/explain", json={"text": "\u4e16 nothing like it"}).json()
    assert (cold["reused"], cold["reason"]) == (0, "cold")


def test_another_key_sees_nothing_of_it(smollm2: Model, tmp_path: Path) -> None:
    one, two = "one-key-of-sixteen", "two-key-of-sixteen"
    with (
        running(smollm2, tmp_path, ApiKeys((one, two))) as server,
        server.client(one) as mine,
        server.client(two) as other,
    ):
        name = created(mine)
        done(mine, name, "feed", text=TEXT[:900])
        done(mine, name, "snapshot", name="then")
        for method, path, body in (
            ("GET", f"/v1/sessions/{name}", None),
            ("DELETE", f"/v1/sessions/{name}", None),
            ("POST", f"/v1/sessions/{name}/generate", {}),
            ("POST", f"/v1/sessions/{name}/fork", {}),
            ("GET", f"/v1/sessions/{name}/memory", None),
            ("GET", f"/v1/sessions/{name}/events", None),
        ):
            assert other.request(method, path, json=body).status_code == 404
        assert other.post("/v1/snapshots/then/restore", json={}).status_code == 400
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
        ("", {"from_snapshot": "never"}),
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
def test_what_is_malformed_is_refused_and_changes_nothing(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    name = created(client)
    done(client, name, "feed", text=TEXT[:100])
    before = as_asked(client.get(f"/v1/sessions/{name}").json())
    answer = client.post(f"/v1/sessions{path.replace('NAME', name)}", json=body)
    assert answer.status_code == 400, answer.text
    done(client, name, "save")  # as the server does by itself after a while
    assert as_asked(client.get(f"/v1/sessions/{name}").json()) == before


@pytest.mark.parametrize("bits", [8, "8", 4, "8/4"])
def test_a_session_takes_bits_as_a_number_or_as_text(client: httpx.Client, bits: int | str) -> None:
    answer = client.post("/v1/sessions", json={"kv_bits": bits, "policy": "full"})
    assert answer.status_code == 201, answer.json()
    assert answer.json()["kv_bits"] == str(bits)
    assert client.post("/v1/sessions", json={"kv_bits": 5}).status_code == 400


def test_the_texts_of_tokens_joined_are_the_text(client: httpx.Client, smollm2: Model) -> None:
    """From any token on: half a character is no U+FFFD in the middle of a text."""
    text, name = "A party 🎉, a brain 🧠.", "pieces-joined"
    client.post("/v1/sessions", json={"name": name})
    client.post(f"/v1/sessions/{name}/feed", json={"text": text})
    ids = smollm2.text.encode(text)
    whole = client.get(f"/v1/sessions/{name}/text").json()["pieces"]
    assert "".join(piece["text"] for piece in whole) == text
    for start in range(len(ids)):
        found = client.get(f"/v1/sessions/{name}/text", params={"start": start}).json()["pieces"]
        assert found == whole[start:]
    client.delete(f"/v1/sessions/{name}")
