"""Web UI: the inspector's URLs and its log."""

from page.conftest import create
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer


def test_a_head_that_is_selected_is_in_the_url(page: Page, server: RunningServer) -> None:
    create(server, "headed")
    page.goto("/#/sessions/headed/heads")
    page.get_by_role("button", name="layer 2, head 1:").click()
    heading = page.get_by_role("heading", name="Layer 2, head 1:")
    expect(heading).to_be_visible()
    expect(page).to_have_url(f"{server.url}/#/sessions/headed/heads/2/1")
    page.reload()
    expect(heading).to_be_visible()


def test_an_undo_is_one_operation(page: Page, server: RunningServer) -> None:
    """In the log as it is, and as it is loaded."""
    create(server, "undone", turns=2)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/undone")
    page.locator(".turn-bars button").last.click()
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("button", name="Undo remove").click()
    expect(page.locator("#status")).to_have_text("Undone: remove.")
    page.goto("/#/operations")
    rows = page.locator("tbody tr", has=page.get_by_text("undone", exact=True))
    expect(rows.locator("td:nth-child(2)")).to_have_text(
        ["undo", "edit", *["generate"] * 2, "create"]
    )


def test_a_view_that_waits_for_the_server_says_so(page: Page, server: RunningServer) -> None:
    create(server, "waiting")
    held: list[Route] = []
    page.route("**/v1/sessions/waiting/memory", lambda route: held.append(route))
    page.goto("/#/sessions/waiting")
    waiting = page.locator("#content").get_by_text("Loading...")
    expect(waiting).to_be_visible()
    while not held:
        page.wait_for_timeout(20)
    for route in held:
        route.continue_()
    expect(page.get_by_role("heading", name="waiting")).to_be_visible()
    expect(waiting).to_have_count(0)
