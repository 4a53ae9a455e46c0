"""The web UI in a real browser, used by pointer and by keyboard."""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from page.chat_actions import focus_by_tab
from page.conftest import open_page, wait_until
from playwright.sync_api import Browser, Page, expect
from server.conftest import RunningServer, running_server
from topics import topic_text

from kvkeep import load_model
from kvkeep.model import Model

TEXT = topic_text()
names = (f"page-{number}" for number in count())


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


SMALL = {"policy": "sliding", "max_kv_size": 300, "keep": 4}
WHOLE = {"policy": "full", "max_kv_size": 2048}


def create_fed_session(
    client: httpx.Client, settings: dict[str, Any] = SMALL, text: str = TEXT[:3000]
) -> str:
    """Create a session and feed it a text longer than its budget."""
    name = next(names)
    assert client.post("/v1/sessions", json={"name": name, **settings}).status_code == 201
    assert client.post(f"/v1/sessions/{name}/feed", json={"text": text}).status_code == 200
    return name


def memory(client: httpx.Client, name: str) -> dict[str, Any]:
    result: dict[str, Any] = client.get(f"/v1/sessions/{name}/memory").json()
    return result


def show(page: Page, name: str) -> None:
    page.goto(f"/#/sessions/{name}")
    expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
    expect(page.locator(".text .token").first).to_be_visible()


def select(page: Page, start: int, end: int) -> None:
    """Select tokens in the text as the pointer does, once the text is that of the revision."""
    page.locator(f'.text [data-at="{start}"]').scroll_into_view_if_needed()
    wait_until(
        page,
        """([start, end]) => {
            const text = document.querySelector(".text");
            const of = (at) => text.querySelector(`[data-at="${at}"]`)?.firstChild;
            if (!of(start) || !of(end - 1)) return false;
            getSelection().removeAllRanges();
            getSelection().setBaseAndExtent(of(start), 0, of(end - 1), of(end - 1).length);
            return new Promise((resolve) => setTimeout(() => {
                const typed = ["from", "to"].map((id) => Number(document.getElementById(id).value));
                resolve(typed[0] === start && typed[1] === end);
            }, 50));
        }""",
        [start, end],
    )


def press(page: Page, button: str, **fields: str) -> None:
    """Press a button and fill in its dialog."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.locator("dialog")
    for name, value in fields.items():
        dialog.locator(f"[name={name}]").fill(value)
    if fields:
        dialog.locator("button.main").click()


def expect_status(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.locator("#status")).to_contain_text(text)


def test_the_preview_follows_the_selection_and_unpin_what_is_pinned(
    page: Page, client: httpx.Client
) -> None:
    name = create_fed_session(client, WHOLE, TEXT[:600])
    show(page, name)
    unpin = page.get_by_role("button", name="Unpin", exact=True)
    select(page, 30, 34)
    expect(page.locator(".preview")).to_contain_text("Token 30, ")
    expect(page.locator(".preview mark")).to_have_count(1)
    expect(unpin).to_be_disabled()
    press(page, "Pin")
    expect_status(page, "Pinned 4 tokens from token 30 on.")
    expect(unpin).to_be_enabled()


def test_selected_text_is_pinned_named_and_edited(page: Page, client: httpx.Client) -> None:
    name = create_fed_session(client)
    show(page, name)
    last = memory(client, name)["tokens"]
    select(page, last - 60, last - 50)
    press(page, "Pin")
    expect_status(page, "Pinned")
    runs = memory(client, name)["runs"]
    assert {"standing": "pinned", "start": last - 60, "count": 10} in runs
    expect(page.locator(".legend")).to_contain_text("pinned 10")
    press(page, "Name", name="a part")
    expect_status(page, "a part")
    assert memory(client, name)["spans"]["a part"]["end"] == last - 50
    select(page, last - 20, last - 10)
    press(page, "Replace", text=" something else")
    expect_status(page, "tokens evaluated")
    pieces = client.get(f"/v1/sessions/{name}/text", params={"start": last - 20}).json()["pieces"]
    assert "".join(item["text"] for item in pieces).startswith(" something else")
    total = memory(client, name)["tokens"]
    select(page, total - 8, total - 4)
    press(page, "Remove text")
    expect_status(page, "Removed")
    assert memory(client, name)["tokens"] == total - 4
    page.get_by_label("or span").select_option("a part")
    expect(page.get_by_label("From token")).to_have_value(str(last - 60))
    press(page, "Unpin")
    expect_status(page, "Unpinned")
    assert all(run["standing"] != "pinned" for run in memory(client, name)["runs"])


def test_a_session_is_forked_at_a_token_and_rewound(page: Page, client: httpx.Client) -> None:
    name, new = create_fed_session(client), next(names)
    show(page, name)
    last = memory(client, name)["tokens"]
    select(page, last - 30, last - 25)
    press(page, "Branch here", name=new)
    expect(page.get_by_role("heading", name=new, exact=True)).to_be_visible()
    assert memory(client, new)["tokens"] == last - 25
    show(page, name)
    select(page, last - 30, last - 20)
    press(page, f"Rewind to token {last - 20} (removes 20 tokens)")
    expect_status(page, f"Rewound to token {last - 20}: 20 tokens removed.")
    assert memory(client, name)["tokens"] == last - 20
    page.get_by_role("link", name="Tree").click()
    branch = page.locator(".tree li", has=page.get_by_role("link", name=name, exact=True)).first
    expect(branch.locator("li")).to_contain_text(new)


def test_compression_shows_the_cells_of_each_head(page: Page, client: httpx.Client) -> None:
    name = create_fed_session(client, WHOLE)
    show(page, name)
    before = memory(client, name)["cells"]
    page.get_by_role("button", name="Compress", exact=True).click()
    page.locator("dialog [name=ratio]").fill("3")
    page.locator("dialog [name=method]").select_option("kvzip")
    page.locator("dialog button.main").click()
    expect_status(page, re.compile(rf"Compressed {before} cells to \d+"))
    expect(page.locator(".legend")).to_contain_text("compressed")
    page.get_by_role("link", name="Cells by head").click()
    cells = client.get(f"/v1/sessions/{name}/heads").json()["cells"]
    buttons = page.locator(".heads td button")
    expect(buttons).to_have_count(sum(map(len, cells)))
    shown = buttons.all_text_contents()
    assert [int(item) for item in shown] == [count for layer in cells for count in layer]
    page.get_by_role("button", name="layer 3, head 1").click()
    expect(page.locator(".positions span")).to_have_count(cells[3][1])
    held = memory(client, name)
    page.goto(f"/#/chat/{name}")
    per_head = round(held["residual_cells"] / held["heads"])
    expect(page.locator(".legend")).to_contain_text(f"{per_head} cells per head stand")
    expect(page.locator(".turn-bars .residual")).to_be_visible()


def test_a_snapshot_is_taken_and_restored(page: Page, client: httpx.Client) -> None:
    name, label, new = create_fed_session(client), next(names), next(names)
    show(page, name)
    press(page, "Snapshot", name=label)
    expect_status(page, "saved")
    page.get_by_role("link", name="Tree").click()
    page.locator(".snapshot", has_text=label).get_by_role("button", name="Restore").click()
    page.locator("dialog [name=name]").fill(new)
    page.locator("dialog button.main").click()
    expect(page.get_by_role("heading", name=new, exact=True)).to_be_visible()
    assert memory(client, new)["runs"] == memory(client, name)["runs"]


def test_a_missed_prompt_has_a_card(page: Page, client: httpx.Client) -> None:
    prompt = "You answer in one word. " * 20
    for question in ("What is the capital of France?", "What is two and two?"):
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": question}]
        options = {"model": "smollm2", "messages": messages, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=options).status_code == 200
    page.get_by_role("link", name="Missed prompts").click()
    card = page.locator(".card").first
    expect(card).to_contain_text("First difference")
    expect(card.locator(".common")).to_contain_text("What is")
    expect(card.locator(".own mark")).to_contain_text("two and two")
    expect(card.locator(".other mark")).to_contain_text("the capital")
    card.get_by_role("link", name="Prompt").click()
    expect(page.locator(".card")).to_have_count(1)
    page.get_by_label("Check how much of").fill("A text that begins otherwise.")
    page.get_by_role("button", name="Explain").click()
    expect(page.locator(".card").first).to_contain_text("This prompt")


def test_views_say_what_was_moved_in_place(page: Page, client: httpx.Client) -> None:
    alignment = {"mode": "in_place", "min_saved": 64, "reread": 8}
    for day in ("Monday", "Friday, the 13th"):
        facts = "".join(f"Fact {number}: {number} plus 1 is {number + 1}. " for number in range(24))
        options = {"prompt": f"Today is {day}. {facts}", "n_predict": 2, "id_slot": 3}
        client.post("/completion", json=options | {"alignment": alignment}).raise_for_status()
    page.get_by_role("link", name="Missed prompts").click()
    moved = re.compile(r"tokens reused, \d+ of them moved in place, 8 others read again")
    expect(page.locator(".card").first).to_contain_text(moved)
    page.locator(".card").first.get_by_role("link", name="Prompt").click()
    show(page, "slot-3")
    expect(page.locator("main")).to_contain_text(moved)


def test_pinned_prompts_are_listed_and_released(page: Page, client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is two and two?"}]
    options = {"messages": messages, "max_tokens": 2, "prompt_cache_key": "sums"}
    client.post("/v1/chat/completions", json=options).raise_for_status()
    page.get_by_role("link", name="Missed prompts").click()
    pin = page.locator(".pins li", has_text="key sums")
    expect(pin).to_contain_text("5 minutes left")
    pin.get_by_role("button", name="Release").click()
    expect_status(page, "released")
    expect(pin).to_have_count(0)
    assert client.get("/v1/prefix/pins").json()["data"] == []


def test_two_tabs_show_the_same(page: Page, client: httpx.Client) -> None:
    name = create_fed_session(client)
    show(page, name)
    other = page.context.new_page()
    other.goto("/#/operations")
    expect(other.locator("tbody tr").first).to_be_visible()
    third = page.context.new_page()
    show(third, name)
    last = memory(client, name)["tokens"]
    select(page, last - 9, last - 3)
    press(page, "Pin")
    expect(third.locator(".legend")).to_contain_text("pinned 6")
    expect(other.locator("tbody tr").first).to_contain_text("pin")
    client.post(f"/v1/sessions/{name}/generate", json={"max_tokens": 4, "ignore_eos": True})
    for item in (page, third):
        expect(item.locator("main")).to_contain_text(f"cells in use. {last + 4} tokens")
        expect(item.locator(f'.text [data-at="{last + 3}"]')).to_be_visible()


def test_a_change_for_an_outdated_revision_is_refused(page: Page, client: httpx.Client) -> None:
    """The page says so and shows the current revision."""
    name = create_fed_session(client)
    show(page, name)
    last = memory(client, name)["tokens"]
    select(page, last - 9, last - 3)
    page.route("**/memory", lambda route: route.abort())  # the page keeps showing the old revision
    client.post(f"/v1/sessions/{name}/rewind", json={"count": 1})
    expect_status(page, "does not answer")  # the page has seen the change, and could not show it
    page.get_by_role("button", name="Remove text").click()
    expect_status(page, "has changed since")
    assert memory(client, name)["tokens"] == last - 1
    page.unroute("**/memory")
    page.reload()
    expect(page.locator("main")).to_contain_text(f"cells in use. {last - 1} tokens")


def test_the_page_works_by_keyboard_alone(page: Page, client: httpx.Client) -> None:
    """Open a session, select on the strip and by number, and pin."""
    name = create_fed_session(client)
    page.goto("/#/sessions")
    expect(page.locator("main").get_by_role("link", name=name, exact=True)).to_be_visible()
    focus_by_tab(page, f"main a:text-is('{name}')")
    page.keyboard.press("Enter")
    expect(page.locator(".text .token").first).to_be_visible()
    focus_by_tab(page, ".strip")
    page.keyboard.press("End")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    last = memory(client, name)["tokens"]
    expect(page.locator(".strip")).to_have_attribute("aria-valuenow", str(last - 6))
    page.keyboard.press("Enter")
    expect(page.get_by_label("From token")).to_have_value(str(last - 6))
    focus_by_tab(page, "#to")
    page.keyboard.press("Control+A")
    page.keyboard.type(str(last - 2))
    focus_by_tab(page, "button:text-is('Pin')")
    page.keyboard.press("Enter")
    expect_status(page, "Pinned")
    assert {"standing": "pinned", "start": last - 6, "count": 4} in memory(client, name)["runs"]


VIEWS = (
    *("#/", "#/chat/{}", "#/sessions", "#/sessions/{}", "#/sessions/{}/heads"),
    *("#/tree", "#/operations", "#/missed"),
)


WIDTHS = (1440, 1024, 390)


@pytest.mark.parametrize(
    ("scheme", "examined"),
    [
        ("light", (390,)),
        ("dark", (1440,)),
        *(pytest.param(scheme, WIDTHS, marks=pytest.mark.slow) for scheme in ("light", "dark")),
    ],
)
def test_every_view_is_accessible_at_every_width(
    page: Page, client: httpx.Client, scheme: Any, examined: tuple[int, ...]
) -> None:
    """axe finds no serious violation, also in dialogs and in the panel; nothing is cut off.

    examined: the widths at which axe looks for violations.
    """
    name = create_fed_session(client)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    for view in VIEWS:
        page.goto(f"/{view.format(name)}")
        page.reload()
        expect(page.locator("main h1")).to_be_visible()
        page.wait_for_load_state("load")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            if width in examined:
                expect_no_violations(page, f"{view} at {width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        for opener in ("Memory", "Settings") if "chat" in view else ():
            page.get_by_role("button", name=opener, exact=True).first.click()
            expect_no_violations(page, f"{view} with {opener}")
            page.keyboard.press("Escape")
        page.set_viewport_size({"width": 360, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
        page.set_viewport_size({"width": 1440, "height": 800})
    page.goto("/#/")
    seconds = "getComputedStyle(document.querySelector('.composer')).transitionDuration"
    assert page.evaluate(seconds) == "0s"


def expect_no_violations(page: Page, where: str) -> None:
    result = Axe().run(page).response["violations"]
    serious = [item for item in result if item["impact"] in ("serious", "critical")]
    assert not serious, [
        (where, item["id"], [node["html"] for node in item["nodes"]][:3]) for item in serious
    ]


def test_without_allow_edit_the_page_is_read_only(
    browser: Browser, smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The page has no controls for changes, and the server refuses what it sends."""
    with (
        running_server(smollm2, tmp_path_factory.mktemp("shown")) as server,
        server.client() as client,
    ):
        name = create_fed_session(client)
        for page in open_page(browser, server, {"width": 1280, "height": 900}):
            show(page, name)
            expect(page.locator("#about")).to_contain_text("read-only")
            assert page.get_by_role("button", name="Pin").count() == 0
            assert page.get_by_label("Message").count() == 0
            status = page.evaluate(
                """(name) => fetch(`/v1/sessions/${name}/rewind`, {
                    method: "POST",
                    headers: {"Content-Type": "application/json"},
                    body: '{"count": 1}',
                }).then((answer) => answer.status)""",
                name,
            )
            assert status == 403


def test_states_and_checkpoints_are_shown(
    browser: Browser, hybrid_folder: Path, tmp_path: Path
) -> None:
    model = load_model(hybrid_folder, dtype="float32")
    with running_server(model, tmp_path) as server, server.client() as client:
        name = create_fed_session(client, WHOLE, TEXT[:900])
        shown = memory(client, name)
        for page in open_page(browser, server, {"width": 1280, "height": 900}):
            show(page, name)
            ends = ", ".join(map(str, shown["checkpoints"]))
            expect(page.locator("main")).to_contain_text(f"Checkpoints after {ends} tokens.")
            expect(page.locator("main")).to_contain_text("of states")
            expect(page.locator(".marks .checkpoint")).to_have_count(len(shown["checkpoints"]))
            page.goto(f"/#/chat/{name}")
            expect(page.locator(".turn-bars .checkpoint")).to_have_count(len(shown["checkpoints"]))
            expect(page.locator(".legend")).to_contain_text(
                f"checkpoint {len(shown['checkpoints'])} places"
            )
