"""Web UI: what Undo keeps, what a pin says before, where words are forgotten, and the focus."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from page.chat_actions import box, settings
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def say(client: httpx.Client, name: str, text: str) -> None:
    turn = {"content": text, "max_tokens": 2, "temperature": 0}
    client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()


def open_chat(page: Page, client: httpx.Client, name: str, **settings: Any) -> None:
    """Open a conversation of three turns; the second one is selected."""
    client.post("/v1/sessions", json={"name": name, **settings}).raise_for_status()
    for city in ("Rome", "Oslo", "Bern"):
        say(client, name, f"Where is {city}?")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"/#/chat/{name}")
    page.locator(".turn-bars button[data-turn='turn 2']").click()


def text_of(client: httpx.Client, name: str) -> str:
    pieces = client.get(f"/v1/sessions/{name}/text").json()["pieces"]
    return "".join(piece["text"] for piece in pieces)


def names(client: httpx.Client) -> set[str]:
    return {entry["name"] for entry in client.get("/v1/sessions").json()["data"]}


def card_button(page: Page, label: str) -> Any:
    return page.locator(".turn-card").get_by_role("button", name=label, exact=True)


def test_turns_after_a_change_are_kept_in_a_branch_by_its_undo(
    page: Page, client: httpx.Client
) -> None:
    open_chat(page, client, "went-on")
    before = text_of(client, "went-on")
    card_button(page, "Remove").click()
    expect(page.locator(".question")).to_have_count(2)
    say(client, "went-on", "Where is Lima?")
    expect(page.locator(".question")).to_have_count(3)
    later, known = text_of(client, "went-on"), names(client)
    undo = page.get_by_role("button", name="Undo remove")
    undo.click()
    expect(page.locator("dialog")).to_contain_text("The turn since then will be kept in a branch")
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("dialog")).to_have_count(0)
    assert (text_of(client, "went-on"), names(client)) == (later, known)
    undo.click()
    page.locator("dialog").get_by_role("button", name="Undo").click()
    expect(page.locator("#status")).to_contain_text("newest branch of this conversation")
    expect(page.locator(".question")).to_have_count(3)
    assert text_of(client, "went-on") == before
    (branch,) = names(client) - known
    assert text_of(client, branch) == later
    page.locator(f'#conversations [data-name="{branch}"]').click()
    expect(page.locator(".question").last).to_contain_text("Where is Lima?")


def test_an_undo_that_fails_loses_nothing(page: Page, client: httpx.Client) -> None:
    """A whole one keeps whether the session stays in memory, and when it was created."""
    open_chat(page, client, "fails")
    before = text_of(client, "fails")
    client.put("/v1/sessions/fails/resident", json={"resident": True}).raise_for_status()
    created = client.get("/v1/sessions/fails").json()["created"]
    page.reload()
    page.locator(".turn-bars button[data-turn='turn 2']").click()
    card_button(page, "Remove").click()
    expect(page.locator(".chat:not(.busy) .question")).to_have_count(2)
    after, undo = text_of(client, "fails"), page.get_by_role("button", name="Undo remove")
    for path in ("**/_undo.fails.*/memory", "**/fails/revert"):
        page.route(path, lambda route: route.abort())
        undo.click()
        expect(page.locator("#status")).to_have_text("The server does not answer.")
        page.unroute(path)
    assert text_of(client, "fails") == after
    undo.click()
    expect(page.locator(".question")).to_have_count(3)
    session = client.get("/v1/sessions/fails").json()
    assert (session["resident"], session["created"]) == (True, created)
    assert text_of(client, "fails") == before
    assert not [name for name in names(client) if name.startswith("_undo.fails.")]


def test_an_answer_that_was_regenerated_and_went_on_is_kept_by_its_undo(
    page: Page, client: httpx.Client
) -> None:
    open_chat(page, client, "regenerated")
    page.get_by_role("button", name="Settings").click()
    # At random, Continue could end at once; without the penalty, Regenerate ends the answer.
    for name, value in (("max_tokens", "3"), ("temperature", "0"), ("repeat_penalty", "2")):
        page.locator(f"dialog [name={name}]").fill(value)
    page.locator("dialog button.main").click()
    for button in ("Regenerate", "Continue"):
        before = text_of(client, "regenerated")
        page.get_by_role("button", name=button).click()
        while text_of(client, "regenerated") == before:
            page.wait_for_timeout(50)
        expect(page.locator(".chat.busy")).to_have_count(0)
    later, known = text_of(client, "regenerated"), names(client)
    page.get_by_role("button", name="Undo regenerate").click()
    text = "The continued answer since then will be kept in a branch"
    expect(page.locator("dialog")).to_contain_text(text)
    page.locator("dialog").get_by_role("button", name="Undo").click()
    expect(page.locator("#status")).to_contain_text("Undone: regenerate.")
    (branch,) = names(client) - known
    assert text_of(client, branch) == later


def test_a_pin_is_undone_by_its_own_button_once_the_text_goes_on(
    page: Page, client: httpx.Client
) -> None:
    open_chat(page, client, "pinned-early")
    card_button(page, "Pin message").click()
    undo = page.get_by_role("button", name="Undo pin")
    expect(undo).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    page.locator("dialog [name=max_tokens]").fill("2")
    page.locator("dialog button.main").click()
    page.get_by_label("Message", exact=True).fill("Where is Lima?")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".chat:not(.busy) .question")).to_have_count(4)
    expect(undo).to_have_count(0)
    assert not [name for name in names(client) if name.startswith("_undo.pinned-early")]
    expect(page.locator(".memory-panel")).not_to_contain_text("shared with")
    card_button(page, "Unpin message").click()
    expect(page.locator("#status")).to_have_text("The message of turn 2 is no longer pinned.")
    expect(page.locator(".question")).to_have_count(4)
    memory = client.get("/v1/sessions/pinned-early/memory").json()
    assert "pinned" not in {run["standing"] for run in memory["runs"]}


def test_a_change_is_undone_by_a_key_outside_the_message_box(
    page: Page, client: httpx.Client
) -> None:
    open_chat(page, client, "undone-by-key")
    card_button(page, "Pin message").press("Enter")
    expect(card_button(page, "Unpin message")).to_be_focused()
    undo = page.get_by_role("button", name="Undo pin")
    page.locator("#words").fill("Where")
    page.locator("#words").press("Control+z")
    expect(page.locator("#words")).to_have_value("")
    expect(undo).to_be_visible()
    card_button(page, "Unpin message").focus()
    page.keyboard.press("Control+z")
    expect(page.locator("#status")).to_have_text("Undone: pin.")
    expect(undo).to_have_count(0)


def remove_two_turns(page: Page) -> None:
    """Remove the selected second turn and the first one; focus the conversation."""
    card_button(page, "Remove").click()
    expect(page.locator(".chat:not(.busy) .question")).to_have_count(2)
    page.locator(".turn-bars button[data-turn='turn 1']").click()
    card_button(page, "Remove").click()
    expect(page.locator(".chat:not(.busy) .question")).to_have_count(1)
    page.locator(".log").focus()


def test_changes_are_undone_one_after_another_by_the_key(page: Page, client: httpx.Client) -> None:
    open_chat(page, client, "undone-twice")
    before = text_of(client, "undone-twice")
    remove_two_turns(page)
    for turns in (2, 3):
        page.keyboard.press("Control+z")
        expect(page.locator(".chat:not(.busy) .question")).to_have_count(turns)
    assert text_of(client, "undone-twice") == before
    expect(page.locator("#words")).to_be_focused()


def test_the_key_pressed_twice_at_once_undoes_two_changes(page: Page, client: httpx.Client) -> None:
    open_chat(page, client, "undone-quickly")
    before = text_of(client, "undone-quickly")
    remove_two_turns(page)
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    expect(page.locator(".chat:not(.busy) .question")).to_have_count(3)
    assert text_of(client, "undone-quickly") == before


def test_what_cannot_be_pinned_says_so_before(page: Page, client: httpx.Client) -> None:
    open_chat(page, client, "small", max_kv_size=64)
    memory = client.get("/v1/sessions/small/memory").json()
    turn, answer = memory["spans"]["turn 3"], memory["spans"]["turn 3 answer"]
    window = [run["start"] for run in memory["runs"] if run["standing"] == "window"]
    for start, end in ((window[0], turn["start"]), (answer["start"], answer["end"])):
        client.post("/v1/sessions/small/pin", json={"start": start, "end": end}).raise_for_status()
    page.locator(".turn-bars button[data-turn='turn 3']").click()
    hint = page.locator(".turn-card .hint").filter(has_text="Pin message: Not enough room")
    expect(hint).to_contain_text("Unpin something first")
    expect(card_button(page, "Pin message")).to_have_count(0)
    expect(card_button(page, "Unpin answer")).to_be_visible()


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "shift", "discard": 122},
        {"policy": "archive", "window": 105, "ratio": 2},
    ],
)
def test_a_pin_that_the_policy_has_no_room_for_is_not_offered(
    page: Page, client: httpx.Client, settings: dict[str, Any]
) -> None:
    name = f"no-room-in-{settings['policy']}"
    open_chat(page, client, name, max_kv_size=128, keep=4, **settings)
    room = client.get(f"/v1/sessions/{name}/memory").json()["pin_room"]
    hint = page.locator(".turn-card .hint").filter(has_text="Pin message: Not enough room")
    expect(hint).to_contain_text(f"{room} cells can still be pinned")
    expect(card_button(page, "Pin message")).to_have_count(0)


def test_a_message_that_is_forgotten_in_part_leads_to_its_words(
    page: Page, client: httpx.Client
) -> None:
    name = "half-gone"
    client.post("/v1/sessions", json={"name": name, "max_kv_size": 96}).raise_for_status()
    say(client, name, "The river is long and wide. " * 10)
    for city in ("Rome", "Oslo"):
        say(client, name, f"Where is {city}?")
    page.goto(f"/#/chat/{name}")
    note = page.locator(".question .standing").first
    expect(note).to_contain_text(re.compile(r"\d+ of \d+ tokens forgotten"))
    note.get_by_role("link", name="which words?").click()
    span = client.get(f"/v1/sessions/{name}/memory").json()["spans"]["turn 1 question"]
    first = page.locator(f".text [data-at='{span['start']}']")
    expect(first).to_have_class(re.compile("forgotten"))
    expect(first).to_be_in_viewport()
    back = page.get_by_role("link", name="Back to the chat")
    is_seen = """(e) => {
        const { left, top, height } = e.getBoundingClientRect();
        return document.elementFromPoint(left + 2, top + height / 2) === e;
    }"""
    for width in (1280, 1024, 390):
        page.set_viewport_size({"width": width, "height": 700})
        page.reload()
        expect(first).to_be_in_viewport()
        assert back.evaluate(is_seen), width
    back.click()
    expect(note).to_be_visible()


def test_a_turn_that_is_changed_stays_in_view(page: Page, client: httpx.Client) -> None:
    name = "long-messages"
    client.post("/v1/sessions", json={"name": name}).raise_for_status()
    for number in range(4):
        say(client, name, f"{number}: " + "the river is long. " * 60)
    page.set_viewport_size({"width": 390, "height": 820})
    page.goto(f"/#/chat/{name}")
    page.locator(".turn-bars button[data-turn='turn 3']").click()
    changed = page.locator(".turn[data-turn='turn 3']")
    expect(changed).to_be_in_viewport()
    card_button(page, "Replace message").click()
    page.locator("dialog [name=text]").fill("the lake is deep. " * 60)
    page.locator("dialog button.main").click()
    expect(changed).to_contain_text("the lake is deep.")
    expect(changed.locator(".question")).to_contain_text("Replaced")
    page.wait_for_timeout(500)  # heights of turns that come into view are measured
    expect(changed).to_be_in_viewport(timeout=1)


def test_a_tap_beside_the_panel_closes_it(page: Page, client: httpx.Client) -> None:
    open_chat(page, client, "tapped")
    page.set_viewport_size({"width": 1024, "height": 700})
    page.get_by_role("button", name="Memory", exact=True).first.click()
    panel = page.locator(".memory-panel")
    expect(panel).to_be_visible()
    page.locator(".question").first.click(position={"x": 5, "y": 5})
    expect(panel).to_be_hidden()


def test_the_first_time_that_text_is_forgotten_is_said(page: Page, client: httpx.Client) -> None:
    name = "filling"
    client.post("/v1/sessions", json={"name": name, "max_kv_size": 64}).raise_for_status()
    page.goto(f"/#/chat/{name}")
    box = page.get_by_label("Message", exact=True)
    status = page.locator("#status")
    for text, said in (("Hi.", ""), ("the river is long. " * 5, "the oldest text is forgotten")):
        box.fill(text)
        box.press("Enter")
        expect(page.locator(".chat.busy")).to_have_count(1)
        expect(page.locator(".chat.busy")).to_have_count(0)
        expect(status).to_contain_text(said)
    assert "forgotten" in status.inner_text()


def test_a_focus_that_was_moved_during_an_answer_stays(page: Page, client: httpx.Client) -> None:
    open_chat(page, client, "moved")
    box = page.get_by_label("Message", exact=True)
    box.fill("Count to a hundred.")
    box.press("Enter")
    expect(page.locator(".turn.open")).to_have_count(1)
    page.get_by_role("button", name="Attach").focus()
    page.get_by_role("button", name="Stop").dispatch_event("click")
    expect(page.locator(".chat.busy")).to_have_count(0)
    expect(page.get_by_role("button", name="Attach")).to_be_focused()


def test_texts_after_an_undo_are_those_of_the_session(page: Page, client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "again"}).raise_for_status()
    say(client, "again", "Where is Rome?")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/again")
    settings(page, max_tokens="2", temperature="0")
    box(page).fill("Where is Oslo?")
    box(page).press("Enter")
    expect(page.locator(".turn[data-turn='turn 2']")).to_have_count(1)
    page.locator(".turn-bars button[data-turn='turn 2']").click()
    card_button(page, "Pin message").click()
    page.get_by_role("button", name="Undo pin").click()
    expect(page.locator("#status")).to_contain_text("Undone: pin.")
    card_button(page, "Pin message").click()
    expect(card_button(page, "Unpin message")).to_have_count(1)
    page.locator(".turn-bars button[data-turn='turn 1']").click()
    card_button(page, "Remove").click()
    expect(page.locator("#status")).to_contain_text("was removed")
    assert client.get("/v1/sessions/again").json()["revision"] == 6  # 2 turns, 3 changes, an undo
    expect(page.locator(".question .plain")).to_have_text(["Where is Oslo?"])
