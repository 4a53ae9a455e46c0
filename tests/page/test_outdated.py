"""Edits on the page of a session that has changed: they apply to the same text or are refused."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from page.test_page import (
    WHOLE,
    create_fed_session,
    expect_status,
    memory,
    names,
    press,
    select,
    show,
)
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer
from topics import topic_text

TEXT = topic_text()[:500]
OUTDATED = "has changed since"


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def start_chat(client: httpx.Client) -> str:
    """Start a chat of two short turns."""
    name = next(names)
    assert client.post("/v1/sessions", json={"name": name}).status_code == 201
    for content in ("What is the capital of France?", "And of Italy?"):
        body = {"content": content, "max_tokens": 6, "temperature": 0}
        assert client.post(f"/v1/sessions/{name}/turns", json=body).status_code == 200
    return name


def token_ids(client: httpx.Client, name: str) -> list[int]:
    pieces = client.get(f"/v1/sessions/{name}/text").json()["pieces"]
    return [piece["id"] for piece in pieces]


def expect_selection(page: Page, start: int, end: int) -> None:
    expect(page.get_by_label("From token")).to_have_value(str(start))
    expect(page.get_by_label("to (excluded)")).to_have_value(str(end))


def expect_no_selection(page: Page) -> None:
    expect_selection(page, 0, 0)
    for button in (
        "Pin",
        "Remove text",
        "Replace",
        "Insert before",
        "Branch here",
        "Rewind",
    ):
        expect(page.get_by_role("button", name=button, exact=True)).to_be_disabled()


def drop_first_tokens(page: Page, client: httpx.Client, name: str, count: int = 3) -> None:
    """Delete the first tokens by another client, and wait until the page shows it."""
    total = memory(client, name)["tokens"]
    body = {"op": "delete", "start": 0, "end": count}
    assert client.post(f"/v1/sessions/{name}/edit", json=body).status_code == 200
    expect(page.locator("main")).to_contain_text(f"cells in use. {total - count} tokens")


def test_a_selected_span_is_followed_through_edits(page: Page, client: httpx.Client) -> None:
    """A question is replaced by a shorter text and deleted; the rest of its turn stays."""
    name = start_chat(client)
    show(page, name)
    ids, question = token_ids(client, name), memory(client, name)["spans"]["turn 1 question"]
    page.get_by_label("or span").select_option("turn 1 question")
    expect_selection(page, question["start"], question["end"])
    press(page, "Replace", text="Hi")
    expect_status(page, "tokens evaluated")
    now = memory(client, name)["spans"]["turn 1 question"]
    assert now["end"] == now["start"] + 1 < question["end"]
    expect_selection(page, now["start"], now["end"])
    press(page, "Pin")
    expect_status(page, f"Pinned token {now['start']}.")
    press(page, "Remove text")
    expect_status(page, "Removed")
    expect_no_selection(page)
    assert token_ids(client, name) == ids[: question["start"]] + ids[question["end"] :]


def test_a_selection_by_numbers_is_cleared_once_they_mean_other_tokens(
    page: Page, client: httpx.Client
) -> None:
    name = create_fed_session(client, text=TEXT)
    show(page, name)
    for button, fields in (
        ("Replace", {"text": " x"}),
        ("Insert before", {"text": " y"}),
        ("Remove text", {}),
    ):
        total = memory(client, name)["tokens"]
        select(page, total - 20, total - 10)
        press(page, button, **fields)
        expect_status(page, re.compile("tokens evaluated|Removed"))
        expect_no_selection(page)


def test_a_selection_by_numbers_stays_while_they_mean_the_same_tokens(
    page: Page, client: httpx.Client
) -> None:
    name = create_fed_session(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    select(page, total - 20, total - 10)
    for button, fields, response in (
        ("Pin", {}, "Pinned"),
        ("Stay in memory", {}, "stays in memory"),
        ("Snapshot", {"name": next(names)}, "saved"),
        (f"Rewind to token {total - 10} (removes 10 tokens)", {}, "Rewound"),
    ):
        press(page, button, **fields)
        expect_status(page, response)
        expect_selection(page, total - 20, total - 10)
    press(page, "Name", name="a part")
    expect_status(page, "Span a part created")
    press(page, "Insert before", text=" Once more")
    expect_status(page, "tokens evaluated")
    part = memory(client, name)["spans"]["a part"]
    assert part["start"] > total - 20
    expect_selection(page, part["start"], part["end"])


def test_changes_by_others_clear_or_move_the_selection(page: Page, client: httpx.Client) -> None:
    """In another tab, and by a client of the API."""
    name = start_chat(client)
    total = memory(client, name)["tokens"]
    show(page, name)
    select(page, total - 9, total - 3)
    other = page.context.new_page()
    show(other, name)
    select(other, 0, 2)
    press(other, "Remove text")
    expect_status(page, "the selection was cleared")
    expect_no_selection(page)
    page.get_by_label("or span").select_option("turn 2 question")
    before = memory(client, name)["spans"]["turn 2 question"]
    expect_selection(page, before["start"], before["end"])
    drop_first_tokens(page, client, name, 1)
    expect_selection(page, before["start"] - 1, before["end"] - 1)
    press(page, "Remove text")
    expect_status(page, "Removed")
    assert memory(client, name)["tokens"] == total - 3 - (before["end"] - before["start"])


DIALOGS: dict[str, dict[str, str]] = {
    "Replace": {"text": "other"},
    "Insert before": {"text": "other"},
    "Name": {"name": "part"},
    "Branch here": {"name": "fork-of-another-revision"},
    "Branch": {"name": "fork-of-another-revision"},
    "Snapshot": {"name": "snapshot-of-another-revision"},
    "Compress": {"ratio": "2"},
    "Delete": {},
}


def test_a_dialog_is_for_the_session_as_it_was_when_it_opened(
    page: Page, client: httpx.Client
) -> None:
    """Even if it stays open while the page shows later revisions."""
    name = create_fed_session(client, WHOLE, TEXT)
    show(page, name)
    for button, fields in DIALOGS.items():
        total = memory(client, name)["tokens"]
        select(page, total - 20, total - 10)
        page.get_by_role("button", name=button, exact=True).click()
        dialog = page.locator("dialog")
        for field, value in fields.items():
            dialog.locator(f"[name={field}]").fill(value)
        drop_first_tokens(page, client, name)
        before = client.get(f"/v1/sessions/{name}").json(), token_ids(client, name)
        dialog.locator("button.main").click()
        expect(page.locator("#status, dialog").filter(has_text=OUTDATED)).to_be_visible()
        assert (client.get(f"/v1/sessions/{name}").json(), token_ids(client, name)) == before, (
            button
        )
        if dialog.is_visible():  # asks for its texts again
            dialog.get_by_role("button", name="Cancel", exact=True).click()
    names_now = [item["name"] for item in client.get("/v1/sessions").json()["data"]]
    assert "fork-of-another-revision" not in names_now
    snapshots = [item["name"] for item in client.get("/v1/snapshots").json()["data"]]
    assert "snapshot-of-another-revision" not in snapshots


def test_a_turn_is_for_the_conversation_that_is_shown(page: Page, client: httpx.Client) -> None:
    """An outdated turn is refused; its text stays in the input and can be sent again."""
    name = start_chat(client)
    page.goto(f"/#/chat/{name}")
    expect(page.locator(".turn")).to_have_count(2)
    page.route("**/memory", lambda route: route.abort())  # the page keeps showing the old revision
    body = {"content": "And of Spain?", "max_tokens": 4, "temperature": 0}
    client.post(f"/v1/sessions/{name}/turns", json=body)
    expect_status(page, "does not answer")  # the page has seen the change, and could not show it
    before = token_ids(client, name)
    page.get_by_label("Message", exact=True).fill("Why that one?")
    page.get_by_label("Message", exact=True).press("Enter")
    expect_status(page, OUTDATED)
    expect(page.get_by_label("Message", exact=True)).to_have_value("Why that one?")
    assert token_ids(client, name) == before
    page.unroute("**/memory")
    client.post(f"/v1/sessions/{name}/pin", json={"start": 0, "end": 1})
    expect(page.locator(".turn")).to_have_count(3)
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator(".turn:not(.open)")).to_have_count(4)


def test_an_edit_while_an_answer_is_generated_is_refused(
    page: Page, client: httpx.Client, server: RunningServer
) -> None:
    name = start_chat(client)
    show(page, name)
    page.get_by_label("or span").select_option("turn 1 question")
    body = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with (
        server.client() as other,
        other.stream("POST", f"/v1/sessions/{name}/generate", json=body) as response,
    ):
        lines = response.iter_lines()  # closing it disconnects
        next(lines)
        before = memory(client, name)["tokens"]
        press(page, "Remove text")
        expect_status(page, "is being generated")
    while client.get(f"/v1/sessions/{name}").json()["busy"]:
        pass
    assert memory(client, name)["tokens"] >= before
    assert memory(client, name)["spans"]["turn 1 question"]["end"] > 0


def test_outdated_text_cannot_be_selected(page: Page, client: httpx.Client) -> None:
    """Outdated text stays visible until the new text is loaded."""
    name = create_fed_session(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    held: list[Route] = []
    page.route("**/text?*", lambda route: held.append(route))
    drop_first_tokens(page, client, name)
    point(page, f'.text [data-at="{total - 9}"]', f'.text [data-at="{total - 5}"]')
    page.wait_for_timeout(100)
    expect_no_selection(page)
    assert held
    for route in held:
        route.continue_()
    page.unroute("**/text?*")
    expect(page.locator(f'.text [data-at="{total - 1}"]')).to_have_count(0)
    select(page, total - 12, total - 8)
    press(page, "Remove text")
    expect_status(page, "Removed")
    assert memory(client, name)["tokens"] == total - 7


def test_a_browser_selection_beyond_the_text_does_not_select_the_text_that_replaces_it(
    page: Page, client: httpx.Client
) -> None:
    name = create_fed_session(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    point(page, f'.text [data-at="{total - 5}"]', "#gone")
    expect_selection(page, total - 5, total)
    drop_first_tokens(page, client, name)
    expect(page.locator(f'.text [data-at="{total - 1}"]')).to_have_count(0)
    page.wait_for_timeout(100)
    expect_no_selection(page)


def point(page: Page, first: str, last: str) -> None:
    """Select from the start of one element to the end of another, as the pointer does."""
    page.evaluate(
        """([first, last]) => {
            const [from, to] = [first, last].map((each) => document.querySelector(each).firstChild);
            getSelection().setBaseAndExtent(from, 0, to, to.length);
        }""",
        [first, last],
    )


def test_a_dialog_closes_with_its_view(page: Page, client: httpx.Client) -> None:
    first, other = create_fed_session(client, text=TEXT), create_fed_session(client, text=TEXT)
    show(page, first)
    show(page, other)
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name=first, exact=True)).to_be_visible()
    expect(page.locator("dialog")).to_have_count(0)
    assert client.get(f"/v1/sessions/{other}").status_code == 200


def test_a_session_that_takes_the_name_of_a_deleted_one_has_nothing_selected(
    page: Page, client: httpx.Client
) -> None:
    """Revisions restart, and may equal those of the deleted session."""
    name = create_fed_session(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    select(page, total - 9, total - 3)
    settings: dict[str, Any] = {"name": name}
    assert client.delete(f"/v1/sessions/{name}").status_code == 200
    assert client.post("/v1/sessions", json=settings).status_code == 201
    assert client.post(f"/v1/sessions/{name}/feed", json={"text": TEXT * 2}).status_code == 200
    expect(page.locator("main")).not_to_contain_text(f"cells in use. {total} tokens")
    expect_no_selection(page)
