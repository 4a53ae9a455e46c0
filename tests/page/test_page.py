"""The page in a real browser: what people do with it, by pointer and by keyboard."""

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from page.conftest import opened
from playwright.sync_api import Browser, Page, expect
from server.conftest import Running, running
from topics import topic_text

from kvkeep.model import Model

TEXT = topic_text()
names = (f"page-{number}" for number in count())


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


SMALL = {"policy": "sliding", "max_kv_size": 300, "keep": 4}
WHOLE = {"policy": "full", "max_kv_size": 2048}


def fed(client: httpx.Client, settings: dict[str, Any] = SMALL, text: str = TEXT[:3000]) -> str:
    """A session that has read a text, through a smaller memory."""
    name = next(names)
    assert client.post("/v1/sessions", json={"name": name, **settings}).status_code == 201
    assert client.post(f"/v1/sessions/{name}/feed", json={"text": text}).status_code == 200
    return name


def memory(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/v1/sessions/{name}/memory").json()
    return found


def show(page: Page, name: str) -> None:
    page.goto(f"/#/sessions/{name}")
    expect(page.locator(".text .token").first).to_be_visible()


def select(page: Page, start: int, end: int) -> None:
    """By pointing: from one token's beginning to another's end."""
    page.locator(f'.text [data-at="{start}"]').scroll_into_view_if_needed()
    page.evaluate(
        """([start, end]) => {
            const text = document.querySelector(".text");
            const of = (at) => text.querySelector(`[data-at="${at}"]`).firstChild;
            getSelection().setBaseAndExtent(of(start), 0, of(end - 1), of(end - 1).length);
        }""",
        [start, end],
    )
    expect(page.get_by_label("From token")).to_have_value(str(start))
    expect(page.get_by_label("to before")).to_have_value(str(end))


def press(page: Page, button: str, **fields: str) -> None:
    """A button, and what its dialog asks for."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.locator("dialog")
    for name, value in fields.items():
        dialog.locator(f"[name={name}]").fill(value)
    if fields:
        dialog.locator("button.main").click()


def told(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.locator("#status")).to_contain_text(text)


def test_a_chat_is_begun_and_goes_on(page: Page, client: httpx.Client) -> None:
    name = next(names)
    page.get_by_role("button", name="New session").click()
    page.locator("dialog [name=name]").fill(name)
    page.locator("dialog button.main").click()
    page.get_by_label("System prompt").fill("You are terse.")
    page.get_by_label("Say").fill("What is the capital of France?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turns .answer .token").first).to_be_visible()
    expect(page.locator(".turns")).to_contain_text("Paris")
    page.get_by_label("Say").fill("And of Italy?")
    page.get_by_label("Say").press("Enter")
    expect(page.locator(".turns")).to_contain_text("Rome")
    expect(page.get_by_role("button", name="turn 2 answer")).to_be_visible()
    spans = memory(client, name)["spans"]
    assert {"system", "turn 1", "turn 1 answer", "turn 2 question"} <= set(spans)
    page.get_by_role("button", name="turn 1 answer").click()
    expect(page.get_by_label("From token")).to_have_value(str(spans["turn 1 answer"]["start"]))
    assert memory(client, name)["runs"][0] == {
        "standing": "kept",
        "start": 0,
        "count": spans["system"]["end"],
    }


def test_what_is_pointed_at_is_pinned_named_and_edited(page: Page, client: httpx.Client) -> None:
    name = fed(client)
    show(page, name)
    last = memory(client, name)["tokens"]
    select(page, last - 60, last - 50)
    press(page, "Pin")
    told(page, "Pinned")
    runs = memory(client, name)["runs"]
    assert {"standing": "pinned", "start": last - 60, "count": 10} in runs
    expect(page.locator(".legend")).to_contain_text("pinned 10")
    press(page, "Name", name="a part")
    told(page, "a part")
    assert memory(client, name)["spans"]["a part"]["end"] == last - 50
    select(page, last - 20, last - 10)
    press(page, "Replace", text=" something else")
    told(page, "tokens evaluated")
    pieces = client.get(f"/v1/sessions/{name}/text", params={"start": last - 20}).json()["pieces"]
    assert "".join(each["text"] for each in pieces).startswith(" something else")
    total = memory(client, name)["tokens"]
    select(page, total - 8, total - 4)
    press(page, "Delete text")
    told(page, "Took out")
    assert memory(client, name)["tokens"] == total - 4
    page.get_by_label("or span").select_option("a part")
    expect(page.get_by_label("From token")).to_have_value(str(last - 60))
    press(page, "Unpin")
    told(page, "Unpinned")
    assert all(run["standing"] != "pinned" for run in memory(client, name)["runs"])


def test_it_is_forked_where_one_points_and_rewound(page: Page, client: httpx.Client) -> None:
    name, new = fed(client), next(names)
    show(page, name)
    last = memory(client, name)["tokens"]
    select(page, last - 30, last - 25)
    press(page, "Fork here", name=new)
    expect(page.get_by_role("heading", name=new, exact=True)).to_be_visible()
    assert memory(client, new)["tokens"] == last - 25
    show(page, name)
    select(page, last - 30, last - 20)
    press(page, "Rewind to here")
    told(page, "Rewound")
    assert memory(client, name)["tokens"] == last - 20
    page.get_by_role("link", name="Tree").click()
    branch = page.locator(".tree li", has=page.get_by_role("link", name=name, exact=True)).first
    expect(branch.locator("li")).to_contain_text(new)


def test_it_is_compressed_and_each_head_shows_what_it_keeps(
    page: Page, client: httpx.Client
) -> None:
    name = fed(client, WHOLE)
    show(page, name)
    before = memory(client, name)["cells"]
    press(page, "Compress", ratio="3")
    told(page, re.compile(rf"{before} cells became \d+"))
    expect(page.locator(".legend")).to_contain_text("compressed")
    page.get_by_role("link", name="Cells by head").click()
    cells = client.get(f"/v1/sessions/{name}/heads").json()["cells"]
    buttons = page.locator(".heads td button")
    expect(buttons).to_have_count(sum(map(len, cells)))
    shown = buttons.all_text_contents()
    assert [int(each) for each in shown] == [count for layer in cells for count in layer]
    page.get_by_role("button", name="layer 3, head 1").click()
    expect(page.locator(".positions span")).to_have_count(cells[3][1])


def test_a_snapshot_is_taken_and_restored(page: Page, client: httpx.Client) -> None:
    name, label, new = fed(client), next(names), next(names)
    show(page, name)
    press(page, "Snapshot", name=label)
    told(page, "on disk")
    page.get_by_role("link", name="Tree").click()
    page.locator(".snapshot", has_text=label).get_by_role("button", name="Restore").click()
    page.locator("dialog [name=name]").fill(new)
    page.locator("dialog button.main").click()
    expect(page.get_by_role("heading", name=new, exact=True)).to_be_visible()
    assert memory(client, new)["runs"] == memory(client, name)["runs"]


def test_a_prompt_that_missed_has_a_card(page: Page, client: httpx.Client) -> None:
    said = "You answer in one word. " * 20
    for question in ("What is the capital of France?", "What is two and two?"):
        messages = [{"role": "system", "content": said}, {"role": "user", "content": question}]
        asked = {"model": "smollm2", "messages": messages, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
    page.get_by_role("link", name="Missed prompts").click()
    card = page.locator(".card").first
    expect(card).to_contain_text("First difference")
    expect(card.locator(".common")).to_contain_text("What is")
    expect(card.locator(".own mark")).to_contain_text("two and two")
    expect(card.locator(".other mark")).to_contain_text("the capital")
    card.get_by_role("link", name="Prompt").click()
    expect(page.locator(".card")).to_have_count(1)
    page.get_by_label("What would be reused").fill("A text that begins otherwise.")
    page.get_by_role("button", name="Explain").click()
    expect(page.locator(".card").first).to_contain_text("This prompt")


def test_two_tabs_show_the_same(page: Page, client: httpx.Client) -> None:
    name = fed(client)
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
    for each in (page, third):
        expect(each.locator("main")).to_contain_text(f"{last + 4} tokens in")
        expect(each.locator(f'.text [data-at="{last + 3}"]')).to_be_visible()


def test_what_was_changed_meanwhile_is_not_changed_blindly(
    page: Page, client: httpx.Client
) -> None:
    """The page says so, and shows what is there now."""
    name = fed(client)
    show(page, name)
    last = memory(client, name)["tokens"]
    select(page, last - 9, last - 3)
    page.route("**/memory", lambda route: route.abort())  # the page does not hear of it
    client.post(f"/v1/sessions/{name}/rewind", json={"count": 1})
    page.get_by_role("button", name="Delete text").click()
    told(page, "changed meanwhile")
    assert memory(client, name)["tokens"] == last - 1
    page.unroute("**/memory")
    page.reload()
    expect(page.locator("main")).to_contain_text(f"{last - 1} tokens in")


def test_by_the_keyboard_alone(page: Page, client: httpx.Client) -> None:
    """From the list to a session, a part chosen on the strip and by number, pinned, and a turn."""
    name = fed(client)
    page.reload()
    link = page.get_by_role("link", name=name, exact=True)
    expect(link).to_be_visible()
    reach(page, f"a:text-is('{name}')")
    page.keyboard.press("Enter")
    expect(page.locator(".text .token").first).to_be_visible()
    reach(page, ".strip")
    page.keyboard.press("End")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    last = memory(client, name)["tokens"]
    expect(page.locator(".strip")).to_have_attribute("aria-valuenow", str(last - 6))
    page.keyboard.press("Enter")
    expect(page.get_by_label("From token")).to_have_value(str(last - 6))
    reach(page, "#to")
    page.keyboard.press("Control+A")
    page.keyboard.type(str(last - 2))
    reach(page, "button:text-is('Pin')")
    page.keyboard.press("Enter")
    told(page, "Pinned")
    assert {"standing": "pinned", "start": last - 6, "count": 4} in memory(client, name)["runs"]
    reach(page, "#words")
    page.keyboard.type("Say hello.")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="turn 1 answer")).to_be_visible()


def reach(page: Page, what: str) -> None:
    """By the Tab key."""
    wanted = page.locator(what)
    for _ in range(200):
        if wanted.evaluate("(element) => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the Tab key does not come to {what}")


VIEWS = ("#/", "#/tree", "#/operations", "#/missed", "#/sessions/{}", "#/sessions/{}/heads")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_everybody_can_use_it(page: Page, client: httpx.Client, view: str, scheme: Any) -> None:
    """No serious violation of what axe knows."""
    name = fed(client)
    page.emulate_media(color_scheme=scheme)
    page.goto(f"/{view.format(name)}")
    page.reload()
    expect(page.locator("main h1")).to_be_visible()
    page.wait_for_load_state("load")
    found = Axe().run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, [
        (each["id"], [node["html"] for node in each["nodes"]][:3]) for each in serious
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_it_fits_a_small_screen(
    browser: Browser, server: Running, client: httpx.Client, view: str
) -> None:
    name = fed(client)
    for small in opened(browser, server, {"width": 360, "height": 640}):
        small.goto(f"/{view.format(name)}")
        small.reload()
        expect(small.locator("main h1")).to_be_visible()
        assert small.evaluate("document.documentElement.scrollWidth") <= 360


def test_without_leave_it_only_shows(
    browser: Browser, smollm2: Model, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing to change by, and the server refuses what a page sends all the same."""
    with running(smollm2, tmp_path_factory.mktemp("shown")) as server, server.client() as client:
        name = fed(client)
        for page in opened(browser, server, {"width": 1280, "height": 900}):
            show(page, name)
            expect(page.locator("#about")).to_contain_text("read only")
            assert page.get_by_role("button", name="Pin").count() == 0
            assert page.get_by_label("Say").count() == 0
            status = page.evaluate(
                """(name) => fetch(`/v1/sessions/${name}/rewind`, {
                    method: "POST",
                    headers: {"Content-Type": "application/json"},
                    body: '{"count": 1}',
                }).then((answer) => answer.status)""",
                name,
            )
            assert status == 403
