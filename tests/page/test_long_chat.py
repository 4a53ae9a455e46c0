"""A conversation of many turns in the web UI: its end, and a strip with more turns than room."""

from collections.abc import Iterator

import pytest
from page.conftest import open_page, wait_until
from playwright.sync_api import Browser, Page, expect
from server.conftest import RunningServer, running_server

from kvkeep.model import Model
from tests.scripted_model import model_with_text_of

EXCHANGES = 50

_IS_AT_THE_END = """(() => {
    const log = document.querySelector(".log");
    return log.scrollHeight > 2 * log.clientHeight
        && log.scrollHeight - log.scrollTop - log.clientHeight < 2;
})()"""
_IS_IN_VIEW = """(turn) => {
    const strip = document.querySelector(".turn-bars").getBoundingClientRect();
    const bar = document.querySelector(`.turn-bars [data-turn="${turn}"]`).getBoundingClientRect();
    return strip.left <= bar.left && bar.right <= strip.right;
}"""


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose small model prefills in no time."""
    model = model_with_text_of(tmp_path_factory.mktemp("model"), smollm2.text.folder)
    with running_server(model, tmp_path_factory.mktemp("server"), edits=True) as launched:
        yield launched


@pytest.fixture(scope="module")
def long_chat(server: RunningServer) -> str:
    """A session of short questions and answers of several heights; return its name."""
    with server.client() as client:
        session = {"name": "many-turns", "policy": "sliding", "max_kv_size": 1024}
        client.post("/v1/sessions", json=session).raise_for_status()
        text = "".join(
            f"<|im_start|>user\nNumber {number}?<|im_end|>\n<|im_start|>assistant\n"
            + "\n\n".join(["It is a number."] * (40 if number == EXCHANGES - 1 else 1 + number % 9))
            + "<|im_end|>\n"
            for number in range(EXCHANGES)
        )
        body = {"text": text, "special": True}
        client.post("/v1/sessions/many-turns/feed", json=body).raise_for_status()
    return "many-turns"


@pytest.fixture
def narrow_page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    yield from open_page(browser, server, {"width": 390, "height": 800})


def test_a_long_chat_opens_at_its_end(narrow_page: Page, long_chat: str) -> None:
    """Also if the heights of its turns are not those that were estimated before they were drawn."""
    narrow_page.goto(f"/#/chat/{long_chat}")
    expect(narrow_page.locator(".turn")).to_have_count(2 * EXCHANGES)
    narrow_page.wait_for_timeout(500)  # the last turn is drawn, which is longer than the view
    wait_until(narrow_page, _IS_AT_THE_END)


def test_a_chat_is_where_it_was_left_after_the_inspector(page: Page, long_chat: str) -> None:
    page.goto(f"/#/chat/{long_chat}")
    expect(page.locator(".turn")).to_have_count(2 * EXCHANGES)
    page.locator(".turn-bars button[data-turn='message 41']").click()
    selected = page.locator(".turn.selected")
    expect(selected).to_be_in_viewport()
    page.locator(".log").hover()
    page.mouse.wheel(0, 70)
    page.wait_for_timeout(500)  # heights of turns that come into view are measured
    before = selected.evaluate(_TOP)
    for back in ("Chat", None):
        page.get_by_role("link", name="Inspect", exact=True).click()
        expect(page.locator("main .strip")).to_be_visible()
        if back:
            page.get_by_role("link", name=back, exact=True).click()
        else:
            page.go_back()
        expect(selected).to_have_attribute("data-turn", "message 41")
        page.wait_for_timeout(500)
        assert selected.evaluate(_TOP) == pytest.approx(before, abs=2)
    expect(page.locator(".turn-card h3")).to_have_text("Message 41")


# Where an element begins in the view.
_TOP = "(element) => element.getBoundingClientRect().top"


def test_a_strip_of_many_turns_scrolls_in_proportion(narrow_page: Page, long_chat: str) -> None:
    page = narrow_page
    page.goto(f"/#/chat/{long_chat}")
    bars = page.locator(".turn-bars button")
    expect(bars).to_have_count(2 * EXCHANGES)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wait_until(page, _IS_IN_VIEW, f"message {2 * EXCHANGES}")
    sizes = bars.evaluate_all("(bars) => bars.map((bar) => bar.offsetWidth)")
    cells = [_cells(title) for title in bars.evaluate_all("(bars) => bars.map((bar) => bar.title)")]
    largest = cells.index(max(cells))
    short = next(number for number in range(largest, 0, -1) if 0 < cells[number] < 12)
    assert sizes[largest] > 1.5 * sizes[short]
    bars.first.focus()
    wait_until(page, _IS_IN_VIEW, "message 1")
    bars.first.press("End")
    wait_until(page, _IS_IN_VIEW, f"message {2 * EXCHANGES}")


def _cells(title: str) -> int:
    """Return the cells that the title of a part of the strip says."""
    return int(title.split(", ")[1].split()[0].replace(",", ""))
