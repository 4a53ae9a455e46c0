"""Web UI: answers that look like HTML or nest deeply, and folds of a chat that is drawn again."""

import json

import pytest
from page.chat_actions import box
from page.conftest import create
from page.test_drafts import hold_turns
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


def show_answer(page: Page, server: RunningServer, name: str, answer: str) -> None:
    """Open a conversation that another client fed, with one answer."""
    create(server, name, turns=0, max_kv_size=8192)
    text = f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    with server.client() as client:
        body = {"text": text, "special": True}
        client.post(f"/v1/sessions/{name}/feed", json=body).raise_for_status()
    page.goto(f"/#/chat/{name}")


def test_html_of_an_answer_is_shown_as_it_was_written(page: Page, server: RunningServer) -> None:
    answer = (
        "Use List<String> or vector<int>, and a <script> tag; <title>Home</title> is one.<br>"
        "H<sub>2</sub>O, ![a cat](https://example.org/cat.png)\n\n"
        "<div>\n**inside**\n</div>\n\n<!-- a note --> <select><option>end\n\n"
        '<a href="https://example.org/x">the page</a>, <!-- https://example.org/y --> *so*'
    )
    show_answer(page, server, "with-html", answer)
    shown = page.locator(".answer .markdown")
    expect(shown.locator("p").first).to_have_text(
        "Use List<String> or vector<int>, and a <script> tag; <title>Home</title> is one."
        "H2O, a cat (https://example.org/cat.png)"
    )
    expect(shown).to_contain_text("<!-- a note --> <select><option>end")
    expect(shown).to_contain_text("<div>")
    expect(shown.locator("strong")).to_have_text("inside")
    expect(shown.locator("sub")).to_have_text("2")
    expect(shown.locator("p").first.locator("br")).to_have_count(1)
    last = shown.locator("p").last
    expect(last).to_have_text(
        '<a href="https://example.org/x">the page</a>, <!-- https://example.org/y --> so'
    )
    expect(last.locator("a")).to_have_count(0)
    expect(last.locator("em")).to_have_text("so")


def test_an_answer_that_nests_too_deeply_is_shown_as_text(
    page: Page, server: RunningServer
) -> None:
    """Also while it is generated: the chat goes on."""
    quotes = ">" * 12_000
    show_answer(page, server, "nested", "It is.")
    expect(page.locator(".answer")).to_contain_text("It is.")
    held = hold_turns(page)
    box(page).fill("Quote it.")
    box(page).press("Enter")
    expect(page.locator(".turn.open")).to_contain_text("Quote it.")
    page.route("**/memory", lambda route: route.abort())  # the streamed text stays
    events = (("token", {"text": quotes}), ("error", {"error": {"message": "It stops."}}))
    body = "".join(f"event: {kind}\ndata: {json.dumps(data)}\n\n" for kind, data in events)
    held[0].fulfill(content_type="text/event-stream", body=body)
    expect(page.locator(".turn.unconfirmed .answer")).to_contain_text(quotes[:200])
    expect(page.locator(".chat.busy")).to_have_count(0)
    page.unroute_all()


@pytest.mark.parametrize("marks", ["> ", "- ", "> 1. "], ids=["quotes", "list", "both"])
def test_a_line_of_a_hundred_quotes_or_lists_is_shown_as_text(
    page: Page, server: RunningServer, marks: str
) -> None:
    """A few are what they stand for."""
    name = f"deep-{len(marks)}-{ord(marks[0])}"
    show_answer(page, server, name, f"> - > few\n\n{marks * 4}some")
    expect(page.locator(".answer blockquote ul blockquote").first).to_have_text("few")
    show_answer(page, server, f"{name}-text", f"Well.\n{marks * 100}many")
    expect(page.locator(".answer .plain")).to_contain_text(f"{marks * 100}many")
    expect(page.locator(".answer").locator("blockquote, li")).to_have_count(0)


def test_what_is_unfolded_stays_so_when_the_chat_is_drawn_again(
    page: Page, server: RunningServer
) -> None:
    show_answer(page, server, "unfolded", "<think>Because.</think>So.")
    page.locator(".answer summary").click()
    thought = page.locator(".answer details")
    expect(thought).to_contain_text("Because.")
    with server.client() as client:
        fed = {"text": "<|im_start|>user\nBye<|im_end|>\n", "special": True}
        client.post("/v1/sessions/unfolded/feed", json=fed).raise_for_status()
    expect(page.locator(".turn")).to_have_count(3)
    expect(thought).to_have_attribute("open", "")
