"""Web UI: what is shown of a turn while it is answered, and of memory that becomes full."""

import re

from page.conftest import create
from page.test_drafts import hold_turns
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


def test_a_turn_has_its_number_and_system_prompt_from_its_beginning(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.locator("dialog [name=system]").fill("You are terse.")
    page.locator("dialog [name=max_tokens]").fill("4")
    page.locator("dialog button.main").click()
    held = hold_turns(page)
    page.locator("#words").fill("Count to a hundred.")
    page.locator("#words").press("Enter")
    opened = page.locator(".turn.open")
    expect(opened.locator(".turn-number")).to_have_text("Turn 1")
    expect(page.locator(".turn .system")).to_contain_text("You are terse.")
    top = opened.evaluate("(e) => e.offsetTop")
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    answered = page.locator(".chat:not(.busy) .turn[data-turn='turn 1']")
    expect(answered.locator(".turn-number")).to_have_text("Turn 1")
    assert answered.evaluate("(e) => e.offsetTop") == top
    page.unroute_all()


def test_buttons_of_an_answer_stand_below_what_continues_it(
    page: Page, server: RunningServer
) -> None:
    create(server, "continued")
    page.goto("/#/chat/continued")
    button = page.get_by_role("button", name="Continue")
    expect(button).to_be_enabled()
    hold_turns(page)
    button.click()
    opened = page.locator(".turn.open")
    expect(opened.locator(".message-bar").get_by_role("button", name="Continue")).to_be_visible()
    expect(page.locator(".turn:not(.open) .answer .message-bar")).to_have_count(0)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(opened).to_have_count(0)
    expect(button).to_be_enabled()
    page.unroute_all()


def test_it_is_said_before_a_message_that_memory_becomes_full(
    page: Page, server: RunningServer
) -> None:
    """And when older text is forgotten, while the answer is generated."""
    create(server, "filling", turns=2, policy="sliding", max_kv_size=64)
    page.goto("/#/chat/filling")
    expect(page.locator(".turn")).to_have_count(2)
    page.locator("#words").fill("Go on.")
    expect(page.locator(".size-warning")).to_have_text(
        re.compile(r"^Memory is nearly full: \d+ of 64 cells are free\..*begins to be forgotten")
    )
    page.get_by_role("button", name="Settings").click()
    page.locator("dialog [name=max_tokens]").fill("40")
    page.locator("dialog [name=temperature]").fill("0")
    page.locator("dialog button.main").click()
    page.locator("#words").fill("Name all colours, animals and cities that you know.")
    page.locator("#words").press("Enter")
    expect(page.locator("#status")).to_contain_text("Memory is full: the oldest text")
    expect(page.locator(".chat.busy")).to_have_count(0)
    page.locator("#words").fill("Go on.")
    expect(page.locator(".size-warning")).to_be_empty()
