"""A browser, and a server whose web UI it opens."""

import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server.conftest import RunningServer, running_server

from kvkeep.model import Model

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 60_000  # milliseconds, on a machine that is busy
expect.set_options(timeout=_PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The installed Chromium; Debian has it as `chromium`.

    Module scope: its event loop runs in this thread and would disturb other tests.
    """
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None and not os.environ.get("CI"):
        pytest.skip("there is no Chromium: install chromium")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with playwright.chromium.launch(executable_path=path, args=arguments) as launched:
            yield launched


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(smollm2, tmp_path_factory.mktemp("server"), edits=True) as launched:
        yield launched


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """The web UI, open; an uncaught error of the page fails the test."""
    yield from open_page(browser, server, {"width": 1280, "height": 900})


def create(server: RunningServer, name: str, turns: int = 1, **settings: object) -> None:
    """Create a conversation with answers of one token."""
    with server.client() as client:
        client.post("/v1/sessions", json={"name": name, **settings}).raise_for_status()
        for number in range(turns):
            turn = {"content": f"Name city {number}.", "max_tokens": 1, "temperature": 0}
            client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()


def open_page(browser: Browser, server: RunningServer, size: dict[str, int]) -> Iterator[Page]:
    problems: list[str] = []
    context = browser.new_context(base_url=server.url, viewport=size)  # type: ignore[arg-type]
    context.set_default_timeout(_PATIENCE)
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: _require_own(request.url, server.url, problems))
    page.goto("/")
    yield page
    context.close()
    assert not problems


def wait_until(page: Page, expression: str, arg: Any = None) -> None:
    """Wait until a JavaScript expression is true. The page forbids Playwright's own way, `eval`."""
    end = time.monotonic() + _PATIENCE / 1000
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"never true: {expression} of {arg}"
        page.wait_for_timeout(100)


def _require_own(url: str, own: str, problems: list[str]) -> None:
    if not url.startswith(own):
        problems.append(f"requests another host: {url}")
