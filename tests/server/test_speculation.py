"""The field `speculate`: the same answers, and how many tokens of drafts were right."""

from typing import Any

import httpx
import pytest
from server.conftest import RunningServer
from server.test_metrics import scrape

from kvkeep.compiled.binding import kernel_library

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

COUNTING = "one two three four five six seven eight nine ten. " * 6
TURN = [{"role": "user", "content": f"Write this again and again: {COUNTING}"}]
GREEDY = {"temperature": 0, "repeat_penalty": 1.0}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": COUNTING, "max_tokens": 40, "logprobs": 1}),
    "chat": ("/v1/chat/completions", {"messages": TURN, "max_tokens": 40}),
    "messages": ("/v1/messages", {"messages": TURN, "max_tokens": 40}),
    "responses": ("/v1/responses", {"input": TURN, "max_output_tokens": 40, "store": False}),
    "llama.cpp": ("/completion", {"prompt": COUNTING, "n_predict": 40, "n_probs": 1}),
}


def answer(client: httpx.Client, path: str, body: dict[str, Any], speculate: bool) -> Any:
    response = client.post(path, json={**body, **GREEDY, "seed": 1, "speculate": speculate})
    assert response.status_code == 200, response.text
    assert "speculate" not in response.headers.get("x-kvkeep-ignored", "")
    return response.json()


def text_of(result: Any) -> Any:
    """Return what an answer says, in any API."""
    fields = ("choices", "content", "output", "completion_probabilities", "text", "tokens")
    found = {name: result[name] for name in fields if name in result}
    assert found
    for item in found.get("output", ()):
        item.pop("id")
    return found


@pytest.mark.parametrize("api", REQUESTS)
def test_an_answer_is_the_same_and_reports_its_drafts(server: RunningServer, api: str) -> None:
    path, body = REQUESTS[api]
    before = scrape(server)
    with server.client() as client:
        answer(client, path, body, speculate=False)  # the same cells are reused from now on
        plain, result = (answer(client, path, body, speculate) for speculate in (False, True))
    after = scrape(server)
    assert text_of(result) == text_of(plain)
    assert "speculation" not in plain.get("x_kvkeep", {})
    counts = result["x_kvkeep"]["speculation"]
    assert 0 < counts["accepted"] <= counts["drafted"]
    if "timings" in result:
        timings = result["timings"]
        assert timings["draft_n_accepted"] == counts["accepted"]
        assert timings["draft_n"] == counts["drafted"]
        assert "draft_n" not in plain["timings"]
    for name, count in (("", counts["drafted"]), ("_accepted", counts["accepted"])):
        full_name = f"kvkeep_draft_tokens{name}_total"
        assert after[full_name] - before[full_name] == count


def test_sessions_speculate_on_request(server: RunningServer) -> None:
    results = list[Any]()
    with server.client() as client:
        for speculate in (False, True):
            name = client.post("/v1/sessions", json={}).json()["name"]
            body = {"text": COUNTING, "max_tokens": 40}
            generated = answer(client, f"/v1/sessions/{name}/generate", body, speculate)
            body = {"content": TURN[0]["content"], "max_tokens": 30}
            turn = answer(client, f"/v1/sessions/{name}/turns", body, speculate)
            assert ("draft_n" in generated["timings"]) is speculate
            results.append((text_of(generated), text_of(turn), turn["total_tokens"]))
    assert results[0] == results[1]
