"""Web UI: a server that is slow to answer, or gone."""

from contextlib import suppress

import pytest
from page.chat_actions import box
from page.conftest import create
from playwright.sync_api import Error, Page, Route, expect
from server.conftest import RunningServer


def end_events(page: Page, server: RunningServer) -> None:
    """End the stream of operations, which requests of it must not begin again."""
    server.service.closing = True
    expect(page.get_by_role("alert")).to_be_visible()
    server.service.closing = False


def test_a_slow_server_leaves_a_page_that_says_it_loads(page: Page, server: RunningServer) -> None:
    """The focus stays where it was moved meanwhile."""
    create(server, "slow")
    page.goto("/#/chat/slow")
    expect(page.locator(".turn")).to_have_count(1)
    held: list[Route] = []
    for path in ("**/v1/sessions?unnamed=true", "**/v1/sessions/slow/memory"):
        page.route(path, lambda route: held.append(route))
    page.reload()
    expect(page.locator("h1")).to_have_text("Loading...")
    expect(page.locator(".log")).to_have_text("Loading...")
    expect(page.locator("#conversations")).to_contain_text("Loading...")
    expect(page.locator("body")).not_to_contain_text("No conversations yet")
    page.locator("#search").click()
    page.unroute_all()
    for route in held:
        with suppress(Error):  # of the page before it was loaded again
            route.continue_()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("h1")).to_have_text("slow")
    expect(page.locator('#conversations [data-name="slow"]')).to_be_visible()
    expect(page.locator("#search")).to_be_focused()


def test_a_page_asks_a_server_that_is_gone_for_its_return_alone(
    page: Page, server: RunningServer
) -> None:
    """The note that it is gone covers nothing."""
    create(server, "gone")
    page.goto("/#/chat/gone")
    expect(page.locator("#words")).to_be_focused()
    page.route("**/v1/events", lambda route: route.abort())
    page.reload()
    note = page.get_by_role("alert")
    expect(note).to_be_visible()
    expect(page.locator(".turn")).to_have_count(1)
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 700})
        bottom = note.evaluate("(e) => e.getBoundingClientRect().bottom")
        assert note.evaluate("(e) => e.scrollHeight <= e.clientHeight")
        tops = "(all) => all.map((e) => e.getBoundingClientRect().top)"
        shown = page.locator("h1:visible, button:visible, .button:visible")
        assert min(shown.evaluate_all(tops)) >= bottom
        expect(page.locator("#words")).to_be_in_viewport(ratio=1)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.partition("/v1/")[2]))
    page.wait_for_timeout(5000)  # longer than the page waits before it loads the list again
    assert set(asked) == {"events"}
    page.unroute_all()
    expect(note).to_be_hidden()


def test_the_box_has_the_focus_once_a_conversation_is_loaded(
    page: Page, server: RunningServer
) -> None:
    """Although the list, whose link was pressed, is drawn again meanwhile."""
    create(server, "pressed-in-list")
    link = page.locator('#conversations [data-name="pressed-in-list"]')
    held: list[Route] = []
    page.route("**/v1/sessions/pressed-in-list/memory", lambda route: held.append(route))
    link.click()
    with server.client() as client:
        title = {"title": "Drawn again"}
        client.put("/v1/sessions/pressed-in-list/title", json=title).raise_for_status()
    expect(link).to_contain_text("Drawn again")
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("#words")).to_be_focused()
    page.unroute_all()


@pytest.mark.parametrize("view", ["chat", "sessions"])
def test_a_view_that_was_opened_while_the_server_was_gone_is_shown_once_it_is_back(
    page: Page, server: RunningServer, view: str
) -> None:
    """Also one whose module was not loaded."""
    name = f"opened-{view}"
    create(server, name)
    page.goto("/#/")
    expect(page.locator(f'#conversations [data-name="{name}"]')).to_be_visible()
    page.route("**/v1/**", lambda route: route.abort())
    page.route("**/page/**", lambda route: route.abort())
    end_events(page, server)
    page.evaluate("(hash) => { location.hash = hash; }", f"#/{view}/{name}")
    expect(page.locator("#content")).to_contain_text("The server does not answer.")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    heading = page.locator("#content h1")
    left = "(e) => e.getBoundingClientRect().left"
    assert heading.evaluate(left) > page.locator("main").evaluate(left)  # it has a margin
    page.unroute_all()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(heading).to_have_text(name)


def test_a_click_on_the_link_of_a_view_that_failed_tries_again(
    page: Page, server: RunningServer
) -> None:
    create(server, "clicked-again")
    link = page.locator('#conversations [data-name="clicked-again"]')
    for again in (link, page.get_by_role("button", name="Try again")):
        page.goto("/#/")
        page.route("**/memory", lambda route: route.abort())
        link.click()
        expect(page.locator("#content h1")).to_have_text("Error")
        page.unroute_all()
        again.click()
        expect(page.locator(".turn")).to_have_count(1)


def test_an_answer_that_still_arrives_is_said_not_to_be_lost(
    page: Page, server: RunningServer
) -> None:
    """The banner names a shutdown while an answer arrives and operations are not followed."""
    create(server, "arriving", max_kv_size=8192)
    page.goto("/#/chat/arriving")
    expect(page.locator(".turn")).to_have_count(1)
    bias = {str(server.service.model.end_token_ids[0]): -100}
    body = {"content": "Count.", "stream": True, "max_tokens": 4096, "logit_bias": bias}
    page.route("**/turns", lambda route: route.continue_(post_data=body))
    page.route("**/v1/events", lambda route: route.abort())
    box(page).fill("Write a long story.")
    box(page).press("Enter")
    expect(page.locator(".open .markdown").first).to_be_visible()
    end_events(page, server)
    note = page.get_by_role("alert")
    expect(note).to_contain_text("the answer still arrives")
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 700})
        assert note.evaluate("(e) => e.scrollHeight <= e.clientHeight")
    page.keyboard.press("Escape")
    expect(note).to_contain_text("does not answer")
    page.unroute_all()
    expect(note).to_be_hidden()


def test_a_page_that_is_hidden_holds_no_connection(page: Page, server: RunningServer) -> None:
    """Once it is shown again, it has what it missed."""
    create(server, "hidden")
    page.goto("/#/chat/hidden")
    expect(page.locator(".turn")).to_have_count(1)
    with page.expect_event("requestfailed", lambda failed: failed.url.endswith("/v1/events")):
        set_hidden(page, True)
    turn = {"content": "And of Italy?", "max_tokens": 1, "temperature": 0}
    with server.client() as client:
        client.post("/v1/sessions/hidden/turns", json=turn).raise_for_status()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.get_by_role("alert")).to_be_hidden()
    set_hidden(page, False)
    expect(page.locator(".turn")).to_have_count(2)


def test_a_page_that_is_shown_again_keeps_what_is_still_true(
    page: Page, server: RunningServer
) -> None:
    """A selection and the turns stay, unless another session has taken the name meanwhile."""
    create(server, "paused", turns=2)
    page.goto("/#/sessions/paused")
    page.get_by_label("or span").select_option("turn 2 question")
    end = page.get_by_label("to (excluded)")
    expect(end).not_to_have_value("0")
    texts: list[str] = []
    page.on("request", lambda request: texts.append(request.url) if "/text?" in request.url else 0)
    pause(page)
    expect(end).not_to_have_value("0")
    page.goto("/#/chat/paused")
    expect(page.locator(".turn")).to_have_count(2)
    loaded = len(texts)
    pause(page)
    assert len(texts) == loaded
    page.goto("/#/sessions/paused")
    page.get_by_label("or span").select_option("turn 2 question")
    set_hidden(page, True)
    page.wait_for_timeout(300)  # until the answers to its requests are there
    with server.client() as client:
        client.delete("/v1/sessions/paused").raise_for_status()
    create(server, "paused", turns=2)
    set_hidden(page, False)
    expect(end).to_have_value("0")


def pause(page: Page) -> None:
    """Hide the page, and show it again, until it has asked what it shows for changes."""
    with page.expect_event("requestfailed", lambda failed: failed.url.endswith("/v1/events")):
        set_hidden(page, True)
    with page.expect_response("**/sessions/paused/memory"):
        set_hidden(page, False)
    page.wait_for_timeout(300)  # its text would be requested


def set_hidden(page: Page, hidden: bool) -> None:
    script = """(hidden) => {
        Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(script, hidden)


def test_a_page_whose_first_request_fails_tries_again(page: Page) -> None:
    page.route("**/v1/page", lambda route: route.abort())
    page.reload()
    expect(page.locator("#status")).to_have_text("The server does not answer. Trying again.")
    page.unroute_all()
    expect(page.locator("#words")).to_be_focused()
    expect(page.locator("#status")).to_be_empty()


def test_a_key_that_a_restarted_server_refuses_is_asked_for_again(
    page: Page, server: RunningServer
) -> None:
    """One that no header can have is refused in the dialog."""
    refused = {"error": {"message": "The API key is missing or not valid."}}
    page.route("**/v1/events", lambda route: route.fulfill(status=401, json=refused))
    end_events(page, server)
    dialog = page.locator("dialog")
    expect(dialog).to_contain_text("API key required")
    expect(page.locator("#gone")).to_contain_text("refuses this page's API key")
    page.evaluate("document.dispatchEvent(new CustomEvent('streams'))")  # as of an answer's end
    expect(page.locator("#gone")).to_contain_text("refuses this page's API key")
    dialog.locator("input").fill("a\N{EN DASH}b")
    dialog.get_by_role("button", name="Continue").click()
    expect(dialog.locator("input:invalid")).to_have_count(1)
    dialog.locator("input").fill("a-b")
    page.unroute_all()
    dialog.get_by_role("button", name="Continue").press("Enter")
    expect(page.locator("#about")).to_contain_text("live")
    expect(dialog).to_have_count(0)
