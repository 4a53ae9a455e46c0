"""Web UI: what the inspector changes can be undone there and in the chat."""

from typing import Any

import pytest
from page.conftest import create
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


def text_of(server: RunningServer, name: str) -> str:
    with server.client() as client:
        pieces = client.get(f"/v1/sessions/{name}/text").json()["pieces"]
    return "".join(piece["text"] for piece in pieces)


def names(server: RunningServer, start: str = "") -> list[str]:
    with server.client() as client:
        entries = client.get("/v1/sessions").json()["data"]
    return [entry["name"] for entry in entries if entry["name"].startswith(start)]


def change(page: Page, button: str, **fields: str) -> None:
    """Change turn 1 of the session that is shown by a button of its selection."""
    page.get_by_label("or span").select_option("turn 1")
    page.get_by_role("button", name=button).click()
    for name, value in fields.items():
        page.locator(f"dialog [name={name}]").fill(value)
    if fields:
        page.locator("dialog button.main").click()


def undo_button(page: Page, operation: str = "") -> Any:
    return page.get_by_role("button", name=f"Undo {operation}".rstrip())


def test_each_change_is_undone_in_the_inspector(page: Page, server: RunningServer) -> None:
    """Without a question, as nothing was said since."""
    create(server, "undoable", turns=3)
    page.goto("/#/sessions/undoable")
    before = text_of(server, "undoable")
    for button, operation, fields in (
        ("Remove text", "remove", {}),
        ("Replace", "replace", {"text": "Hi"}),
        ("Insert before", "insert", {"text": "Hi"}),
        ("Rewind to token", "rewind", {}),
    ):
        change(page, button, **fields)
        expect(undo_button(page)).to_have_text(f"Undo {operation}")
        assert text_of(server, "undoable") != before
        undo_button(page).click()
        expect(page.locator("#status")).to_have_text(f"Undone: {operation}.")
        expect(undo_button(page)).to_have_count(0)
        assert text_of(server, "undoable") == before
    assert names(server, "_undo.undoable") == []


def test_the_chat_offers_undo_of_the_inspector_and_then_its_own(
    page: Page, server: RunningServer
) -> None:
    create(server, "both", turns=3)
    before = text_of(server, "both")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/both")
    page.locator(".turn-bars button[data-turn='turn 2']").click()
    page.get_by_role("button", name="Pin message", exact=True).click()
    expect(undo_button(page)).to_have_text("Undo pin")
    page.get_by_role("link", name="Inspect", exact=True).click()
    expect(undo_button(page)).to_have_text("Undo pin")
    change(page, "Rewind to token")
    expect(undo_button(page)).to_have_text("Undo rewind")
    page.get_by_role("link", name="Chat", exact=True).click()
    undo_button(page, "rewind").click()
    expect(page.locator("#status")).to_have_text("Undone: rewind.")
    assert text_of(server, "both") == before
    expect(undo_button(page)).to_have_text("Undo pin")


def test_ctrl_z_undoes_in_the_inspector(page: Page, server: RunningServer) -> None:
    create(server, "by-key", turns=2)
    before = text_of(server, "by-key")
    page.goto("/#/sessions/by-key")
    change(page, "Remove text")
    expect(undo_button(page)).to_have_text("Undo remove")
    page.locator(".text").press("Control+z")
    expect(page.locator("#status")).to_have_text("Undone: remove.")
    assert text_of(server, "by-key") == before


def test_what_was_said_since_a_change_of_the_inspector_is_kept_in_a_branch(
    page: Page, server: RunningServer
) -> None:
    create(server, "went-on-there", turns=2)
    before = text_of(server, "went-on-there")
    page.goto("/#/sessions/went-on-there")
    change(page, "Rewind to token")
    expect(undo_button(page)).to_have_text("Undo rewind")
    with server.client() as client:
        body = {"content": "Where is Lima?", "max_tokens": 1, "temperature": 0}
        client.post("/v1/sessions/went-on-there/turns", json=body).raise_for_status()
    later, known = text_of(server, "went-on-there"), names(server)
    undo_button(page).click()
    expect(page.locator("dialog")).to_contain_text(
        "Anything said since then will be kept in a branch"
    )
    page.locator("dialog").get_by_role("button", name="Undo").click()
    expect(page.locator("#status")).to_contain_text("newest branch of this conversation")
    assert text_of(server, "went-on-there") == before
    (branch,) = set(names(server)) - set(known)
    assert text_of(server, branch) == later


def test_a_change_that_is_refused_leaves_nothing_to_undo(page: Page, server: RunningServer) -> None:
    create(server, "refused", turns=2)
    page.goto("/#/sessions/refused")
    page.route("**/refused/edit", lambda route: route.fulfill(status=400, json={"error": {}}))
    change(page, "Remove text")
    expect(page.locator("#status")).to_have_class("error")
    expect(undo_button(page)).to_have_count(0)
    assert names(server, "_undo.refused") == []


def test_a_session_that_is_deleted_in_the_inspector_leaves_no_copies(
    page: Page, server: RunningServer
) -> None:
    create(server, "copied", turns=2)
    page.goto("/#/sessions/copied")
    change(page, "Remove text")
    expect(undo_button(page)).to_have_text("Undo remove")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("dialog")).to_contain_text("cannot be undone")
    page.locator("dialog button.main").click()
    expect(page).to_have_url(f"{server.url}/#/")
    assert [name for name in names(server) if "copied" in name] == []


@pytest.mark.parametrize("button", ["Replace", "Insert before"])
def test_a_text_that_is_refused_is_asked_for_again_as_it_was_written(
    page: Page, server: RunningServer, button: str
) -> None:
    name = f"refused-{button.split()[0].lower()}"
    create(server, name, turns=0, policy="full", max_kv_size=64)
    with server.client() as client:
        client.post(f"/v1/sessions/{name}/feed", json={"text": "The sea is grey."})
        spans = {"name": "turn 1", "start": 0, "end": 2}
        client.post(f"/v1/sessions/{name}/spans", json=spans).raise_for_status()
    page.goto(f"/#/sessions/{name}")
    text = "A wave comes in. " * 20
    change(page, button, text=text)
    expect(page.locator("dialog .failure")).to_be_visible()
    expect(page.locator("dialog [name=text]")).to_have_value(text)
    page.locator("dialog [name=text]").fill(" Two")
    page.locator("dialog button.main").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(undo_button(page)).to_be_visible()  # the change is made
    assert "Two" in text_of(server, name)
