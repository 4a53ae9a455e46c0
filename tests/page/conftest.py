"""A browser, and a server whose page it opens."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from server.conftest import Running, running

from kvkeep.model import Model

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 60_000  # milliseconds, on a machine that is busy
expect.set_options(timeout=_PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The Chromium that is installed; Debian has it as `chromium`.

    Of a module: while it is there an event loop runs in this thread, which others would trip over.
    """
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None and not os.environ.get("CI"):
        pytest.skip("there is no Chromium: install chromium")
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        with playwright.chromium.launch(executable_path=path, args=arguments) as found:
            yield found


@pytest.fixture(scope="module")
def server(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(smollm2, tmp_path_factory.mktemp("server"), edits=True) as found:
        yield found


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Page]:
    """At the server's page; nothing that it does may end in an error that nobody catches."""
    yield from opened(browser, server, {"width": 1280, "height": 900})


def opened(browser: Browser, server: Running, size: dict[str, int]) -> Iterator[Page]:
    wrong: list[str] = []
    context = browser.new_context(base_url=server.url, viewport=size)  # type: ignore[arg-type]
    context.set_default_timeout(_PATIENCE)
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: _require_own(asked.url, server.url, wrong))
    page.goto("/")
    yield page
    context.close()
    assert not wrong


def _require_own(url: str, own: str, wrong: list[str]) -> None:
    if not url.startswith(own):
        wrong.append(f"asks another host: {url}")
