"""Web UI: nothing that was typed is lost, and nothing generated without a word."""

import json
from collections.abc import Iterator

import httpx
import pytest
from page.chat_actions import box, settings, spans, start, texts, turns, wait_until_idle
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def test_a_draft_stays_with_its_conversation(page: Page) -> None:
    name = start(page, tokens=4)
    files = [{"name": "notes.md", "mimeType": "text/markdown", "buffer": b"Notes."}]
    page.get_by_label("Files to attach").set_input_files(files)  # type: ignore[arg-type]
    expect(page.locator(".chips li")).to_have_count(1)
    box(page).fill("And of Italy?")
    page.get_by_role("link", name="Inspect").click()
    expect(page.locator("#words")).to_have_count(0)
    page.goto("/#/")
    expect(box(page)).to_have_value("")
    box(page).fill("Something else")
    page.locator(f'#conversations [data-name="{name}"]').click()
    expect(box(page)).to_have_value("And of Italy?")
    expect(page.locator(".chips li")).to_have_count(1)
    page.goto("/#/")
    expect(box(page)).to_have_value("Something else")
    expect(page.locator(".chips li")).to_have_count(0)
    page.reload()
    expect(box(page)).to_have_value("Something else")
    page.goto(f"/#/chat/{name}")
    expect(box(page)).to_have_value("And of Italy?")
    expect(page.locator(".chips li")).to_have_count(1)
    page.reload()
    expect(box(page)).to_have_value("And of Italy?")
    expect(page.locator(".chips li")).to_have_count(1)


def test_a_double_click_in_a_dialog_hits_nothing_behind_it(page: Page) -> None:
    start(page, tokens=4)
    clicked = "document.addEventListener('click', ({target}) => target.append('clicked'))"
    page.evaluate(f"() => {{ {clicked}; }}")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_role("button", name="Cancel").dblclick()
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.get_by_text("clicked")).to_have_count(1)  # the button that opened the dialog


def hold_turns(page: Page) -> list[Route]:
    """Keep the page's turns from the server; they are in the list."""
    held: list[Route] = []
    page.route("**/turns", lambda route: held.append(route))
    return held


@pytest.mark.parametrize("answer", ["", "Well"])
def test_a_message_whose_answer_fails_is_put_before_the_draft(page: Page, answer: str) -> None:
    start(page, tokens=4)
    held = hold_turns(page)
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(page.locator(".turn.open")).to_contain_text("And of Italy?")
    box(page).fill("And of Spain?")
    if answer:
        events = (("token", {"text": answer}), ("error", {"error": {"message": "It failed."}}))
        body = "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events)
        held[0].fulfill(content_type="text/event-stream", body=body)
    else:
        held[0].abort()
    expect(page.locator("#status")).to_contain_text("failed" if answer else "does not answer")
    expect(box(page)).to_have_value("And of Italy?\n\nAnd of Spain?")
    page.unroute_all()


def test_a_message_that_was_read_when_it_was_stopped_is_a_turn_and_not_in_the_box(
    page: Page, client: httpx.Client
) -> None:
    name = start(page, tokens=4)
    held = hold_turns(page)
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(page.locator(".turn.open")).to_contain_text("And of Italy?")
    turn = {"content": "And of Italy?", "max_tokens": 2, "temperature": 0}
    client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()
    count = len(texts(client, name)) - spans(client, name)["turn 2 answer"]["start"]
    client.post(f"/v1/sessions/{name}/rewind", json={"count": count}).raise_for_status()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#status")).to_have_text(
        "Stopped. The message had been read and stays: Answer has it answered."
    )
    expect(turns(page)).to_have_count(2)
    expect(box(page)).to_have_value("")
    assert len(held) == 1
    page.unroute_all()
    page.get_by_role("button", name="Answer", exact=True).click()
    expect(turns(page).locator(".answer .markdown")).to_have_count(2)


def test_the_box_has_the_focus_after_a_click_on_send(page: Page) -> None:
    start(page, tokens=4)
    hold_turns(page)
    box(page).fill("And of Italy?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn.open")).to_have_count(1)
    page.keyboard.type("And of Spain?")
    expect(box(page)).to_have_value("And of Spain?")
    page.get_by_role("button", name="Stop", exact=True).click()
    wait_until_idle(page)
    page.unroute_all()


def test_undo_of_an_answer_that_was_continued_asks(page: Page, client: httpx.Client) -> None:
    name = start(page, "Count from one to twenty.", tokens=8)
    before = texts(client, name)
    settings(page, temperature="0", max_tokens="6")
    page.get_by_role("button", name="Regenerate").click()
    undo = page.get_by_role("button", name="Undo regenerate")
    expect(undo).to_be_visible()
    wait_until_idle(page)
    page.get_by_role("button", name="Continue").click()
    wait_until_idle(page)
    continued = texts(client, name)
    undo.click()
    expect(page.locator("dialog")).to_contain_text("The continued answer since then will")
    page.locator("dialog").get_by_role("button", name="Undo").click()
    expect(page.locator("#status")).to_have_text(
        "Undone: regenerate. The continued answer since then: see the newest branch of this "
        "conversation."
    )
    assert texts(client, name) == before
    branches = [
        entry["name"]
        for entry in client.get("/v1/sessions").json()["data"]
        if (entry["title"] or "").startswith("Count from one to twenty. (branch")
    ]
    assert continued in [texts(client, branch) for branch in branches]


def test_nothing_is_asked_of_a_conversation_that_is_being_deleted(page: Page) -> None:
    name = start(page, "Name a river in Chile.", tokens=4)
    missing: list[str] = []
    page.on("response", lambda got: missing.append(got.url) if got.status == 404 else None)
    item = page.locator("#conversations li", has=page.locator(f'[data-name="{name}"]'))
    item.hover()
    item.get_by_role("button", name="Delete").click()
    page.locator("dialog button.main").click()
    expect(page.locator("#status")).to_contain_text("was deleted.")
    expect(item).to_have_count(0)
    page.wait_for_timeout(1500)  # longer than the page waits before it loads a session again
    assert not missing
