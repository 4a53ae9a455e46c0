"""Web UI: words that are the same everywhere."""

import re

import httpx
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


def create(server: RunningServer, name: str, turns: int = 1, **settings: object) -> None:
    """Create a conversation with answers of one token."""
    with server.client() as client:
        client.post("/v1/sessions", json={"name": name, **settings}).raise_for_status()
        for number in range(turns):
            turn = {"content": f"Name city {number}.", "max_tokens": 1, "temperature": 0}
            client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()


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
