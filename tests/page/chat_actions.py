"""Actions in the chat of the web UI, and readings of it and of the server, for tests."""

from typing import Any

import httpx
from playwright.sync_api import Locator, Page, expect


def box(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def turns(page: Page) -> Locator:
    """The turns, once no answer or change is in progress."""
    return page.locator(".chat:not(.busy) .turn:not(.open)")


def wait_until_idle(page: Page) -> None:
    """Wait for the answer or change that was begun before: it marks the page at once."""
    expect(page.locator(".chat.busy")).to_have_count(0)


def settings(page: Page, **fields: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for name, value in fields.items():
        page.locator(f"dialog [name={name}]").fill(value)
    page.locator("dialog button.main").click()
    expect(page.locator("dialog")).to_have_count(0)
    wait_until_idle(page)


def start(page: Page, message: str = "What is the capital of France?", tokens: int = 12) -> str:
    """Begin a conversation in the page; return its session's name."""
    page.goto("/#/")
    page.reload()
    settings(page, temperature="0", max_tokens=str(tokens))
    box(page).fill(message)
    box(page).press("Enter")
    expect(turns(page)).to_have_count(1)
    return page.url.rpartition("/")[2]


def spans(client: httpx.Client, name: str) -> dict[str, Any]:
    result: dict[str, Any] = client.get(f"/v1/sessions/{name}/memory").json()["spans"]
    return result


def texts(client: httpx.Client, name: str) -> list[str]:
    pieces = client.get(f"/v1/sessions/{name}/text").json()["pieces"]
    return [piece["text"] for piece in pieces]


def session_names(client: httpx.Client) -> list[str]:
    return [entry["name"] for entry in client.get("/v1/sessions").json()["data"]]


def strip(page: Page) -> Locator:
    return page.locator(".turn-bars button")


def standings(client: httpx.Client, name: str) -> set[str]:
    runs = client.get(f"/v1/sessions/{name}/memory").json()["runs"]
    return {run["standing"] for run in runs}


def focus_by_tab(page: Page, selector: str) -> None:
    """Press Tab until an element has the focus."""
    expected = page.locator(selector).first
    for _ in range(400):
        if expected.evaluate("(element) => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the Tab key does not reach {selector}")
