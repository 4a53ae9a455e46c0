"""Messages of the web UI, and what it offers for a turn of which nothing is held."""

import re
from collections.abc import Iterator

import httpx
import pytest
from page.conftest import wait_until
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer

# Whether the status lies between the conversation and the message box.
_IN_BETWEEN = """(() => {
    const [log, status, composer] = [".log", "#status", ".composer"].map(
        (selector) => document.querySelector(selector).getBoundingClientRect(),
    );
    return log.bottom <= status.top && status.bottom <= composer.top;
})()"""
_IS_AT_THE_END = """(() => {
    const log = document.querySelector(".log");
    return log.scrollHeight - log.scrollTop - log.clientHeight < 2;
})()"""


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def create(client: httpx.Client, name: str, turns: int, **settings: object) -> None:
    client.post("/v1/sessions", json={"name": name, **settings}).raise_for_status()
    for _ in range(turns):
        turn = {"content": "Name a city. " * 12, "max_tokens": 1, "temperature": 0}
        client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()


def test_a_message_covers_no_answer_and_goes_by_itself(page: Page, client: httpx.Client) -> None:
    create(client, "covered", 2)
    page.clock.install()
    page.set_viewport_size({"width": 1440, "height": 420})  # the chat is longer than its view
    page.goto("/#/chat/covered")
    page.reload()
    page.locator(".turn-bars button").last.click()
    expect(page.locator("#status")).to_be_empty()
    page.get_by_role("button", name="Pin message").click()
    expect(page.locator("#status")).to_have_text(
        "The message of turn 2 is pinned. Unpin takes it back at any time."
    )
    wait_until(page, _IN_BETWEEN)
    wait_until(page, _IS_AT_THE_END)
    page.clock.fast_forward(11_000)
    expect(page.locator("#status")).to_be_empty()
    page.get_by_role("link", name="Operations").click()
    expect(page.get_by_role("heading", name="Operations")).to_be_visible()
    assert page.locator("#status").count() == 1  # a view that is left takes none with it


def test_a_turn_that_is_forgotten_is_only_removed_from_the_chat(
    page: Page, client: httpx.Client
) -> None:
    create(client, "lost", 4, policy="sliding", max_kv_size=64)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/lost")
    page.locator(".turn-bars button[data-turn='turn 1']").click()
    card = page.locator(".turn-card")
    expect(card).to_contain_text("in 0 cells, forgotten")
    expect(card).to_contain_text("cannot be pinned or replaced")
    expect(card).to_contain_text("The model has forgotten it already.")
    expect(card.get_by_role("button")).to_have_text(["Remove"])
    expect(page.locator(".question")).to_have_count(4)
    card.get_by_role("button").click()
    expect(page.locator(".question")).to_have_count(3)
    page.get_by_role("button", name="Undo remove").click()
    expect(page.locator(".question")).to_have_count(4)


def test_a_message_that_is_stopped_is_back_in_the_box(page: Page, client: httpx.Client) -> None:
    """The part that was read stays visible if older text was forgotten for it: the rest is back."""
    message = "Ships sail on every sea. " * 400
    for name, settings in (("removed", {}), ("cut-off", {"policy": "sliding", "max_kv_size": 256})):
        create(client, name, 1, **settings)
        page.goto(f"/#/chat/{name}")
        expect(page.locator(".question")).to_have_count(1)
        page.locator("#words").fill(message)
        page.locator("#words").press("Enter")
        expect(page.locator(".open .hint")).to_contain_text(re.compile("Reading [1-9]"))
        page.get_by_role("button", name="Stop", exact=True).click()
        stays = (
            "[0-9,]+ tokens of the message were read and stay"
            if settings
            else "memory is as before"
        )
        expect(page.locator("#status")).to_contain_text(re.compile(f"Stopped.*{stays}"))
        expect(page.locator(".question")).to_have_count(2 if settings else 1)
        rest = page.locator("#words").input_value()
        assert rest
        assert message.strip().endswith(rest.strip())
        assert (rest.strip() == message.strip()) is not bool(settings)
        if settings:
            expect(page.locator("#status")).to_contain_text("older text are forgotten for it")
            expect(page.locator(".question").last).to_contain_text("Ships sail on every sea.")
            expect(page.get_by_role("button", name="Answer", exact=True)).to_have_count(0)


def test_settings_wait_until_a_change_is_done(page: Page, client: httpx.Client) -> None:
    create(client, "changing", 2)
    page.goto("/#/chat/changing")
    page.locator(".turn-bars button").last.click()
    held: list[Route] = []
    page.route("**/pin", lambda route: held.append(route))
    page.get_by_role("button", name="Pin message").click()
    settings = page.get_by_role("button", name="Settings")
    expect(settings).to_be_disabled()
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    settings.click()
    expect(page.get_by_role("dialog", name="Conversation settings")).to_be_visible()


def test_settings_open_before_the_conversation_is_loaded(page: Page, client: httpx.Client) -> None:
    create(client, "slow", 1)
    held: list[Route] = []
    page.route(
        "**/memory", lambda route: held.append(route) if len(held) < 2 else route.continue_()
    )
    page.goto("/#/chat/slow")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    while len(held) < 2:  # of the view and of Settings
        page.wait_for_timeout(20)
    for route in held:
        route.continue_()
    expect(page.get_by_role("dialog", name="Conversation settings")).to_be_visible()
