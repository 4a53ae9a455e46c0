"""Web UI: texts and views that are outdated by the time they arrive, or by the time of a change."""

import time
from collections.abc import Iterator

import httpx
import pytest
from page.chat_actions import box, start, turns, wait_until_idle
from page.conftest import create
from page.test_left_views import hold, wait_for
from page.test_undo import card_button, open_chat, say, text_of
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer

OUTDATED = "The conversation has changed since it was shown"


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def test_a_replaced_text_is_refused_after_an_undo_elsewhere_or_for_another_session(
    page: Page, client: httpx.Client
) -> None:
    """The other session has the name, the revision and the number of tokens of the first one."""
    open_chat(page, client, "taken-back")
    card_button(page, "Remove").click()
    expect(page.locator(".chat:not(.busy) .question")).to_have_count(2)
    (copy,) = (
        entry["name"]
        for entry in client.get("/v1/sessions").json()["data"]
        if entry["name"].startswith("_undo.taken-back.")
    )
    page.locator(".turn-bars button[data-turn='turn 1']").click()
    path, text = "/v1/sessions/taken-back", page.locator("dialog textarea")
    card_button(page, "Replace message").click()
    text.fill("REPLACED")
    client.post(f"{path}/revert", json={"to": copy}).raise_for_status()
    expect(page.locator(".question")).to_have_count(3)
    page.locator("dialog button.main").click()
    expect(page.locator("dialog .failure")).to_contain_text(OUTDATED)
    page.keyboard.press("Escape")
    time.sleep(1)  # times of creation are in seconds
    for name in ("taken-back", copy):
        client.delete(f"/v1/sessions/{name}").raise_for_status()
    client.post("/v1/sessions", json={"name": "taken-back"}).raise_for_status()
    say(client, "taken-back", "Where is Lima?")
    expect(page.locator(".question .plain")).to_have_text(["Where is Lima?"])
    page.locator(".turn button.memory").first.click()
    card_button(page, "Replace message").click()
    text.fill("REPLACED")
    client.delete(path).raise_for_status()
    time.sleep(1)
    client.post("/v1/sessions", json={"name": "taken-back"}).raise_for_status()
    say(client, "taken-back", "Where is Bonn?")
    expect(page.locator(".question .plain")).to_have_text(["Where is Bonn?"])
    page.locator("dialog button.main").click()
    expect(page.locator("#status")).to_contain_text(OUTDATED)
    assert "REPLACED" not in text_of(client, "taken-back")


def test_a_text_that_arrives_late_does_not_replace_a_newer_one(
    page: Page, server: RunningServer, client: httpx.Client
) -> None:
    create(server, "late")
    page.goto("/#/chat/late")
    expect(page.locator(".turn")).to_have_count(1)
    held: list[Route] = []

    def hold_first(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    page.route("**/late/text*", hold_first)
    for count in (2, 3):
        say(client, "late", "More.")
        wait_for(page, lambda: held)
        if count == 3:
            expect(turns(page)).to_have_count(3)
    with page.expect_response("**/late/text*"):
        held[0].continue_()
    page.wait_for_timeout(300)
    expect(turns(page)).to_have_count(3)
    page.unroute_all()


def test_a_session_that_is_gone_while_its_text_is_fetched_is_no_error(
    page: Page, server: RunningServer, client: httpx.Client
) -> None:
    """The page's own errors fail the test. The heads say why they are not drawn."""
    for name in ("gone-heads", "gone-strip"):
        create(server, name)
    page.goto("/#/sessions/gone-heads/heads")
    expect(page.locator("table.heads")).to_be_visible()
    client.delete("/v1/sessions/gone-heads").raise_for_status()
    expect(page.locator("#status")).to_contain_text("there is no session 'gone-heads'")
    page.goto("/#/sessions/gone-strip")
    expect(page.locator(".text [data-at]").first).to_be_visible()
    client.delete("/v1/sessions/gone-strip").raise_for_status()
    with page.expect_response(lambda r: "/gone-strip/text" in r.url and r.status == 404):
        page.locator(".strip").hover()
    page.wait_for_timeout(200)


def test_what_is_written_is_kept_when_a_view_is_left(page: Page, client: httpx.Client) -> None:
    """In a dialog, by a reload of another view, and for a branch that cannot be loaded."""
    name = start(page, tokens=2)
    box(page).fill("Not sent")
    page.get_by_role("link", name="Inspect").click()
    expect(page.locator("#words")).to_have_count(0)
    page.reload()
    page.get_by_role("link", name="Back to the chat").click()
    expect(box(page)).to_have_value("Not sent")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.locator("dialog textarea").fill("Edited")
    page.go_back()
    expect(page.locator("dialog")).to_have_count(0)
    page.go_forward()
    expect(box(page)).to_have_value("Edited\n\nNot sent")
    box(page).fill("")
    expect(turns(page)).to_have_count(1)
    page.get_by_role("button", name="Edit", exact=True).click()
    page.locator("dialog textarea").fill("Edited once more")
    page.route("**/v1/sessions/edited-*/memory", lambda route: route.abort())
    page.locator("dialog button.main").click()
    expect(page.locator("#status")).to_have_text("The server does not answer.")
    expect(box(page)).to_have_value("Edited once more")
    page.unroute_all()
    assert client.get(f"/v1/sessions/{name}").status_code == 200


def test_a_message_that_is_given_back_joins_the_draft_of_the_view_that_is_open(
    page: Page,
) -> None:
    held = hold(page, "**/v1/sessions", "POST")
    box(page).fill("First")
    box(page).press("Enter")
    wait_for(page, lambda: held)
    page.goto("/#/sessions")
    expect(page.locator("#words")).to_have_count(0)
    page.goto("/#/")
    box(page).fill("Draft")
    held[0].abort()
    expect(box(page)).to_have_value("First\n\nDraft")
    page.unroute_all()


def test_turns_that_stay_what_they_are_keep_their_elements_and_keys_do_what_they_say(
    page: Page, client: httpx.Client, server: RunningServer
) -> None:
    """A key that accepts an input method's candidate sends nothing; Escape stops any answer."""
    name = start(page, tokens=2)
    say(client, name, "Why?")
    expect(turns(page)).to_have_count(2)  # the first one is no longer the newest
    page.evaluate("window.first = document.querySelector('.turn')")
    box(page).fill("Again")
    composing = "(e) => e.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229}))"
    box(page).evaluate(composing)
    expect(box(page)).to_have_value("Again")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(3)
    wait_until_idle(page)
    assert page.evaluate("window.first === document.querySelector('.turn')")
    files = [{"name": "old.txt", "mimeType": "text/plain", "buffer": b"caf\xe9"}]
    page.get_by_label("Files to attach").set_input_files(files)  # type: ignore[arg-type]
    expect(page.locator("#status")).to_contain_text("old.txt is not a text file that can be read")
    bias = {str(server.service.model.end_token_ids[0]): -100}
    body = {"content": "Count.", "max_tokens": 100_000, "temperature": 2, "detached": True}
    body |= {"logit_bias": bias}
    with client.stream("POST", f"/v1/sessions/{name}/turns", json={**body, "stream": True}) as sent:
        assert "event: token" in sent.iter_lines()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.locator(".log").press("Escape")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert not client.get(f"/v1/sessions/{name}").json()["busy"]
