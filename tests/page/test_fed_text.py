"""Web UI: text that was fed between turns, and the first turn while it is answered."""

from page.conftest import create
from page.test_detached import endless_answer
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


def test_a_text_that_was_fed_stays_shown_when_the_chat_goes_on(
    page: Page, server: RunningServer
) -> None:
    """It has a part of its own in the chat and in the strip, no larger than it is."""
    create(server, "fed")
    turn = {"content": "What is the word?", "max_tokens": 4, "temperature": 0}
    with server.client() as client:
        fed = {"text": "The secret word is PINEAPPLE. "}
        client.post("/v1/sessions/fed/feed", json=fed).raise_for_status()
        client.post("/v1/sessions/fed/turns", json=turn).raise_for_status()
    page.goto("/#/chat/fed")
    expect(page.locator(".turn")).to_have_count(3)
    text = page.locator(".turn[data-turn='text'] .message")
    expect(text.locator(".plain")).to_have_text("The secret word is PINEAPPLE.")
    assert text.evaluate("(e) => e.scrollHeight < 150")
    labels = "(all) => all.map((e) => e.dataset.turn)"
    shown = page.locator(".turn-bars button").evaluate_all(labels)
    assert shown == ["opening", "turn 1", "text", "turn 2"]


def test_a_fed_text_that_is_removed_leaves_no_other_one_selected(
    page: Page, server: RunningServer
) -> None:
    create(server, "fed-twice")
    turn = {"content": "What is the word?", "max_tokens": 4, "temperature": 0}
    with server.client() as client:
        for text in ("The secret word is PINEAPPLE. ", "Another word is PLUM. "):
            client.post("/v1/sessions/fed-twice/feed", json={"text": text}).raise_for_status()
            client.post("/v1/sessions/fed-twice/turns", json=turn).raise_for_status()
    page.goto("/#/chat/fed-twice")
    second = page.locator(".turn-bars button[data-turn='text 2']")
    expect(second).to_have_count(1)
    page.locator(".turn-bars button[data-turn='text']").click()
    page.locator(".turn-card").get_by_role("button", name="Remove", exact=True).click()
    expect(second).to_have_count(0)
    expect(page.locator(".chat.busy")).to_have_count(0)
    expect(page.locator(".turn-bars button[data-turn='text']")).to_have_count(1)
    expect(page.locator(".turn-bars button.selected")).to_have_count(0)
    expect(page.locator(".turn-card button")).to_have_count(0)


def test_the_first_turn_is_shown_as_one_while_it_is_answered(
    page: Page, server: RunningServer
) -> None:
    create(server, "begun", turns=0)
    with endless_answer(server, "begun"):
        page.goto("/#/chat/begun")
        turn = page.locator(".turn[data-turn='turn 1']")
        expect(turn.locator(".answer")).to_have_count(1)
        expect(turn.locator(".turn-number")).to_have_text("Turn 1")
        expect(page.locator(".log")).not_to_contain_text("Message 1")
