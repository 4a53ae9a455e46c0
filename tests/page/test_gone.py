"""Web UI: a conversation or a server that is gone while a message is written or answered."""

import json

import pytest
from page.chat_actions import box, start, wait_until_idle
from page.conftest import create
from page.test_connection import end_events
from page.test_drafts import hold_turns
from playwright.sync_api import Page, expect
from server.conftest import RunningServer

NOTHING_DONE = "Nothing was sent or changed: the server no longer has this conversation."


def test_a_draft_outlives_its_conversation(page: Page, server: RunningServer) -> None:
    """Send says why nothing is sent, nothing of the memory is shown, and a new chat has it."""
    create(server, "deleted")
    page.goto("/#/chat/deleted")
    expect(page.locator(".turn")).to_have_count(1)
    box(page).fill("And of Italy?")
    with server.client() as client:
        client.delete("/v1/sessions/deleted").raise_for_status()
    expect(page.locator(".log")).to_contain_text("This conversation was deleted.")
    expect(page.get_by_role("button", name="Branch", exact=True)).to_be_hidden()
    expect(page.locator(".turn-bars")).to_be_hidden()
    expect(page.locator(".memory-panel .legend")).to_be_hidden()
    box(page).press("Enter")
    expect(page.locator("#status")).to_have_text(NOTHING_DONE)
    expect(box(page)).to_have_value("And of Italy?")
    page.get_by_role("link", name="Start a new one").click()
    expect(page.locator("h1")).to_have_text("New chat")
    expect(box(page)).to_have_value("And of Italy?")
    page.go_back()
    expect(page.locator(".log")).to_contain_text("The server no longer has this conversation")
    expect(page.locator("h1")).to_have_text("deleted")
    expect(box(page)).to_have_value("")


def test_a_message_to_a_conversation_that_is_gone_is_back_in_the_box(
    page: Page, server: RunningServer
) -> None:
    """Also if the page did not know that it is gone. Once it is there again, it is shown."""
    create(server, "lost")
    page.route("**/v1/events", lambda route: route.abort())
    page.goto("/#/chat/lost")
    page.reload()
    expect(page.locator(".turn")).to_have_count(1)
    with server.client() as client:
        client.delete("/v1/sessions/lost").raise_for_status()
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(page.locator("#status")).to_have_text(NOTHING_DONE)
    expect(page.locator(".log")).to_contain_text("The server no longer has this conversation")
    expect(box(page)).to_have_value("And of Italy?")
    create(server, "lost")
    page.unroute_all()
    expect(page.locator(".turn-bars")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(1)


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_turn_that_is_not_confirmed_says_where_its_message_is(
    page: Page, is_answered: bool
) -> None:
    """In the box only if the answer failed: a server that shuts down has the message."""
    start(page, tokens=4)
    held = hold_turns(page)
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(page.locator(".turn.open")).to_contain_text("And of Italy?")
    page.route("**/memory", lambda route: route.abort())
    done = {"finish_reason": "eos", "revision": 2}
    events = [("token", {"text": "Well"}), ("done", done)]
    if not is_answered:
        events[1] = ("error", {"error": {"message": "It stops."}})
    body = "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events)
    held[0].fulfill(content_type="text/event-stream", body=body)
    where = "what it kept is shown here" if is_answered else "The message is in the box, too."
    expect(page.locator(".turn.unconfirmed")).to_contain_text(where)
    expect(box(page)).to_have_value("" if is_answered else "And of Italy?")
    page.unroute_all()


def test_a_first_message_that_is_not_confirmed_stays_shown(page: Page) -> None:
    """While another one is sent."""
    page.goto("/#/")
    page.route("**/turns", lambda route: route.abort())
    box(page).fill("Say hello.")
    box(page).press("Enter")
    expect(page.locator("#status")).to_have_text("The server does not answer.")
    wait_until_idle(page)
    page.route("**/v1/sessions/**", lambda route: route.abort())
    for text in ("First.", "Second."):
        box(page).fill(text)
        box(page).press("Enter")
        expect(page.locator(".turn.unconfirmed").last).to_contain_text(text)
        wait_until_idle(page)
    expect(page.locator(".turn.unconfirmed")).to_contain_text(["First.", "Second."])
    page.unroute_all()


def test_an_error_of_a_server_that_was_gone_goes_once_it_is_back(
    page: Page, server: RunningServer
) -> None:
    page.goto("/#/")
    page.route("**/v1/**", lambda route: route.abort())
    end_events(page, server)
    box(page).fill("Say hello.")
    box(page).press("Enter")
    expect(page.locator("#status")).to_have_text("The server does not answer.")
    page.unroute_all()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#status")).to_be_empty()
    expect(box(page)).to_have_value("Say hello.")


def test_continue_says_that_memory_is_full(page: Page, server: RunningServer) -> None:
    create(server, "full-answer", turns=0, policy="full", max_kv_size=64)
    turn = {"content": "Count to a hundred.", "max_tokens": 100, "temperature": 0}
    with server.client() as client:
        client.post("/v1/sessions/full-answer/turns", json=turn).raise_for_status()
    page.goto("/#/chat/full-answer")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#status")).to_contain_text(
        "Memory is full: 64 of 64 cells are in use, and policy full evicts nothing, so nothing "
        "was generated. Compress the whole memory"
    )
    expect(page.locator("details.compress[open]")).to_have_count(1)
