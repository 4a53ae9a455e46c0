"""Web UI: answers of other tabs, messages that are refused, and servers that stop in between."""

import json

import pytest
from page.chat_actions import box, start
from page.conftest import create
from page.test_drafts import hold_turns
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


@pytest.mark.parametrize("is_known", [True, False])
def test_an_answer_of_another_tab_is_waited_for(
    page: Page, server: RunningServer, is_known: bool
) -> None:
    """Also if the message is sent before the page has seen that there is one."""
    name = f"shared-{is_known}"
    create(server, name, max_kv_size=8192)  # does not fill meanwhile
    page.goto(f"/#/chat/{name}")
    expect(page.locator(".turn")).to_have_count(1)
    if not is_known:
        page.route("**/v1/sessions?*", lambda route: route.abort())
    body = {"content": "Count.", "max_tokens": 100_000, "stream": True, "temperature": 2}
    bias = {"logit_bias": {str(server.service.model.end_token_ids[0]): -100}}
    send, stop = (page.get_by_role("button", name=name, exact=True) for name in ("Send", "Stop"))
    with (
        server.client() as client,
        client.stream("POST", f"/v1/sessions/{name}/turns", json=body | bias) as response,
    ):
        lines = response.iter_lines()  # closing it disconnects
        next(lines)
        box(page).fill("Hello.")
        if is_known:
            expect(stop).to_be_visible()
        box(page).press("Enter")
        expect(page.locator("#status")).to_contain_text("perhaps in another tab")
        expect(box(page)).to_have_value("Hello.")
        expect(page.locator(".question").last).to_contain_text("Count.")
        expect(stop).to_be_visible()
    expect(send).to_be_enabled()
    expect(page.locator("#status")).to_be_empty()
    page.unroute_all()


def test_a_message_that_a_full_memory_refuses_says_what_helps(
    page: Page, server: RunningServer
) -> None:
    create(server, "full-chat", policy="full", max_kv_size=128)
    page.goto("/#/chat/full-chat")
    box(page).fill("the river is long. " * 40)
    box(page).press("Enter")
    expect(page.locator("#status")).to_contain_text("send a shorter message")
    expect(page.locator("details.compress[open]")).to_have_count(1)
    expect(box(page)).not_to_have_value("")


def test_an_answer_stays_shown_while_the_server_is_gone(page: Page, server: RunningServer) -> None:
    name = start(page, tokens=4)
    held = hold_turns(page)
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(page.locator(".turn.open")).to_contain_text("And of Italy?")
    page.route("**/memory", lambda route: route.abort())
    events = (("token", {"text": "Well"}), ("error", {"error": {"message": "It stops."}}))
    body = "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events)
    held[0].fulfill(content_type="text/event-stream", body=body)
    unconfirmed = page.locator(".turn.unconfirmed")
    expect(unconfirmed.locator(".question")).to_contain_text("And of Italy?")
    expect(unconfirmed.locator(".answer")).to_contain_text("Well")
    expect(unconfirmed).to_contain_text("Not confirmed")
    page.unroute_all()
    with server.client() as client:
        pin = {"start": 0, "end": 1}
        client.post(f"/v1/sessions/{name}/pin", json=pin).raise_for_status()
    expect(unconfirmed).to_have_count(0)
