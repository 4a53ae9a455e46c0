"""Web UI: an answer goes on without the page that asked for it, and any page stops it."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from page.chat_actions import box, settings, spans, start, texts, turns
from page.conftest import create
from page.test_drafts import hold_turns
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer

QUESTION, TOKENS = "Write a long story about a sailor.", 250


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


@contextmanager
def endless_answer(server: RunningServer, name: str) -> Iterator[Iterator[str]]:
    """Begin an answer without an end in a session; yield the lines after the first token."""
    ends = {str(token): -100 for token in server.service.model.end_token_ids}
    turn = {"content": "The sea", "stream": True, "max_tokens": 100_000, "logit_bias": ends}
    with (
        server.client() as client,
        client.stream("POST", f"/v1/sessions/{name}/turns", json=turn) as response,
    ):
        lines = response.iter_lines()
        while next(lines) != "event: token":
            pass
        yield lines


@pytest.fixture(scope="module")
def whole_answer(server: RunningServer) -> str:
    """The answer to the question as the second turn, through the API."""
    create(server, "alone", turns=0)
    with server.client() as client:
        for content, count in (("What is the capital of France?", 12), (QUESTION, TOKENS)):
            turn = {"content": content, "max_tokens": count, "temperature": 0}
            answer = client.post("/v1/sessions/alone/turns", json=turn).raise_for_status()
    return str(answer.json()["text"])


@pytest.mark.parametrize("way", ["reload", "inspect", "another chat"])
def test_an_answer_goes_on_when_its_page_is_left(
    page: Page, client: httpx.Client, whole_answer: str, way: str
) -> None:
    name = start(page, tokens=12)
    settings(page, max_tokens=str(TOKENS))
    box(page).fill(QUESTION)
    box(page).press("Enter")
    expect(page.locator(".turn.open .answer .markdown")).not_to_be_empty()
    if way == "reload":
        page.reload()
    else:
        page.goto("/#/" if way == "another chat" else f"/#/sessions/{name}")
        page.locator(f'#conversations [data-name="{name}"]').click()
    expect(turns(page)).to_have_count(2, timeout=60_000)
    expect(box(page)).to_have_value("")
    answer = spans(client, name)["turn 2 answer"]
    written = "".join(texts(client, name)[answer["start"] : answer["end"]])
    assert written.removesuffix("<|im_end|>") == whole_answer


def test_an_answer_of_another_client_is_stopped_from_the_page(
    page: Page, client: httpx.Client, server: RunningServer
) -> None:
    create(server, "endless", turns=1)
    with endless_answer(server, "endless") as lines:
        page.goto("/#/chat/endless")
        expect(page.locator(".turn[data-turn='turn 2']")).to_have_count(1)
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        assert any('"cancelled"' in line for line in lines)
    assert "turn 2 answer" in spans(client, "endless")


def test_stop_ends_no_answer_that_another_client_began_later(
    page: Page, client: httpx.Client, server: RunningServer
) -> None:
    create(server, "busy", turns=1)
    page.goto("/#/chat/busy")
    expect(page.locator(".turn")).to_have_count(1)
    held = hold_turns(page)
    stops: list[Route] = []

    def stop(route: Route) -> None:
        stops.append(route)
        if len(stops) == 1:  # ends nothing
            route.fulfill(json={})
        else:
            route.continue_()

    page.route("**/stop", stop)
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(page.locator(".turn.open")).to_have_count(1)
    turn = {"content": "Another.", "max_tokens": 1}
    client.post("/v1/sessions/busy/turns", json=turn).raise_for_status()
    with endless_answer(server, "busy") as lines:
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(box(page)).to_have_value("And of Italy?")
        assert len(stops) == 2
        assert not any('"cancelled"' in next(lines) for _ in range(200))
    assert held
    page.unroute_all()


def test_a_conversation_that_is_answered_is_deleted(
    page: Page, client: httpx.Client, server: RunningServer
) -> None:
    create(server, "unwanted", turns=1)
    with endless_answer(server, "unwanted") as lines:
        page.goto("/#/chat/unwanted")
        link = page.locator('#conversations [data-name="unwanted"]')
        link.focus()
        page.get_by_role("button", name="Delete unwanted").click()
        page.locator("dialog button.main").click()
        expect(link).to_have_count(0)
        assert any('"cancelled"' in line for line in lines)
    assert client.get("/v1/sessions/unwanted").status_code == 404
