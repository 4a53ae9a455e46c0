"""Web UI: the way back from branches, a panel that covers nothing, and other first steps."""

import pytest
from page.conftest import open_page
from playwright.sync_api import Browser, Page, expect
from server.conftest import RunningServer

# Whether an element is not under another one.
_IS_ON_TOP = """(element) => {
    const { left, top, width, height } = element.getBoundingClientRect();
    const shown = document.elementFromPoint(left + width / 2, top + height / 2);
    return element.contains(shown);
}"""


def create(server: RunningServer, name: str, turns: int = 1, **settings: object) -> None:
    """Create a conversation with answers of one token."""
    with server.client() as client:
        client.post("/v1/sessions", json={"name": name, **settings}).raise_for_status()
        for number in range(turns):
            turn = {"content": f"Name city {number}.", "max_tokens": 1, "temperature": 0}
            client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()


def test_a_branch_says_so_and_leads_back(page: Page, server: RunningServer) -> None:
    create(server, "left")
    page.goto("/#/chat/left")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.get_by_role("link", name="Original")).to_have_count(0)
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(page.locator("#status")).to_contain_text("This is a branch.")
    page.get_by_role("link", name="Original").click()
    expect(page).to_have_url(f"{server.url}/#/chat/left")
    expect(page.locator("#status")).to_be_empty()


@pytest.mark.parametrize("budget", [512, 64])
def test_an_edited_message_is_undone_by_the_original(
    page: Page, server: RunningServer, budget: int
) -> None:
    """In a branch, and in a new conversation where what led up to the message is forgotten."""
    name = f"edited-{budget}"
    create(server, name, turns=4, policy="sliding", max_kv_size=budget)
    page.goto(f"/#/chat/{name}")
    page.get_by_role("button", name="Edit").nth(1).click()
    page.locator("dialog [name=text]").fill("Name a lake.")
    page.locator("dialog button.main").click()
    expect(page.locator(".question").last).to_contain_text("Name a lake.")
    expect(page.locator("#status")).to_contain_text("see Original")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("link", name="Original").click()
    expect(page).to_have_url(f"{server.url}/#/chat/{name}")
    expect(page.locator(".question").last).to_contain_text("Name city 3.")


def test_the_memory_panel_covers_no_message_on_a_narrow_screen(
    browser: Browser, server: RunningServer
) -> None:
    create(server, "narrow")
    for page in open_page(browser, server, {"width": 390, "height": 700}):
        page.goto("/#/chat/narrow")
        page.locator(".turn-bars button").last.click()
        page.get_by_role("button", name="Memory", exact=True).first.click()
        page.locator(".turn-card").get_by_role("button", name="Pin", exact=True).click()
        status = page.locator("#status")
        expect(status).to_have_text("Turn 1 is pinned.")
        assert status.evaluate(_IS_ON_TOP)
        assert page.locator(".composer textarea").evaluate(_IS_ON_TOP)
        assert page.locator(".turn-card button").first.evaluate(_IS_ON_TOP)
        page.get_by_role("button", name="Close the memory panel").click()
        expect(page.locator(".memory-panel")).to_be_hidden()
        expect(page.locator(".panel-button")).to_be_focused()


def test_the_buttons_of_a_long_dialog_are_in_view(browser: Browser, server: RunningServer) -> None:
    for page in open_page(browser, server, {"width": 390, "height": 600}):
        page.get_by_role("button", name="Settings").click()
        expect(page.locator("dialog button.main")).to_be_in_viewport(ratio=1)
        page.locator("dialog [name=max_kv_size]").focus()
        assert page.locator("dialog [name=max_kv_size]").evaluate(_IS_ON_TOP)


def test_the_inspector_shows_a_conversation_as_the_chat_does(
    page: Page, server: RunningServer
) -> None:
    """Forgotten cells are hatched in strip and legend; turns are no prompts that were missed."""
    create(server, "inspected", turns=4, policy="sliding", max_kv_size=64)
    page.goto("/#/sessions/inspected")
    expect(page.locator("main")).to_contain_text("64 of 64 cells")
    expect(page.locator("main")).not_to_contain_text("Last prompt")
    image = "(element) => getComputedStyle(element).backgroundImage"
    strip = page.locator(".bars .forgotten").first.evaluate(image)
    assert strip == page.locator(".legend .forgotten").evaluate(image) != "none"


def test_a_view_that_cannot_be_loaded_says_why(page: Page) -> None:
    """Views of the inspector are loaded once they are asked for."""
    page.route("**/page/tree.js", lambda route: route.abort())
    page.get_by_role("link", name="Tree").click()
    expect(page.locator("main")).to_contain_text("The server does not answer.")
    page.get_by_role("link", name="Operations").click()
    expect(page.get_by_role("heading", name="Operations")).to_be_visible()
