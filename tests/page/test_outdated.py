"""Edits on the page of a session that has changed: of the same text, or refused."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from page.test_page import WHOLE, fed, memory, names, press, select, show, told
from playwright.sync_api import Page, Route, expect
from server.conftest import Running
from topics import topic_text

TEXT = topic_text()[:500]
OUTDATED = "changed meanwhile"


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def chatted(client: httpx.Client) -> str:
    """Start a chat of two short turns."""
    name = next(names)
    assert client.post("/v1/sessions", json={"name": name}).status_code == 201
    for content in ("What is the capital of France?", "And of Italy?"):
        body = {"content": content, "max_tokens": 6}
        assert client.post(f"/v1/sessions/{name}/turns", json=body).status_code == 200
    return name


def token_ids(client: httpx.Client, name: str) -> list[int]:
    pieces = client.get(f"/v1/sessions/{name}/text").json()["pieces"]
    return [piece["id"] for piece in pieces]


def selected(page: Page, start: int, end: int) -> None:
    expect(page.get_by_label("From token")).to_have_value(str(start))
    expect(page.get_by_label("to before")).to_have_value(str(end))


def nothing_is_selected(page: Page) -> None:
    selected(page, 0, 0)
    for button in ("Pin", "Delete text", "Replace", "Insert before", "Fork here", "Rewind to here"):
        expect(page.get_by_role("button", name=button, exact=True)).to_be_disabled()


def drop_first_tokens(page: Page, client: httpx.Client, name: str, count: int = 3) -> None:
    """Delete the first tokens by another client, and wait until the page shows it."""
    total = memory(client, name)["tokens"]
    body = {"op": "delete", "start": 0, "end": count}
    assert client.post(f"/v1/sessions/{name}/edit", json=body).status_code == 200
    expect(page.locator("main")).to_contain_text(f"{total - count} tokens in")


def test_a_selected_span_is_followed_through_edits(page: Page, client: httpx.Client) -> None:
    """Replaced by a shorter text and deleted, a question takes nothing of its turn with it."""
    name = chatted(client)
    show(page, name)
    ids, question = token_ids(client, name), memory(client, name)["spans"]["turn 1 question"]
    page.get_by_role("button", name="turn 1 question").click()
    selected(page, question["start"], question["end"])
    press(page, "Replace", text="Hi")
    told(page, "tokens evaluated")
    now = memory(client, name)["spans"]["turn 1 question"]
    assert now["end"] < question["end"]
    selected(page, now["start"], now["end"])
    press(page, "Pin")
    told(page, f"Pinned tokens {now['start']} to {now['end']}")
    press(page, "Delete text")
    told(page, "Took out")
    nothing_is_selected(page)
    assert token_ids(client, name) == ids[: question["start"]] + ids[question["end"] :]


def test_a_selection_by_numbers_is_cleared_once_they_mean_other_tokens(
    page: Page, client: httpx.Client
) -> None:
    name = fed(client, text=TEXT)
    show(page, name)
    for button, fields in (
        ("Replace", {"text": " x"}),
        ("Insert before", {"text": " y"}),
        ("Delete text", {}),
    ):
        total = memory(client, name)["tokens"]
        select(page, total - 20, total - 10)
        press(page, button, **fields)
        told(page, re.compile("tokens evaluated|Took out"))
        nothing_is_selected(page)


def test_a_selection_by_numbers_stays_while_they_mean_the_same_tokens(
    page: Page, client: httpx.Client
) -> None:
    name = fed(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    select(page, total - 20, total - 10)
    for button, fields, answer in (
        ("Pin", {}, "Pinned"),
        ("Stay in memory", {}, "stays in memory"),
        ("Snapshot", {"name": next(names)}, "on disk"),
        ("Rewind to here", {}, "Rewound"),
    ):
        press(page, button, **fields)
        told(page, answer)
        selected(page, total - 20, total - 10)
    page.get_by_label("Say").fill("Say hello.")
    page.get_by_label("Say").press("Enter")
    expect(page.get_by_role("button", name="turn 1 answer")).to_be_visible()
    selected(page, total - 20, total - 10)
    press(page, "Name", name="a part")
    told(page, "They are now a part")
    press(page, "Insert before", text=" Once more")
    told(page, "tokens evaluated")
    part = memory(client, name)["spans"]["a part"]
    assert part["start"] > total - 20
    selected(page, part["start"], part["end"])


def test_what_others_change_clears_or_moves_the_selection(page: Page, client: httpx.Client) -> None:
    """Another tab, and a client of the API."""
    name = chatted(client)
    total = memory(client, name)["tokens"]
    show(page, name)
    select(page, total - 9, total - 3)
    other = page.context.new_page()
    show(other, name)
    select(other, 0, 2)
    press(other, "Delete text")
    told(page, "nothing is selected any more")
    nothing_is_selected(page)
    page.get_by_label("or span").select_option("turn 2 question")
    before = memory(client, name)["spans"]["turn 2 question"]
    selected(page, before["start"], before["end"])
    drop_first_tokens(page, client, name, 1)
    selected(page, before["start"] - 1, before["end"] - 1)
    press(page, "Delete text")
    told(page, "Took out")
    assert memory(client, name)["tokens"] == total - 3 - (before["end"] - before["start"])


DIALOGS: dict[str, dict[str, str]] = {
    "Replace": {"text": "other"},
    "Insert before": {"text": "other"},
    "Name": {"name": "part"},
    "Fork here": {"name": "fork-of-another-revision"},
    "Fork": {"name": "fork-of-another-revision"},
    "Snapshot": {"name": "snapshot-of-another-revision"},
    "Compress": {"ratio": "2"},
    "Delete": {},
}


def test_a_dialog_is_for_the_session_as_it_was_when_it_opened(
    page: Page, client: httpx.Client
) -> None:
    """However long it stays open, and though the page shows the session as it is now."""
    name = fed(client, WHOLE, TEXT)
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
        told(page, OUTDATED)
        assert (client.get(f"/v1/sessions/{name}").json(), token_ids(client, name)) == before, (
            button
        )
    names_now = [each["name"] for each in client.get("/v1/sessions").json()["data"]]
    assert "fork-of-another-revision" not in names_now
    snapshots = [each["name"] for each in client.get("/v1/snapshots").json()["data"]]
    assert "snapshot-of-another-revision" not in snapshots


def test_a_turn_is_for_the_conversation_that_is_shown(page: Page, client: httpx.Client) -> None:
    """It is refused, and what was typed stays, to be sent once the page shows what is new."""
    name = chatted(client)
    show(page, name)
    page.route("**/memory", lambda route: route.abort())  # the page does not hear of it
    client.post(f"/v1/sessions/{name}/turns", json={"content": "And of Spain?", "max_tokens": 4})
    before = token_ids(client, name)
    page.get_by_label("Say").fill("Why that one?")
    page.get_by_label("Say").press("Enter")
    told(page, OUTDATED)
    expect(page.get_by_label("Say")).to_have_value("Why that one?")
    assert token_ids(client, name) == before
    page.unroute("**/memory")
    client.post(f"/v1/sessions/{name}/pin", json={"start": 0, "end": 1})
    expect(page.get_by_role("button", name="turn 3 answer")).to_be_visible()
    page.get_by_label("Say").press("Enter")
    expect(page.get_by_role("button", name="turn 4 answer")).to_be_visible()


def test_an_edit_while_an_answer_is_generated_is_refused(
    page: Page, client: httpx.Client, server: Running
) -> None:
    name = chatted(client)
    show(page, name)
    page.get_by_role("button", name="turn 1 question").click()
    body = {"max_tokens": 100_000, "ignore_eos": True, "stream": True}
    with (
        server.client() as other,
        other.stream("POST", f"/v1/sessions/{name}/generate", json=body) as answer,
    ):
        lines = answer.iter_lines()  # letting go of it hangs up
        next(lines)
        before = memory(client, name)["tokens"]
        press(page, "Delete text")
        told(page, "reading or writing")
    while client.get(f"/v1/sessions/{name}").json()["busy"]:
        pass
    assert memory(client, name)["tokens"] >= before
    assert memory(client, name)["spans"]["turn 1 question"]["end"] > 0


def test_text_that_is_outdated_cannot_be_selected(page: Page, client: httpx.Client) -> None:
    """It stays on the page until the new text has come."""
    name = fed(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    held: list[Route] = []
    page.route("**/text?*", lambda route: held.append(route))
    drop_first_tokens(page, client, name)
    point(page, f'.text [data-at="{total - 9}"]', f'.text [data-at="{total - 5}"]')
    page.wait_for_timeout(100)
    nothing_is_selected(page)
    assert held
    for route in held:
        route.continue_()
    page.unroute("**/text?*")
    expect(page.locator(f'.text [data-at="{total - 1}"]')).to_have_count(0)
    select(page, total - 12, total - 8)
    press(page, "Delete text")
    told(page, "Took out")
    assert memory(client, name)["tokens"] == total - 7


def test_a_browser_selection_beyond_the_text_does_not_select_the_text_that_replaces_it(
    page: Page, client: httpx.Client
) -> None:
    name = fed(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    point(page, f'.text [data-at="{total - 5}"]', ".chat h2")
    selected(page, total - 5, total)
    drop_first_tokens(page, client, name)
    expect(page.locator(f'.text [data-at="{total - 1}"]')).to_have_count(0)
    page.wait_for_timeout(100)
    nothing_is_selected(page)


def point(page: Page, first: str, last: str) -> None:
    """Select from the beginning of one element to the end of another, as the pointer does."""
    page.evaluate(
        """([first, last]) => {
            const [from, to] = [first, last].map((each) => document.querySelector(each).firstChild);
            getSelection().setBaseAndExtent(from, 0, to, to.length);
        }""",
        [first, last],
    )


def test_a_dialog_closes_with_its_view(page: Page, client: httpx.Client) -> None:
    one, other = fed(client, text=TEXT), fed(client, text=TEXT)
    show(page, one)
    show(page, other)
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("dialog")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name=one, exact=True)).to_be_visible()
    expect(page.locator("dialog")).to_have_count(0)
    assert client.get(f"/v1/sessions/{other}").status_code == 200


def test_a_session_that_takes_the_name_of_a_deleted_one_has_nothing_selected(
    page: Page, client: httpx.Client
) -> None:
    """Its revisions are counted anew, and may be those of the other."""
    name = fed(client, text=TEXT)
    show(page, name)
    total = memory(client, name)["tokens"]
    select(page, total - 9, total - 3)
    settings: dict[str, Any] = {"name": name}
    assert client.delete(f"/v1/sessions/{name}").status_code == 200
    assert client.post("/v1/sessions", json=settings).status_code == 201
    assert client.post(f"/v1/sessions/{name}/feed", json={"text": TEXT * 2}).status_code == 200
    expect(page.locator("main")).not_to_contain_text(f"{total} tokens in")
    nothing_is_selected(page)
