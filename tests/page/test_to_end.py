"""Web UI: the way to new text from further up in a conversation."""

from page.chat_actions import box
from page.conftest import create, wait_until
from playwright.sync_api import Page, expect
from server.conftest import RunningServer

# Scrolls to the beginning; whether the button then says a text. A view that was drawn goes to its
# end for some frames more.
_SAYS = """(text) => {
    document.querySelector(".log").scrollTop = 0;
    const button = document.querySelector(".to-end");
    return !button.hidden && button.textContent === text;
}"""


def test_a_reader_further_up_is_told_of_new_text(page: Page, server: RunningServer) -> None:
    create(server, "long", turns=6, max_kv_size=8192)
    page.set_viewport_size({"width": 1280, "height": 500})
    page.goto("/#/chat/long")
    expect(page.locator(".turn")).to_have_count(6)
    button, log = page.locator(".to-end"), page.locator(".log")
    expect(button).to_be_hidden()
    wait_until(page, _SAYS, "To the newest")
    button.click()
    expect(button).to_be_hidden()
    expect(page.locator(".turn").last).to_be_in_viewport()
    expect(log).to_be_focused()
    bias = {str(server.service.model.end_token_ids[0]): -100}
    body = {"content": "Count.", "stream": True, "max_tokens": 4096, "logit_bias": bias}
    page.route("**/turns", lambda route: route.continue_(post_data=body))
    box(page).fill("Count.")
    box(page).press("Enter")
    expect(page.locator(".open .markdown").first).to_be_visible()
    wait_until(page, _SAYS, "New text below")
    button.click()
    expect(button).to_be_hidden()
    expect(page.locator(".open .answer .message-bar")).to_be_in_viewport()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator(".chat.busy")).to_have_count(0)
    page.unroute_all()
