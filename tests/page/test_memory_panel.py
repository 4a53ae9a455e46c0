"""Web UI: what the memory panel says and offers, and where the focus is after its changes."""

import re

import pytest
from page.conftest import create, open_page, wait_until
from playwright.sync_api import Browser, Page, expect
from server.conftest import RunningServer


@pytest.fixture
def wide(page: Page) -> Page:
    page.set_viewport_size({"width": 1440, "height": 900})
    return page


def test_what_the_last_answer_reused_is_said_by_the_server(
    wide: Page, server: RunningServer
) -> None:
    """After a reload, in the chat as it was left, and after a change is undone."""
    create(server, "reused", turns=2)
    said = wide.locator(".memory-panel").get_by_text("The last answer reused all")
    wide.goto("/#/chat/reused")
    expect(said).to_be_visible()
    words = said.inner_text()
    wide.reload()
    expect(said).to_have_text(words)
    wide.locator(".turn-bars button").last.click()
    wide.get_by_role("button", name="Pin message").click()
    wide.get_by_role("button", name="Undo pin").click()
    expect(wide.locator("#status")).to_have_text("Undone: pin.")
    expect(said).to_have_text(words)


def test_the_focus_stays_on_the_button_that_was_pressed(wide: Page, server: RunningServer) -> None:
    """On the one that takes its place."""
    create(server, "pressed", turns=2)
    wide.goto("/#/chat/pressed")
    wide.locator(".turn-bars button").last.click()
    for verb in ("Pin", "Unpin"):
        wide.get_by_role("button", name=f"{verb} answer").press("Enter")
        other = "Unpin" if verb == "Pin" else "Pin"
        expect(wide.get_by_role("button", name=f"{other} answer", exact=True)).to_be_focused()


def test_escape_leads_back_to_the_turn_of_the_strip(
    browser: Browser, server: RunningServer
) -> None:
    create(server, "from-strip", turns=2)
    for page in open_page(browser, server, {"width": 390, "height": 700}):
        page.goto("/#/chat/from-strip")
        expect(page.locator("#words")).to_be_focused()  # the chat is loaded
        turn = page.locator(".turn-bars button[data-turn='turn 1']")
        turn.press("Enter")
        expect(page.locator(".memory-panel")).to_be_visible()
        page.get_by_role("button", name="Pin message").press("Enter")
        expect(page.get_by_role("button", name="Unpin message")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator(".memory-panel")).to_be_hidden()
        expect(turn).to_be_focused()


def test_a_turn_that_is_chosen_by_a_key_leads_to_its_buttons_and_back(
    wide: Page, server: RunningServer
) -> None:
    create(server, "by-key", turns=2)
    wide.goto("/#/chat/by-key")
    expect(wide.locator("#words")).to_be_focused()  # the chat is loaded
    turn = wide.locator(".turn-bars button[data-turn='turn 1']")
    turn.press("Enter")
    expect(wide.locator(".turn-card")).to_be_focused()
    wide.keyboard.press("Tab")
    expect(wide.get_by_role("button", name="Pin message")).to_be_focused()
    wide.keyboard.press("Escape")
    expect(turn).to_be_focused()
    assert wide.locator(".memory-action p:empty").count() == 0
    wide.keyboard.press("Enter")  # the turn stays selected
    expect(wide.locator(".turn-card")).to_be_focused()
    expect(wide.locator(".turn-card h3")).to_have_text("Turn 1")


def test_a_compression_says_what_it_left_and_what_cannot_be_done_any_more(
    wide: Page, server: RunningServer
) -> None:
    """Undo keeps memory: its copy shares only a part with the conversation."""
    name = "compressing"
    create(server, name, turns=0, policy="full", max_kv_size=2048)
    with server.client() as client:
        for content in ("Name a river.", "The river is long and wide. " * 40, "Go on."):
            turn = {"content": content, "max_tokens": 1, "temperature": 0}
            client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()
        before = client.get(f"/v1/sessions/{name}/memory").json()["cells"]
        wide.goto(f"/#/chat/{name}")
        wide.locator(".turn-bars button[data-turn='turn 1']").click()
        wide.get_by_text("Compress the whole memory").click()
        expect(wide.locator(".compress")).to_contain_text("which Undo keeps for now")
        wide.get_by_role("button", name="Compress", exact=True).click()
        status = wide.locator("#status")
        expect(status).to_contain_text(re.compile(rf"^Compressed: {before} cells became \d+\."))
        card = wide.locator(".turn-card")
        expect(card).to_contain_text("Pin message: not possible, as it is compressed.")
        undo = f"/v1/sessions/_undo.{name}.1.compress/memory"
        kept = client.get(undo).json()
        assert kept["cells"] == before
        assert kept["bytes_shared"] < kept["bytes"] / 2


def test_a_change_that_makes_memory_forget_says_how_much(wide: Page, server: RunningServer) -> None:
    create(server, "replacing", turns=4, policy="sliding", max_kv_size=64)
    wide.goto("/#/chat/replacing")
    wide.locator(".turn-bars button").last.click()
    wide.get_by_role("button", name="Replace message").click()
    wide.locator("dialog [name=text]").fill("Name a city with a long river. " * 3)
    wide.locator("dialog button.main").click()
    said = re.compile(r"stays as it was\. \d+ tokens were forgotten for it\.$")
    expect(wide.locator("#status")).to_have_text(said)


def test_the_preview_of_a_compression_is_in_view(wide: Page, server: RunningServer) -> None:
    create(server, "previewed", policy="full", max_kv_size=2048)
    wide.set_viewport_size({"width": 1440, "height": 420})
    wide.goto("/#/chat/previewed")
    wide.locator(".turn-bars button").last.click()
    wide.get_by_text("Compress the whole memory").click()
    expect(wide.get_by_role("button", name="Compress", exact=True)).to_be_in_viewport(ratio=1)


def test_why_a_prompt_was_not_reused_further_has_the_focus(
    wide: Page, server: RunningServer
) -> None:
    with server.client() as client:
        for end in ("Rome", "Oslo"):
            messages = [
                {"role": "system", "content": "You answer in one word. " * 40},
                {"role": "user", "content": f"Compare the rivers of Peru with {end}."},
            ]
            body = {"messages": messages, "max_tokens": 1, "temperature": 0}
            client.post("/v1/chat/completions", json=body).raise_for_status()
        misses = client.get("/v1/prefix/misses").json()["data"]
        sessions = client.get("/v1/sessions?unnamed=true").json()["data"]
    assert 0 < misses[0]["reused"] < misses[0]["differs_at"]
    wide.goto(f"/#/chat/{next(entry['name'] for entry in sessions if not entry['named'])}")
    wide.get_by_role("button", name="Why not more?").press("Enter")
    expect(wide.locator(".memory-panel")).to_contain_text(
        f"{misses[0]['differs_at']} tokens are the same, of which {misses[0]['reused']} were reused"
    )
    wait_until(wide, "document.activeElement.textContent.includes('are the same')")
    wide.get_by_role("link", name=f"Prompt {misses[0]['number']}").click()
    title = "Compare the rivers of Peru with Rome."  # of the session that no client named
    expect(wide.locator(".card").get_by_role("link", name=title)).to_be_visible()


def test_a_replaced_text_is_not_lost_when_it_is_refused(wide: Page, server: RunningServer) -> None:
    """Nor can what follows a pinned message be evaluated again, as text after it is forgotten."""
    name = "refused-text"
    create(server, name, policy="sliding", max_kv_size=64)
    with server.client() as client:
        span = client.get(f"/v1/sessions/{name}/memory").json()["spans"]["turn 1 question"]
        pin = {"start": span["start"], "end": span["end"]}
        client.post(f"/v1/sessions/{name}/pin", json=pin).raise_for_status()
        for content in ("The river is long. " * 6, "Go on."):
            turn = {"content": content, "max_tokens": 1, "temperature": 0}
            client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()
    wide.goto(f"/#/chat/{name}")
    wide.locator(".turn-bars button[data-turn='turn 1']").click()
    expect(wide.locator(".turn-card")).to_contain_text("it cannot be evaluated again, as some of")
    wide.get_by_role("button", name="Replace message").click()
    box = wide.locator("dialog [name=text]")
    expect(box).to_have_value("Name city 0.")
    expect(wide.locator("dialog [name=recompute]")).to_have_count(0)
    text = "Name a city beside a river. " * 9  # too much for the memory
    box.fill(text)
    wide.locator("dialog button.main").click()
    expect(wide.locator("dialog .failure")).to_have_text(re.compile("."))
    expect(box).to_have_value(text)
    box.fill("Name two cities.")
    wide.locator("dialog button.main").click()
    expect(wide.locator("#status")).to_contain_text("The message was replaced in memory")
    expect(wide.locator(".message.question").first).to_contain_text("Name two cities.")


def test_a_text_is_not_replaced_at_the_place_of_another(wide: Page, server: RunningServer) -> None:
    """The turn before it was removed while the dialog was open: it is asked again."""
    create(server, "moved-text", turns=2)
    wide.goto("/#/chat/moved-text")
    wide.locator(".turn-bars button[data-turn='turn 2']").click()
    wide.get_by_role("button", name="Replace message").click()
    with server.client() as client:
        span = client.get("/v1/sessions/moved-text/memory").json()["spans"]["turn 1"]
        edit = {"op": "delete", "start": span["start"], "end": span["end"]}
        client.post("/v1/sessions/moved-text/edit", json=edit).raise_for_status()
    expect(wide.locator(".turn")).to_have_count(1)
    wide.locator("dialog [name=text]").fill("Name two cities.")
    wide.locator("dialog button.main").click()
    expect(wide.locator("dialog .failure")).to_contain_text("has changed since it was shown")
    wide.locator("dialog button.main").click()
    expect(wide.locator(".message.question .content")).to_have_text(["Name two cities."])
    expect(wide.locator(".message.answer")).to_have_count(1)


def test_settings_take_a_budget_that_the_policy_has(page: Page, server: RunningServer) -> None:
    """And say with it what the longest answer is."""
    page.get_by_role("button", name="Settings").click()
    budget, longest = page.locator("dialog [name=max_kv_size]"), page.locator("[name=max_tokens]")
    expect(longest).to_have_attribute("placeholder", "1024")
    budget.fill("300")
    expect(longest).to_have_attribute("placeholder", "150")
    for value, is_valid in (("2", False), ("8193", False), ("8192", True)):
        budget.fill(value)
        assert budget.evaluate("(input) => input.checkValidity()") is is_valid
    expect(page.locator("dialog")).to_contain_text("Memory budget, in cells: 32 to 8,192")
    page.locator("dialog [name=policy]").select_option("self_extend")
    expect(page.locator("dialog")).to_contain_text("Memory budget, in cells: 32 to 29,696")
    budget.fill("29696")
    page.locator("dialog button.main").click()
    expect(page.locator("dialog")).to_have_count(0)
    with server.client() as client:
        for policy, budget_of in client.get("/v1/page").json()["budgets"].items():
            for size in (32, budget_of):
                body = {"policy": policy, "max_kv_size": size}
                created = client.post("/v1/sessions", json=body)
                assert created.status_code == 201, (policy, size)
                client.delete(f"/v1/sessions/{created.json()['name']}")
