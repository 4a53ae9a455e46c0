"""Web UI: rows and buttons that stay in place, titles, turn numbers, and ways by keyboard."""

import re

import httpx
import pytest
from page.conftest import create, open_page
from playwright.sync_api import Browser, Page, expect
from server.conftest import RunningServer

# Titles of 60 characters, the longest that are given to a conversation by its first message.
TITLES = [
    f"Compare the rivers of Peru with those of Chile, as {end}" for end in ("a table.", "one poem.")
]


def test_buttons_of_messages_are_disabled_in_place_during_an_answer(
    page: Page, server: RunningServer
) -> None:
    create(server, "busy", turns=2)
    page.goto("/#/chat/busy")
    edits = page.get_by_role("button", name="Edit")
    expect(edits).to_have_count(2)
    regenerate = page.get_by_role("button", name="Regenerate")
    expect(regenerate).to_be_enabled()
    page.locator("#words").fill("Write a long story about a ship.")
    page.locator("#words").press("Enter")
    expect(page.locator(".open .markdown").first).to_be_visible()
    for button in (*edits.all(), regenerate, page.get_by_role("button", name="Branch here").first):
        expect(button).to_be_visible()
        expect(button).to_be_disabled()
    expect(page.locator(".chat-header .actions")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(edits).to_have_count(3)
    for button in (*edits.all(), regenerate):
        expect(button).to_be_enabled()


@pytest.mark.parametrize("width", [390, 360])
def test_the_buttons_of_an_answer_are_one_row(
    browser: Browser, server: RunningServer, width: int
) -> None:
    create(server, f"row-{width}")
    for page in open_page(browser, server, {"width": width, "height": 700}):
        page.goto(f"/#/chat/row-{width}")
        buttons = page.locator(".answer .message-bar button")
        expect(buttons).to_have_count(5)
        tops = buttons.evaluate_all("(all) => all.map((e) => e.getBoundingClientRect().top)")
        assert len(set(tops)) == 1, buttons.all_inner_texts()
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1280, 390])
def test_the_ends_of_long_titles_are_shown(
    browser: Browser, server: RunningServer, width: int
) -> None:
    for number, title in enumerate(TITLES):
        create(server, f"long-title-{width}-{number}", turns=0, title=title)
    for page in open_page(browser, server, {"width": width, "height": 700}):
        if width < 860:
            page.get_by_role("button", name="Menu").click()
        for number, title in enumerate(TITLES):
            link = page.locator(f'[data-name="long-title-{width}-{number}"]')
            expect(link).to_have_attribute("title", re.compile(re.escape(title)))
            assert link.locator(".cut").evaluate("(e) => e.scrollHeight <= e.clientHeight")


def test_hidden_buttons_of_the_list_leave_their_place_to_the_title(
    page: Page, server: RunningServer
) -> None:
    """Nothing moves when they appear."""
    create(server, "beside", turns=0, title=f"{TITLES[0]} (branch 2)")
    item = page.locator("#conversations li", has=page.locator('[data-name="beside"]'))
    link = item.get_by_role("link")
    expect(link).to_be_visible()
    left_of_mark = """(e) => {
        const range = document.createRange();
        range.setStart(e.firstChild, 1); // behind the space
        range.setEnd(e.firstChild, 2);
        return range.getBoundingClientRect().left - e.previousSibling.getBoundingClientRect().left;
    }"""
    assert link.locator(".mark").evaluate(left_of_mark) == 0  # in a line of its own
    assert link.evaluate("(e) => e.offsetWidth === e.parentElement.clientWidth")
    before = link.bounding_box()
    item.hover()
    expect(item.get_by_role("button", name="Rename")).to_be_visible()
    assert link.bounding_box() == before


@pytest.mark.parametrize("width", [900, 390])
def test_a_long_title_does_not_hide_that_it_is_a_branch(
    browser: Browser, server: RunningServer, width: int
) -> None:
    create(server, f"marked-{width}", title=f"{TITLES[0]} (branch 2)")
    for page in open_page(browser, server, {"width": width, "height": 700}):
        page.goto(f"/#/chat/marked-{width}")
        heading = page.locator("h1", has_text="(branch 2)")
        expect(heading).to_have_attribute("title", f"{TITLES[0]} (branch 2)")
        ends = "(e) => [e, e.lastChild].map((each) => each.getBoundingClientRect().right)"
        end, mark_end = heading.evaluate(ends)
        assert mark_end <= end + 0.5
        assert heading.locator(".cut").evaluate("(e) => e.scrollWidth > e.clientWidth")


def test_the_way_back_from_a_branch_has_a_row_on_a_narrow_screen(
    browser: Browser, server: RunningServer
) -> None:
    create(server, "long-origin", title=TITLES[0])
    with server.client() as client:
        fork = {"name": "of-long-origin", "title": TITLES[1]}
        client.post("/v1/sessions/long-origin/fork", json=fork).raise_for_status()
    for page in open_page(browser, server, {"width": 390, "height": 700}):
        page.goto("/#/chat/of-long-origin")
        origin = page.locator(".origin")
        expect(origin).to_be_visible()
        assert origin.evaluate("(e) => e.offsetWidth") > 300
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_buttons_are_large_enough_for_fingers(browser: Browser, server: RunningServer) -> None:
    create(server, "touched", turns=2)
    context = browser.new_context(
        base_url=server.url,
        viewport={"width": 360, "height": 700},
        has_touch=True,
        is_mobile=True,
    )
    page = context.new_page()
    page.goto("/#/chat/touched")
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Menu").click()
    low = page.locator("button:visible, .button:visible, nav a:visible").evaluate_all(
        "(all) => all.filter((e) => e.offsetHeight < 40).map((e) => e.textContent)"
    )
    tops = page.locator(".answer").last.locator("button")
    rows = tops.evaluate_all("(all) => new Set(all.map((e) => e.offsetTop)).size")
    context.close()
    assert (low, rows) == ([], 1)


@pytest.mark.parametrize("view", ["sessions", "operations"])
def test_tables_show_that_they_scroll_on_a_narrow_screen(
    browser: Browser, server: RunningServer, view: str
) -> None:
    """The column after the title is in view; the others are scrolled to."""
    create(server, f"wide-{view}", title=TITLES[0])
    for page in open_page(browser, server, {"width": 360, "height": 700}):
        page.goto(f"/#/{view}")
        expect(page.locator("td").first).to_be_visible()
        expect(page.get_by_role("columnheader", name="Conversation")).to_be_in_viewport()
        if view == "sessions":
            expect(page.get_by_role("columnheader", name="Tokens", exact=True)).to_be_in_viewport()
        page.locator(".scroll").evaluate("(e) => e.scrollTo(e.scrollWidth, 0)")
        expect(page.get_by_role("columnheader").last).to_be_in_viewport()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_turns_have_the_numbers_of_the_memory_panel(page: Page, server: RunningServer) -> None:
    create(server, "numbered", turns=2)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/numbered")
    expect(page.locator(".turn-number")).to_have_text(["Turn 1", "Turn 2"])
    for number in (1, 2):
        turn = page.get_by_role("region", name=f"turn {number}", exact=True)
        expect(turn.locator(".turn-number")).to_have_text(f"Turn {number}")
        turn.get_by_role("button", name="Memory").first.click()
        expect(page.locator(".turn-card h3")).to_have_text(f"Turn {number}")


def test_the_first_link_of_the_page_leads_to_the_message_box(
    page: Page, server: RunningServer
) -> None:
    """It is the first thing that Tab reaches, and leaves the URL as it is."""
    create(server, "skipped-to")
    page.goto("/#/chat/skipped-to")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("#words")).to_be_focused()
    page.get_by_role("link", name="Skip to the message box").press("Enter")
    expect(page.locator("#words")).to_be_focused()
    expect(page).to_have_url(f"{server.url}/#/chat/skipped-to")
    page.goto("/#/operations")
    page.reload()
    expect(page.get_by_role("heading", name="Operations")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page).to_have_url(f"{server.url}/#/operations")


def test_tab_reaches_first_what_closes_the_panel(browser: Browser, server: RunningServer) -> None:
    create(server, "panel-order")
    for page in open_page(browser, server, {"width": 390, "height": 700}):
        page.goto("/#/chat/panel-order")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()  # the chat is loaded
        page.get_by_role("button", name="Memory", exact=True).first.press("Enter")
        expect(page.locator(".memory-panel")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Close the memory panel")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="JSON")).to_be_focused()


def test_the_inspector_calls_things_as_the_chat_does(page: Page, server: RunningServer) -> None:
    """Conversations and branches, not sessions and forks."""
    create(server, "rivers")
    with server.client() as client:
        forked: httpx.Response = client.post("/v1/sessions/rivers/fork", json={"name": "lakes"})
        forked.raise_for_status()
    page.goto("/#/sessions/lakes")
    expect(page.locator("main")).to_contain_text("Branch of rivers.")
    expect(page.get_by_role("button", name="Branch", exact=True)).to_be_visible()
    page.reload()
    for view, heading in (
        ("#/sessions/lakes", "lakes"),
        ("#/sessions", "Overview"),
        ("#/tree", "Tree of branches and snapshots"),
        ("#/operations", "Operations"),
    ):
        page.goto(f"/{view}")
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        shown = page.locator("main").inner_text() + page.locator("nav").inner_text()
        assert not re.findall(r"\b(?:fork|session)\w*", shown, re.IGNORECASE), view


def test_chat_and_panel_have_room_on_a_low_screen(browser: Browser, server: RunningServer) -> None:
    """Such as a page of 1280 x 800 pixels at 200 %: a branch, with the button that undoes."""
    create(server, "low", turns=3)
    for page in open_page(browser, server, {"width": 640, "height": 400}):
        page.goto("/#/chat/low")
        page.get_by_role("button", name="Branch", exact=True).click()
        expect(page.get_by_role("link", name="Back to")).to_be_visible()
        page.locator(".turn-bars button").last.click()
        page.locator(".turn-card").get_by_role("button", name="Remove", exact=True).click()
        expect(page.get_by_role("button", name="Undo remove")).to_be_visible()
        heights = "(all) => all.map((e) => e.offsetHeight)"
        (panel,) = page.locator(".memory-panel").evaluate_all(heights)
        page.get_by_role("button", name="Close the memory panel").click()
        page.locator("#words").focus()
        expect(page.locator("#status")).to_be_empty()
        (log,) = page.locator(".log").evaluate_all(heights)
        assert min(panel, log) >= 200
        assert page.evaluate("document.documentElement.scrollWidth") <= 640


def test_the_search_stays_above_a_list_that_scrolls(
    browser: Browser, server: RunningServer
) -> None:
    """And the conversation that is open is in view."""
    for number in range(12):
        create(server, f"listed-{number}", turns=0)
    for page in open_page(browser, server, {"width": 1280, "height": 420}):
        search, links = page.get_by_label("Search titles"), page.locator("#conversations a")
        expect(page.locator("[data-name=listed-11]")).to_be_attached()
        page.goto(f"/#/chat/{links.last.get_attribute('data-name')}")
        expect(links.last).to_be_in_viewport(ratio=0.9)
        expect(search).to_be_in_viewport(ratio=1)
        assert links.last.evaluate("(e) => e.closest('.conversation-lists').scrollTop") > 0
        page.goto(f"/#/chat/{links.first.get_attribute('data-name')}")
        expect(links.first).to_be_in_viewport(ratio=0.9)


def test_what_is_kept_of_a_forgotten_opening_stays_in_the_strip(
    page: Page, server: RunningServer
) -> None:
    create(server, "sunk", policy="sliding", max_kv_size=512)
    with server.client() as client:
        body = {"text": "The river is long and wide. " * 90}
        client.post("/v1/sessions/sunk/feed", json=body).raise_for_status()
    page.goto("/#/chat/sunk")
    opening = page.locator(".turn-bars button").first
    expect(opening).to_have_attribute("title", re.compile("forgotten"))
    assert opening.locator(".kept").evaluate("(e) => e.getBoundingClientRect().width") >= 3
