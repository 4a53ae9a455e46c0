"""Alignment in place over HTTP: chosen by request, reported in answers, never for others."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from server.conftest import RunningServer, serving

import kvkeep
from kvkeep.engine import Engine
from kvkeep.errors import InvalidArgument
from kvkeep.model import Model
from kvkeep.server.keys import ApiKeys
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.session import GREEDY

IN_PLACE = {"mode": "in_place", "min_saved": 64, "reread": 8}
FACTS = "".join(f"Fact {number}: {number} plus {number} is {2 * number}. " for number in range(14))


def body(api: str, day: str, alignment: Any = None) -> dict[str, Any]:
    """Return a request whose system text begins with a day, and goes on with the same facts.

    It is not speculated about: right drafts would be reported in answers of every kind.
    """
    system = f"You write for {api}. Today is {day}. {FACTS}"
    question = [{"role": "user", "content": "Is it raining?"}]
    with_system = [{"role": "system", "content": system}, *question]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": with_system, "max_tokens": 2},
        "/v1/completions": {"prompt": system, "max_tokens": 2},
        "/completion": {"prompt": system, "n_predict": 2},
        "/v1/responses": {"input": question, "instructions": system, "store": False},
        "/v1/messages": {"messages": question, "system": system, "max_tokens": 2},
        "/api/chat": {"messages": with_system, "options": {"num_predict": 2}, "stream": False},
    }
    more = {"max_output_tokens": 2} if api == "/v1/responses" else {}
    wanted = {} if alignment is None else {"alignment": alignment}
    return bodies[api] | more | wanted | {"speculate": False}


APIS = (
    *("/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses", "/v1/messages"),
    "/api/chat",
)


@pytest.mark.parametrize("api", APIS)
def test_answers_say_how_their_prompt_was_aligned(server: RunningServer, api: str):
    with server.client() as client:
        first = client.post(api, json=body(api, "Monday")).json()
        assert "x_kvkeep" not in first
        second = client.post(api, json=body(api, "Friday, the 13th", IN_PLACE))
        assert second.status_code == 200, second.text
        fields = second.json()["x_kvkeep"]
        assert (fields["reuse"], fields["seams"]) == ("in_place", 1)
        assert fields["moved"] > 3 * fields["evaluated"]
        exact = client.post(api, json=body(api, "Friday, the 13th")).json()
        assert "x_kvkeep" not in exact


def test_explain_shows_the_texts_at_each_seam(server: RunningServer):
    chat = "/v1/chat/completions"
    with server.client() as client:
        client.post(chat, json=body(chat, "the first of May"))
        changed = body(chat, "the second of May", IN_PLACE)
        report = client.post("/v1/prefix/explain", json=changed).json()
        (seam,) = report["seams"]
        assert (report["reuse"], seam["reread"]) == ("in_place", 8)
        assert (seam["removed_text"], seam["inserted_text"]) == (" first", " second")
        assert report["kept"] + report["moved"] == report["reused"]
        changed["alignment"] = {**IN_PLACE, "min_saved": 5000}
        report = client.post("/v1/prefix/explain", json=changed).json()
        assert "5000" in report["not_in_place"]
        client.post(chat, json=body(chat, "the second of May", IN_PLACE))
        (last, *_) = client.get("/v1/prefix/misses").json()["data"]
        assert last["reuse"] == "in_place"
        aligned = [each for each in client.get("/v1/operations").json()["data"] if each["parent"]]
        assert "align" in [each["what"] for each in aligned]


def test_stored_responses_and_slots_are_aligned_if_that_is_asked_for(server: RunningServer):
    responses = "/v1/responses"
    with server.client() as client:
        first = client.post(responses, json=body(responses, "Saturday") | {"store": True}).json()
        more = {"store": True, "previous_response_id": first["id"], "input": "And now?"}
        second = client.post(responses, json=body(responses, "Sunday", IN_PLACE) | more).json()
        fields = second["x_kvkeep"]
        assert (fields["reuse"], fields["seams"]) == ("in_place", 1)
        assert (
            fields["kept"] + fields["moved"] + fields["evaluated"]
            == (second["usage"]["input_tokens"])
        )
        assert fields["reread"] == 8
        more["previous_response_id"] = second["id"]
        exact = client.post(responses, json=body(responses, "Sunday") | more).json()
        assert "x_kvkeep" not in exact
        assert exact["usage"]["input_tokens_details"]["cached_tokens"] < fields["kept"] + 64
        slot = {"id_slot": 0}
        client.post("/completion", json=body("/completion", "Saturday") | slot)
        answer = client.post("/completion", json=body("/completion", "Sunday", IN_PLACE) | slot)
        fields = answer.json()["x_kvkeep"]
        assert (fields["reuse"], fields["seams"]) == ("in_place", 1)
        assert answer.json()["tokens_cached"] == fields["kept"] + fields["moved"]


def test_a_named_session_is_aligned_once_and_serves_no_exact_request(
    server: RunningServer, smollm2: Model
):
    model, first, second = smollm2, f"Day one. {FACTS}", f"Day two, in May. {FACTS} And now?"
    ids = model.text.encode(second)
    local = model.session(max_kv_size=2048, prefill_step=128)
    local.feed(model.text.encode(first))
    expected = local.align(ids, min_saved=64, reread=8)
    with kvkeep.Client(server.url) as client, server.client() as http:
        session = client.create("aligned")
        revision = session.feed(first)["revision"]
        path, wanted = "/v1/sessions/aligned/align", {"text": second, "min_saved": 64, "reread": 8}
        key = {"Idempotency-Key": "align once", "If-Match": f'"{revision}"'}
        result, again = (http.post(path, json=wanted, headers=key).json() for _ in range(2))
        assert result == again
        assert result["result"] | {"seconds": 0} == asdict(replace(expected, seconds=0))
        assert (result["revision"], result["tokens"]) == (revision + 1, len(ids))
        other = http.post(path, json=wanted | {"text": first}, headers=key)
        assert other.json()["error"]["code"] == "key_reused"
        operations = [each for each in client.operations() if each["session"] == "aligned"]
        assert [each["what"] for each in operations] == ["align", "generate", "create"]
        fork = session.fork("aligned-fork")
        answer = fork.generate(max_tokens=6, temperature=0)["tokens"]
        local_fork = local.fork()
        list(local_fork.stream(6, GREEDY))
        assert answer == local_fork.tokens[-6:]
        body = {"prompt": second, "max_tokens": 2}
        assert http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 0
        }
        exact = session.align(first, mode="exact")["result"]
        assert (exact["mode"], exact["moved"]) == ("exact", 0)


def test_messages_become_the_chat_of_a_named_session(server: RunningServer):
    with kvkeep.Client(server.url) as client:
        session = client.create("chat-aligned")
        system, facts = "Today is Monday. ", FACTS
        answer = session.say("Name a sea.", system=system + facts, max_tokens=4)["text"]
        history = [
            {"role": "system", "content": "Today is Friday. " + facts},
            {"role": "user", "content": "Name a sea."},
            {"role": "assistant", "content": answer.strip() or "-"},
        ]
        report = session.align(history, min_saved=100)["result"]
        assert (report["mode"], report["seams"]) == ("in_place", 1)
        session.say("Name a river.", max_tokens=4)
        info = session.info()
        assert {"system text", "turn 1 question", "turn 2 question"} <= set(info["spans"])
        assert "Friday" in str(session.text(0, 60))


@pytest.mark.parametrize(
    "alignment",
    [
        *("nearly", 3, {}, {"mode": "other"}, {"mode": "in_place", "reread": -1}),
        {"mode": "in_place", "min_save": 9},
    ],
)
def test_invalid_alignments_are_refused(server: RunningServer, alignment: Any):
    chat = "/v1/chat/completions"
    with server.client() as client:
        answer = client.post(chat, json=body(chat, "Monday", alignment))
    assert answer.status_code == 400
    assert "alignment" in answer.text


def test_a_servers_default_holds_for_each_owner_alone(smollm2: Model, tmp_path: Path):
    keys = ("first-key-of-16-characters", "second-key-of-16-characters")
    engine = Engine(
        smollm2,
        settings={"max_kv_size": 2048},
        folder=tmp_path,
        alignment=AlignmentOptions("in_place", min_saved=64),
    )
    chat = "/v1/chat/completions"
    with (
        serving(engine, ApiKeys(keys)) as server,
        server.client(keys[0]) as client,
        server.client(keys[1]) as other,
    ):
        client.post(chat, json=body(chat, "Monday"))
        theirs = other.post(chat, json=body(chat, "Tuesday")).json()
        assert theirs["x_kvkeep"]["reuse"] == "exact"
        assert "similar" in theirs["x_kvkeep"]["not_in_place"]
        assert theirs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        exact = client.post(chat, json=body(chat, "Wednesday", "exact")).json()
        assert "x_kvkeep" not in exact
        aligned = client.post(chat, json=body(chat, "Thursday")).json()
        assert aligned["x_kvkeep"]["reuse"] == "in_place"


def test_a_key_has_options_of_its_own(tmp_path: Path):
    file, keys = tmp_path / "keys", ("first-key-of-16-characters", "second-key-of-16-characters")
    settings = "alignment=in_place reread=64 reread_share=0.5"
    file.write_text(f"{keys[0]} {settings}\n# a comment\n\n{keys[1]}\n")
    api_keys, default = ApiKeys.read(file, b"s" * 32), AlignmentOptions(min_saved=500)
    owners = [api_keys.owner(key) or "" for key in keys]
    assert api_keys.alignment(owners[0], default) == AlignmentOptions("in_place", 500, 64, 0.5)
    assert api_keys.alignment(owners[1], default) == default
    for settings in ("alignment=nearly", "reread=-1", "reread", "colour=red", "reread_share=nan"):
        file.write_text(f"{keys[0]} {settings}\n")
        with pytest.raises(InvalidArgument, match="keys: "):
            ApiKeys.read(file, b"s" * 32)
