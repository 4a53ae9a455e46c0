"""Web UI: views that are left while a conversation is begun, and dialogs whose text is refused."""

import re
from collections.abc import Callable

from page.chat_actions import box, settings, turns
from page.conftest import create
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer


def hold(page: Page, pattern: str, method: str) -> list[Route]:
    """Keep the page's requests of a method from the server; they are in the list."""
    held: list[Route] = []
    page.route(pattern, lambda route: _hold(route, method, held))
    return held


def _hold(route: Route, method: str, held: list[Route]) -> None:
    if route.request.method == method:
        held.append(route)
    else:
        route.continue_()


def wait_for(page: Page, condition: Callable[[], object]) -> None:
    while not condition():
        page.wait_for_timeout(50)


def visit(page: Page, hash_: str) -> None:
    page.evaluate("(hash) => { location.hash = hash; }", hash_)


def test_a_chat_that_is_left_before_it_has_begun_leaves_the_next_view_alone(
    page: Page, server: RunningServer
) -> None:
    """Its message is answered. What was chosen for it stays until one is sent."""
    create(server, "visited-instead")
    page.goto("/#/")
    settings(page, temperature="0", max_tokens="2")
    visit(page, "#/chat/visited-instead")
    expect(page.locator("h1")).to_have_text("visited-instead")
    visit(page, "#/")
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("dialog [name=max_tokens]")).to_have_value("2")
    page.keyboard.press("Escape")
    held = hold(page, "**/v1/sessions", "POST")
    box(page).fill("Name a lake in Peru.")
    box(page).press("Enter")
    wait_for(page, lambda: held)
    visit(page, "#/chat/visited-instead")
    expect(turns(page)).to_have_count(1)
    held[0].continue_()
    with server.client() as client:

        def answered() -> bool:
            entries = client.get("/v1/sessions").json()["data"]
            own = [entry for entry in entries if entry["title"] == "Name a lake in Peru."]
            return any(entry["tokens"] and not entry["busy"] for entry in own)

        wait_for(page, answered)
    expect(page).to_have_url(re.compile("/#/chat/visited-instead$"))
    expect(page).to_have_title("visited-instead - kvkeep")
    page.unroute_all()


def test_a_refused_first_message_is_kept_for_the_next_chat_when_its_view_is_left(
    page: Page, server: RunningServer
) -> None:
    """The views after it work."""
    create(server, "while-refused")
    page.goto("/#/")
    page.get_by_role("button", name="Settings").click()
    page.locator("dialog [name=policy]").select_option("full")
    page.locator("dialog [name=max_kv_size]").fill("64")
    page.locator("dialog button.main").click()
    held = hold(page, "**/v1/sessions/*", "DELETE")
    message = "What is the capital of France? " * 8
    box(page).fill(message)
    box(page).press("Enter")
    wait_for(page, lambda: held)
    visit(page, "#/chat/while-refused")
    expect(turns(page)).to_have_count(1)
    held[0].continue_()
    expect(page.locator("#conversations")).not_to_contain_text("What is the capital")
    expect(page).to_have_url(re.compile("/#/chat/while-refused$"))
    expect(page.locator(".chat #status")).to_have_count(1)
    visit(page, "#/")
    expect(box(page)).to_have_value(message)
    visit(page, "#/sessions")
    expect(page.locator("#content")).to_contain_text("while-refused")
    page.unroute_all()


def test_a_text_of_a_dialog_that_is_refused_is_asked_for_again(page: Page) -> None:
    """An edited message, and a system prompt that replaces another one."""
    page.goto("/#/")
    settings(page, system="Be brief.", temperature="0", max_tokens="2")
    box(page).fill("Name a lake.")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(2)
    page.route("**/fork", lambda route: route.abort())
    page.get_by_role("button", name="Edit", exact=True).click()
    for text in ("Name a pond.", "Name two ponds."):
        page.locator("dialog textarea").fill(text)
        page.locator("dialog button.main").press("Enter")
        expect(page.locator("dialog .failure")).to_have_text("The server does not answer.")
        expect(page.locator("dialog textarea")).to_have_value(text)
    page.keyboard.press("Escape")
    expect(page.locator(".chat.busy")).to_have_count(0)
    page.get_by_role("button", name="Settings").click()
    page.locator("dialog textarea").fill("Be long.")
    page.locator("dialog button.main").press("Enter")
    expect(page.locator("dialog .failure")).to_have_text("The server does not answer.")
    expect(page.locator("dialog textarea")).to_have_value("Be long.")
    page.unroute_all()
    page.locator("dialog button.main").press("Enter")
    expect(page.locator("#status")).to_contain_text("The system prompt was replaced")


def test_an_edited_message_of_a_conversation_that_is_gone_is_in_the_box(
    page: Page, server: RunningServer
) -> None:
    create(server, "gone-while-edited", turns=2)
    page.goto("/#/chat/gone-while-edited")
    page.route("**/v1/events", lambda route: route.abort())
    page.reload()
    page.get_by_role("button", name="Edit", exact=True).last.click()
    page.locator("dialog textarea").fill("Name a pond.")
    with server.client() as client:
        client.delete("/v1/sessions/gone-while-edited").raise_for_status()
    page.locator("dialog button.main").click()
    expect(page.locator(".log")).to_contain_text("The server no longer has this conversation")
    expect(box(page)).to_have_value("Name a pond.")
    expect(page.locator("#status")).not_to_be_empty()
    page.unroute_all()


def test_settings_of_a_new_chat_are_loaded_before_the_server_is_gone(page: Page) -> None:
    with page.expect_response("**/chat_changes.js"):
        page.reload()


def test_escape_in_the_search_stops_no_answer(page: Page) -> None:
    held = hold(page, "**/turns", "POST")
    box(page).fill("Name a lake.")
    box(page).press("Enter")
    wait_for(page, lambda: held)
    page.locator("#search").click()
    page.keyboard.type("lake")
    page.keyboard.press("Escape")
    page.wait_for_timeout(300)  # a stop would be requested
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    expect(page.locator(".turn.open")).not_to_contain_text("Stopping")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".chat.busy")).to_have_count(0)
    page.unroute_all()


def test_a_prompt_of_another_client_is_gone_on_with_in_a_branch(
    page: Page, server: RunningServer
) -> None:
    content = "Tell me of the sea, and of the long voyages of ships on it, please."
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    with server.client() as client:
        client.post("/v1/chat/completions", json=body).raise_for_status()
        entries = client.get("/v1/sessions?unnamed=true").json()["data"]
    name = next(entry["name"] for entry in entries if not entry["named"])
    page.goto(f"/#/chat/{name}")
    expect(page.locator(".chat-column > .hint:visible")).to_contain_text("Branch, at the top")
    expect(box(page)).to_be_hidden()
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(box(page)).to_be_visible()
    expect(page).not_to_have_url(re.compile(f"{name}$"))
