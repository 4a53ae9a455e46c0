"""Web UI: the inspector's URLs and its log."""

from page.conftest import create
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer


def test_a_head_that_is_selected_is_in_the_url(page: Page, server: RunningServer) -> None:
    create(server, "headed")
    page.goto("/#/sessions/headed/heads")
    page.get_by_role("button", name="layer 2, head 1:").click()
    heading = page.get_by_role("heading", name="Layer 2, head 1:")
    expect(heading).to_be_visible()
    expect(page).to_have_url(f"{server.url}/#/sessions/headed/heads/2/1")
    page.reload()
    expect(heading).to_be_visible()


def test_an_undo_is_one_operation(page: Page, server: RunningServer) -> None:
    """In the log as it is, and as it is loaded."""
    create(server, "undone", turns=2)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto("/#/chat/undone")
    page.locator(".turn-bars button").last.click()
    page.get_by_role("button", name="Remove", exact=True).click()
    page.get_by_role("button", name="Undo remove").click()
    expect(page.locator("#status")).to_have_text("Undone: remove.")
    page.goto("/#/operations")
    rows = page.locator("tbody tr", has=page.get_by_text("undone", exact=True))
    expect(rows.locator("td:nth-child(2)")).to_have_text(
        ["undo", "edit", *["generate"] * 2, "create"]
    )


def test_a_view_that_waits_for_the_server_says_so(page: Page, server: RunningServer) -> None:
    create(server, "waiting")
    held: list[Route] = []
    page.route("**/v1/sessions/waiting/memory", lambda route: held.append(route))
    page.goto("/#/sessions/waiting")
    waiting = page.locator("#content").get_by_text("Loading...")
    expect(waiting).to_be_visible()
    while not held:
        page.wait_for_timeout(20)
    for route in held:
        route.continue_()
    expect(page.get_by_role("heading", name="waiting")).to_be_visible()
    expect(waiting).to_have_count(0)


def test_a_span_that_is_chosen_is_shown_in_the_text_and_in_the_strip(
    page: Page, server: RunningServer
) -> None:
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "long"}).raise_for_status()
        for text in ("Hello.", "the river is long. " * 600):
            body = {"content": text, "max_tokens": 1, "temperature": 0}
            client.post("/v1/sessions/long/turns", json=body).raise_for_status()
        memory = client.get("/v1/sessions/long/memory").json()
    page.goto("/#/sessions/long")
    end = page.locator(f".text [data-at='{memory['tokens'] - 1}']")
    expect(end).to_be_in_viewport()
    chosen = page.locator(".strip .chosen")
    expect(chosen).to_be_hidden()
    page.get_by_label("or span").select_option("turn 1 question")
    span = memory["spans"]["turn 1 question"]
    expect(page.locator(f".text [data-at='{span['start']}']")).to_be_in_viewport()
    expect(chosen).to_be_visible()
    left = 100 * span["start"] / memory["tokens"]
    assert abs(float(chosen.evaluate("(e) => parseFloat(e.style.left)")) - left) < 0.01


def test_a_name_that_is_not_allowed_is_refused_in_its_dialog(
    page: Page, server: RunningServer
) -> None:
    create(server, "to-save")
    page.goto("/#/sessions/to-save")
    page.get_by_role("button", name="Snapshot", exact=True).click()
    field = page.locator("dialog [name=name]")
    refusal = "(input) => input.validationMessage"
    for name, allowed in (("before lunch", "before-lunch"), ("Mein Name", "Mein-Name")):
        field.fill(name)
        page.locator("dialog button.main").click()
        expect(field).to_be_visible()
        assert f"Allowed is “{allowed}”." in field.evaluate(refusal)
    field.fill("before-lunch")
    page.locator("dialog button.main").click()
    expect(page.locator("#status")).to_contain_text("Snapshot before-lunch saved.")
    page.goto("/#/tree")
    page.get_by_role("button", name="Restore").first.click()
    field.fill("Mein Name")
    page.locator("dialog button.main").click()
    expect(field).to_be_visible()
    assert "Mein-Name" in field.evaluate(refusal)


def test_staying_in_memory_is_taken_back_by_a_button_that_says_so(
    page: Page, server: RunningServer
) -> None:
    create(server, "resident")
    page.goto("/#/sessions/resident")
    page.get_by_role("button", name="Stay in memory").click()
    expect(page.locator("main")).to_contain_text("Stays in memory")
    page.get_by_role("button", name="Allow moving to disk").click()
    expect(page.get_by_role("button", name="Stay in memory")).to_be_visible()
    with server.client() as client:
        assert not client.get("/v1/sessions/resident").json()["resident"]


def test_links_to_other_sessions_have_their_titles(page: Page, server: RunningServer) -> None:
    create(server, "origin-1a2b", title="My dog")
    with server.client() as client:
        client.post("/v1/sessions/origin-1a2b/fork", json={"name": "its-branch"}).raise_for_status()
    page.goto("/#/sessions/its-branch")
    facts = page.locator("main > div > p").first
    expect(facts).to_contain_text("Branch of My dog.")
    page.goto("/#/sessions/origin-1a2b/heads")
    expect(page.get_by_role("heading", name="Cells of My dog")).to_be_visible()
    expect(page.locator("main").get_by_role("link", name="My dog")).to_be_visible()


def test_tokens_that_are_parts_of_a_character_are_explained(
    page: Page, server: RunningServer
) -> None:
    create(server, "plain")
    with server.client() as client:
        client.post("/v1/sessions", json={"name": "parts"}).raise_for_status()
        client.post("/v1/sessions/parts/feed", json={"text": "東京 🦜"}).raise_for_status()
    page.goto("/#/sessions/parts")
    part = page.locator(".text .token.part").first
    expect(part).to_have_text("·")
    expect(part).to_have_attribute("title", "0, kept, a part of the next character")
    hint = page.locator(".memory .hint")
    expect(hint).to_contain_text("Each · stands for a token that is a part of the character after")
    page.goto("/#/sessions/plain")
    expect(page.locator(".text .token").first).to_be_visible()
    expect(hint).not_to_contain_text("Each ·")
