"""Web UI: the way back from branches, a panel that covers nothing, and other first steps."""

import re

import pytest
from page.conftest import create, open_page
from playwright.sync_api import Browser, Page, expect
from server.conftest import RunningServer

# Whether an element is not under another one.
_IS_ON_TOP = """(element) => {
    const { left, top, width, height } = element.getBoundingClientRect();
    const shown = document.elementFromPoint(left + width / 2, top + height / 2);
    return element.contains(shown);
}"""


def test_a_branch_says_so_and_leads_back(page: Page, server: RunningServer) -> None:
    create(server, "left")
    page.goto("/#/chat/left")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.get_by_role("link", name="Back to")).to_have_count(0)
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(page.locator("#status")).to_contain_text("You are in a branch now.")
    page.get_by_role("link", name="Back to").click()
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
    expect(page.locator("#status")).to_contain_text("“Back to” beside the title")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("link", name="Back to").click()
    expect(page).to_have_url(f"{server.url}/#/chat/{name}")
    expect(page.locator(".question").last).to_contain_text("Name city 3.")


def test_the_memory_panel_covers_no_message_on_a_narrow_screen(
    browser: Browser, server: RunningServer
) -> None:
    create(server, "narrow")
    for page in open_page(browser, server, {"width": 390, "height": 700}):
        page.goto("/#/chat/narrow")
        page.locator(".turn-bars button").last.click()
        page.locator(".turn-card").get_by_role("button", name="Pin message").click()
        status = page.locator("#status")
        expect(status).to_have_text(
            "The message of turn 1 is pinned. Unpin takes it back at any time."
        )
        assert status.evaluate(_IS_ON_TOP)
        assert page.locator(".composer textarea").evaluate(_IS_ON_TOP)
        button = page.locator(".turn-card button").first
        button.scroll_into_view_if_needed()  # the panel has grown by a line
        assert button.evaluate(_IS_ON_TOP)
        page.get_by_role("button", name="Close the memory panel").click()
        expect(page.locator(".memory-panel")).to_be_hidden()
        expect(page.locator(".turn-bars button").last).to_be_focused()


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


def test_a_branch_names_the_conversation_it_left_beside_its_title(
    page: Page, server: RunningServer
) -> None:
    create(server, "first-of-two")
    page.goto("/#/chat/first-of-two")
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(page.locator(".chat-title .origin")).to_have_text("Branch. Back to “first-of-two”")
    page.get_by_role("link", name="Back to “first-of-two”").click()
    expect(page.locator("h1")).to_have_text("first-of-two")
    expect(page.locator(".origin")).to_be_hidden()


@pytest.mark.parametrize("width", [1440, 1024, 390, 360])
def test_the_heading_takes_at_most_two_rows_with_undo(
    browser: Browser, server: RunningServer, width: int
) -> None:
    """In a branch too, whose heading leads back as well: on a narrow screen in a row of its own."""
    create(server, f"rows-{width}")
    for page in open_page(browser, server, {"width": width, "height": 700}):
        page.goto(f"/#/chat/rows-{width}")
        page.get_by_role("button", name="Branch", exact=True).click()
        expect(page.get_by_role("link", name="Back to")).to_be_visible()
        page.locator(".turn-bars button").last.click()
        page.locator(".turn-card").get_by_role("button", name="Remove", exact=True).click()
        undo = page.get_by_role("button", name="Undo remove")
        expect(undo).to_be_visible()
        assert (undo.inner_text() == "Undo") is (width <= 480)  # that of an answer is longer
        height = page.locator(".chat-header").evaluate("(e) => e.offsetHeight")
        assert height < (80 if width > 860 else 105)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_strip_shows_how_much_of_a_turn_is_forgotten(page: Page, server: RunningServer) -> None:
    """By its tokens: a turn that is half forgotten is half hatched."""
    with server.client() as client:
        body = {"text": "The river is long and wide. " * 8}
        client.post("/v1/sessions", json={"name": "halved", "max_kv_size": 48}).raise_for_status()
        client.post("/v1/sessions/halved/feed", json=body).raise_for_status()
        runs = client.get("/v1/sessions/halved/memory").json()["runs"]
    forgotten = sum(run["count"] for run in runs if run["standing"] == "forgotten")
    total = sum(run["count"] for run in runs)
    assert 0 < forgotten < total
    page.goto("/#/chat/halved")
    bar = page.locator(".turn-bars button")
    expect(bar).to_have_attribute("title", re.compile(f"{forgotten} of {total} tokens forgotten"))
    widths = bar.evaluate("""(bar) => [
        bar.querySelector(".forgotten").offsetWidth, bar.offsetWidth
    ]""")
    assert widths[0] / widths[1] == pytest.approx(forgotten / total, abs=0.1)


def test_the_list_of_sessions_is_fetched_once_for_a_view(page: Page, server: RunningServer) -> None:
    create(server, "fetched-once", turns=2)
    page.clock.install()  # the list is fetched every three seconds, too
    page.goto("/#/chat/fetched-once")
    expect(page.locator(".turn")).to_have_count(2)
    page.wait_for_timeout(500)  # operations of before are shown
    fetched = list[str]()
    page.on("request", lambda request: fetched.append(request.url))
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator("#conversations li").first).to_be_visible()
    expect(page.get_by_role("button", name="Branch", exact=True)).to_be_visible()
    assert len([url for url in fetched if "/v1/sessions?" in url or url.endswith("sessions")]) == 1


def test_sizes_are_said_in_the_same_words(page: Page, server: RunningServer) -> None:
    """Beside the chat and in the inspector."""
    create(server, "same-words", turns=4, policy="sliding", max_kv_size=64)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/same-words")
    words = re.compile(
        r"64 of 64 cells in use\. \d+ tokens, of which \d+ are forgotten\. .* reserved"
    )
    expect(page.locator(".memory-panel")).to_contain_text(words)
    page.get_by_role("link", name="Inspect", exact=True).click()
    expect(page.locator("main .strip")).to_be_visible()
    expect(page.locator("main")).to_contain_text(words)
    page.goto("/#/sessions")
    expect(page.locator("main")).to_contain_text("Reserved is what cells take")


def test_a_policy_that_evicts_says_what_it_has_instead_of_compression(
    page: Page, server: RunningServer
) -> None:
    create(server, "no-compression", policy="sliding", max_kv_size=64)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/no-compression")
    panel = page.locator(".memory-panel")
    expect(panel).to_contain_text("Old text is evicted by itself")
    expect(panel).to_contain_text("Compress needs a chat with policy full")
    expect(panel.get_by_role("button", name="Compress")).to_have_count(0)


def test_a_message_larger_than_the_memory_is_warned_of_before_it_is_sent(
    page: Page, server: RunningServer
) -> None:
    create(server, "small-memory", policy="sliding", max_kv_size=64)
    create(server, "full-memory", policy="full", max_kv_size=64)
    warning = page.locator(".size-warning")
    for name, words in (("small-memory", "will have forgotten"), ("full-memory", "does not fit")):
        page.goto(f"/#/chat/{name}")
        expect(page.locator("h1")).to_have_text(name)
        expect(page.locator(".turn")).to_have_count(1)
        page.locator("#words").fill("Ships sail on every sea. " * 40)
        expect(warning).to_have_text(re.compile(rf"^About 2[0-9]{{2}} tokens.*{words}"))
        page.locator("#words").fill("Short.")
        expect(warning).to_be_empty()


def test_a_stopped_answer_is_marked(page: Page, server: RunningServer) -> None:
    """After a reload, a refused message, and in a branch, until it is continued to its end."""
    page.goto("/#/")
    page.locator("#words").fill("Write a long story about a ship.")
    page.locator("#words").press("Enter")
    expect(page.locator(".open .markdown").first).to_be_visible()
    page.keyboard.press("Escape")
    mark = page.locator(".answer .standing")
    expect(mark).to_have_text("Stopped before its end")
    page.reload()
    expect(mark).to_have_text("Stopped before its end")
    refusal = {"error": {"message": "Refused."}}
    page.route("**/turns", lambda route: route.fulfill(status=400, json=refusal))
    page.locator("#words").fill("Go on.")
    page.locator("#words").press("Enter")
    expect(page.locator("#status")).to_have_text("Refused.")
    expect(mark).to_have_text("Stopped before its end")
    page.unroute_all()
    page.locator("#words").fill("")
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(page.locator("h1")).to_contain_text("(branch)")
    expect(mark).to_have_text("Stopped before its end")


def test_an_answer_of_another_client_without_an_end_is_marked(
    page: Page, server: RunningServer
) -> None:
    """By why it ended, as the server says, and also once another turn follows."""
    create(server, "not-ended", turns=2)
    page.goto("/#/chat/not-ended")
    notes, text = page.locator(".answer .standing"), "Cut off at the longest answer"
    expect(notes).to_have_text([f"{text}: Continue, or allow more in Settings"])
    with server.client() as client:
        turn = {"content": "Name a river.", "max_tokens": 1, "temperature": 0}
        client.post("/v1/sessions/not-ended/turns", json=turn).raise_for_status()
    ends = [text, f"{text}: Continue, or allow more in Settings"]
    expect(notes).to_have_text(ends)
    page.reload()
    expect(notes).to_have_text(ends)


@pytest.mark.parametrize("width", [1440, 390])
def test_nothing_moves_when_an_answer_begins(
    browser: Browser, server: RunningServer, width: int
) -> None:
    """Nor when a new conversation gets its memory."""
    for page in open_page(browser, server, {"width": width, "height": 700}):
        page.goto("/#/")
        expect(page.locator("h1")).to_have_text("New chat")
        before = page.evaluate(_PLACES)
        page.locator("#words").fill("Write a story.")
        page.locator("#words").press("Enter")
        expect(page.locator(".open .markdown").first).to_be_visible()
        assert page.evaluate(_PLACES) == before
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".chat:not(.busy) .turn:not(.open)")).to_have_count(1)
        assert page.evaluate(_PLACES) == before


# Where the strip begins, and the first and the last button below the message box: Send, or Stop.
_PLACES = """(() => {
    const strip = document.querySelector(".turn-strip").getBoundingClientRect();
    const shown = document.querySelectorAll(".composer .actions button:not([hidden])");
    const [first, last] = [shown[0], [...shown].at(-1)].map((each) => each.getBoundingClientRect());
    return [strip.left, strip.top, first.left, first.top, last.right, last.top];
})()"""
