"""The memory beside a chat of the web UI: its strip, pins, compression, policies and branches."""

import re
from collections.abc import Iterator

import httpx
import pytest
from page.chat_actions import (
    box,
    focus_by_tab,
    session_names,
    standings,
    start,
    strip,
    texts,
    turns,
    wait_until_idle,
)
from playwright.sync_api import Page, expect
from server.conftest import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


def test_memory_is_a_strip_of_turns_that_lights_with_the_chat(
    page: Page, client: httpx.Client
) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    start(page, tokens=8)
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(2)
    expect(strip(page)).to_have_count(3)  # the template's own beginning is one
    expect(page.locator(".memory-panel")).to_contain_text("The last answer reused all")
    widths = strip(page).evaluate_all("(bars) => bars.map((bar) => bar.offsetWidth)")
    memory = client.get(f"/v1/sessions/{page.url.rpartition('/')[2]}/memory").json()
    sizes = [memory["spans"][f"turn {n}"] for n in (1, 2)]
    expected = [span["end"] - span["start"] for span in sizes]
    assert widths[1] / widths[2] == pytest.approx(expected[0] / expected[1], rel=0.4)
    strip(page).nth(1).hover()
    expect(page.locator(".turn.lit")).to_have_attribute("data-turn", "turn 1")
    page.locator(".turn").nth(1).hover()
    expect(page.locator(".turn-bars .lit")).to_have_attribute("data-turn", "turn 2")


def test_a_turn_is_pinned_forgotten_and_replaced_with_undo(
    page: Page, client: httpx.Client
) -> None:
    """By keyboard alone."""
    name = start(page, tokens=8)
    before = texts(client, name)
    focus_by_tab(page, ".turn-bars button[tabindex='0']")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".turn-bars .lit")).to_have_attribute("data-turn", "opening")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(strip(page).nth(1)).to_have_attribute("aria-pressed", "true")
    panel = page.locator(".memory-panel")
    page.get_by_role("button", name="Memory", exact=True).first.press("Enter")
    expect(panel).to_contain_text("Takes")
    focus_by_tab(page, "button:text-is('Pin message')")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text(
        "The message of turn 1 is pinned. Unpin takes it back at any time."
    )
    wait_until_idle(page)
    assert "pinned" in standings(client, name)
    focus_by_tab(page, "button:text-is('Replace answer')")
    page.keyboard.press("Enter")
    page.locator("dialog [name=text]").fill("Lyon.")
    page.locator("dialog button.main").press("Enter")
    expect(page.locator(".answer")).to_contain_text("Lyon.")
    wait_until_idle(page)
    expect(panel).to_contain_text(re.compile(r"Frees \d+ cells \([\d.]+ [kM]B, which Undo"))
    focus_by_tab(page, "button:text-is('Remove')")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_count(0)
    wait_until_idle(page)
    for operation in ("remove", "replace", "pin"):
        page.get_by_role("button", name=f"Undo {operation}").press("Enter")
        expect(page.locator("#status")).to_have_text(f"Undone: {operation}.")
    assert texts(client, name) == before
    assert "pinned" not in standings(client, name)
    expect(page.locator(".turn")).to_have_count(1)


def test_compression_is_shown_before_it_is_done(page: Page, client: httpx.Client) -> None:
    name = "to-compress"
    settings = {"name": name, "policy": "full", "max_kv_size": 2048}
    client.post("/v1/sessions", json=settings).raise_for_status()
    text = "The river is long. The password is swordfish. " * 30
    client.post(f"/v1/sessions/{name}/feed", json={"text": text}).raise_for_status()
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"/#/chat/{name}")
    panel = page.locator(".memory-panel")
    expect(panel).to_contain_text(re.compile(r"4 to 1: \d+ cells become about \d+: frees"))
    panel.get_by_text("Compress the whole memory").click()
    page.get_by_label("Ratio").press("ArrowLeft")
    expect(panel).to_contain_text("3.5 to 1")
    panel.get_by_role("button", name="Compress").click()
    expect(panel.locator(".legend")).to_contain_text("compressed")
    page.get_by_role("button", name="Undo compress").click()
    expect(panel.locator(".legend")).not_to_contain_text("compressed")


def test_a_conversation_has_its_own_policy_and_budget(page: Page, client: httpx.Client) -> None:
    page.goto("/#/")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("dialog")).to_contain_text("longest answer are kept in this browser")
    policies = page.locator("dialog [name=policy] option")
    expect(policies.first).to_have_text(re.compile("^server default: [a-z]+"))
    expect(policies.nth(1)).to_have_text("sliding: forgets the oldest text, token by token")
    page.locator("dialog [name=policy]").select_option("full")
    page.locator("dialog [name=max_kv_size]").fill("600")
    page.locator("dialog [name=max_tokens]").fill("4")
    page.locator("dialog button.main").click()
    box(page).fill("Hello.")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(1)
    shown = client.get(f"/v1/sessions/{page.url.rpartition('/')[2]}/memory").json()
    assert (shown["policy"], shown["max_kv_size"]) == ("full", 600)
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("dialog [name=policy]")).to_have_count(0)


def test_a_message_that_does_not_fit_a_new_conversation_begins_none(
    page: Page, client: httpx.Client
) -> None:
    page.goto("/#/")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    page.locator("dialog [name=policy]").select_option("full")
    page.locator("dialog [name=max_kv_size]").fill("64")
    page.locator("dialog [name=max_tokens]").fill("4")
    page.locator("dialog button.main").click()
    before = session_names(client)
    message = "What is the capital of France? " * 8
    box(page).fill("What is the capital of France? " * 5)
    warning = page.locator(".size-warning")
    expect(warning).to_contain_text("64 of 64 cells are free: it does not fit")  # with the template
    box(page).fill(message)
    box(page).press("Enter")
    text = "The message does not fit: memory has 64 cells, and policy full evicts nothing."
    expect(page.locator("#status")).to_contain_text(text)
    expect(page).to_have_url(re.compile("/#/$"))
    expect(page.locator(".welcome")).to_contain_text("Write below")
    expect(box(page)).to_have_value(message)
    expect(box(page)).to_be_focused()
    assert session_names(client) == before
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("dialog [name=max_kv_size]")).to_have_value("64")
    page.locator("dialog [name=max_kv_size]").fill("600")
    page.locator("dialog button.main").click()
    expect(warning).to_have_text("")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(1)


def test_a_branch_stays_one_after_an_undo(page: Page, client: httpx.Client) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    name = start(page, "Name a lake in Peru.", tokens=4)
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(page.locator("h1")).to_contain_text("(branch)")
    page.get_by_role("link", name="Back to").click()
    page.get_by_role("button", name="Branch", exact=True).click()
    expect(page.locator("h1")).to_contain_text("(branch 2)")
    branch = page.url.rpartition("/")[2]
    item = page.locator("#conversations li", has=page.locator(f'[data-name="{branch}"]'))
    expect(item.get_by_label("branch", exact=True)).to_have_count(1)
    strip(page).last.click()
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("button", name="Undo remove").click()
    expect(page.locator("#status")).to_have_text("Undone: remove.")
    page.reload()
    expect(item.get_by_label("branch", exact=True)).to_have_count(1)
    assert texts(client, branch) == texts(client, name)


def test_what_a_window_forgot_is_marked_and_asked_anew(page: Page, client: httpx.Client) -> None:
    """A turn that is forgotten in part is pinned as far as it is held, and deleted whole."""
    name, settings = "forgetful", {"policy": "sliding", "max_kv_size": 64}
    client.post("/v1/sessions", json={"name": name, **settings}).raise_for_status()
    for country in ("France", "Italy", "Spain"):
        turn = {"content": f"Name the capital of {country}.", "max_tokens": 6, "temperature": 0}
        client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()
    before = texts(client, name)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"/#/chat/{name}")
    expect(page.locator(".question .standing").first).to_contain_text("forgotten")
    strip(page).nth(1).click()
    panel = page.locator(".memory-panel")
    expect(panel).to_contain_text(re.compile(r"\d+ of \d+ tokens forgotten"))
    expect(panel.get_by_role("button", name="Replace message")).to_have_count(0)
    expect(panel).to_contain_text("The message cannot be replaced, as not all of it is in memory.")
    panel.get_by_role("button", name="Pin message").click()
    expect(page.locator("#status")).to_have_text(
        "The message of turn 1 is pinned. Unpin takes it back at any time."
    )
    wait_until_idle(page)
    assert "pinned" in standings(client, name)
    panel.get_by_role("button", name="Remove", exact=True).click()
    expect(page.locator(".question")).to_have_count(2)
    page.get_by_role("button", name="Undo remove").click()
    expect(page.locator(".question")).to_have_count(3)
    page.get_by_role("button", name="Undo pin").click()
    expect(page.locator("#status")).to_have_text("Undone: pin.")
    assert texts(client, name) == before
    page.get_by_role("button", name="Edit").first.click()
    expect(page.locator("dialog")).to_contain_text("from there on is forgotten")
    page.locator("dialog [name=text]").fill("Name the capital of Peru.")
    page.locator("dialog button.main").click()
    expect(page.locator("h1")).to_have_text("Name the capital of Peru.")
    expect(turns(page)).to_have_count(1)
    expect(page.locator(".origin")).to_contain_text("New conversation.")
    strip(page).last.click()
    panel.get_by_role("button", name="Remove", exact=True).click()
    expect(page.locator(".question")).to_have_count(0)
    expect(page.locator(".turn-bars button.selected")).to_have_count(0)
    page.get_by_role("button", name="Undo remove").click()
    expect(turns(page)).to_have_count(1)
    expect(page.locator(".origin")).to_contain_text("New conversation.")
    shown = client.get(f"/v1/sessions/{page.url.rpartition('/')[2]}/memory").json()
    assert {key: shown[key] for key in settings} == settings
    assert texts(client, name) == before
