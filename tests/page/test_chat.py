"""The chat of the web UI in a real browser, with the default model."""

import re
from collections.abc import Iterator

import httpx
import pytest
from page.chat_actions import (
    box,
    settings,
    spans,
    standings,
    start,
    texts,
    turns,
    wait_until_idle,
)
from page.conftest import open_page, wait_until
from playwright.sync_api import Browser, Page, expect
from server.conftest import RunningServer

WIDTHS = (1440, 1024, 390, 360)


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as created:
        yield created


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_view_is_a_focused_message_box(
    browser: Browser, server: RunningServer, width: int
) -> None:
    """Typing and Enter answer, at every width, without a dialog or scrolling."""
    for page in open_page(browser, server, {"width": width, "height": 700}):
        expect(box(page)).to_be_focused()
        expect(box(page)).to_be_in_viewport(ratio=1)
        page.keyboard.type("Say hello.")
        page.keyboard.press("Enter")
        expect(turns(page)).to_have_count(1)
        expect(page.locator(".question")).to_contain_text("Say hello.")
        expect(page.locator(".answer .markdown").first).to_be_visible()
        expect(box(page)).to_be_focused()
        expect(box(page)).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_conversation_has_a_system_prompt_and_settings(page: Page, client: httpx.Client) -> None:
    settings(page, system="You are terse.", temperature="0", max_tokens="6")
    page.keyboard.type("Count to a hundred.")
    page.keyboard.press("Enter")
    expect(turns(page)).to_have_count(2)  # the system prompt is one
    name = page.url.rpartition("/")[2]
    assert {"system text", "turn 1 answer"} <= set(spans(client, name))
    answer = spans(client, name)["turn 1 answer"]
    assert answer["end"] - answer["start"] <= 6
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("dialog [name=max_tokens]")).to_have_value("6")
    page.locator("dialog [name=system]").fill("You are long-winded.")
    page.locator("dialog button.main").click()
    expect(page.locator("#status")).to_contain_text("replaced in memory")
    assert "You are long-winded." in "".join(texts(client, name))
    page.get_by_role("button", name="Undo replace").click()
    expect(page.locator("#status")).to_contain_text("Undone")
    assert "You are terse." in "".join(texts(client, name))


def test_the_models_own_system_prompt_is_shown(page: Page) -> None:
    start(page, tokens=2)
    page.get_by_role("button", name="Settings").click()
    system = page.locator("dialog [name=system]")
    expect(system).to_have_value(re.compile("^You are a helpful AI assistant[^<>]*$"))
    expect(system).to_be_disabled()
    expect(page.locator("dialog")).to_contain_text("the model's own")


def test_an_answer_is_generated_once_more_and_undone(page: Page, client: httpx.Client) -> None:
    name = start(page)
    before, question = texts(client, name), spans(client, name)["turn 1 question"]
    client.post(f"/v1/sessions/{name}/pin", json={"span": "turn 1 question"}).raise_for_status()
    page.reload()
    settings(page, temperature="0", max_tokens="4")  # another answer, as it is shorter
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("button", name="Undo regenerate")).to_be_visible()
    expect(turns(page)).to_have_count(1)
    expect(page.locator(".question")).to_have_count(1)
    expect(page.locator(".answer .markdown")).to_have_count(1)
    assert spans(client, name)["turn 1 question"] == question
    assert "pinned" in standings(client, name)
    assert texts(client, name) != before
    page.get_by_role("button", name="Undo regenerate").click()
    expect(page.locator("#status")).to_contain_text("Undone")
    expect(page.get_by_role("button", name="Undo regenerate")).to_have_count(0)
    assert texts(client, name) == before
    left = [entry["name"] for entry in client.get("/v1/sessions").json()["data"]]
    assert not [other for other in left if other.startswith("_undo")]


def test_a_question_without_an_answer_is_answered(page: Page, client: httpx.Client) -> None:
    name = start(page)
    answer = spans(client, name)["turn 1 answer"]
    count = len(texts(client, name)) - answer["start"]
    client.post(f"/v1/sessions/{name}/rewind", json={"count": count}).raise_for_status()
    page.reload()
    expect(page.locator(".answer")).to_have_count(0)
    page.get_by_role("button", name="Answer", exact=True).click()
    expect(page.locator(".answer .markdown")).to_be_visible()
    wait_until_idle(page)
    assert spans(client, name)["turn 1 answer"]["start"] == answer["start"]


def test_an_answer_is_continued(page: Page, client: httpx.Client) -> None:
    name = start(page, "Count from one to twenty.", tokens=6)
    before = "".join(texts(client, name))
    answer = turns(page).locator(".answer .markdown")
    shown = answer.inner_text()
    page.get_by_role("button", name="Continue").click()
    expect(answer).not_to_have_text(shown)
    expect(page.locator(".turn.open")).to_have_count(0)
    after = "".join(texts(client, name))
    assert after.startswith(before)
    assert len(after) > len(before)


def open_complete_answer(page: Page, client: httpx.Client, name: str) -> None:
    """Open a conversation whose only answer the model ended."""
    client.post("/v1/sessions", json={"name": name}).raise_for_status()
    turn = {"content": "Say hello.", "system": "Be brief.", "max_tokens": 60, "temperature": 0}
    client.post(f"/v1/sessions/{name}/turns", json=turn).raise_for_status()
    assert client.get(f"/v1/sessions/{name}/memory").json()["last_answer"]["ended"] == "eos"
    page.goto(f"/#/chat/{name}")


def test_an_ended_answer_that_is_continued_loses_its_end_token(
    page: Page, client: httpx.Client
) -> None:
    open_complete_answer(page, client, "ended")
    settings(page, temperature="0", max_tokens="6", repeat_penalty="2")
    answer = turns(page).locator(".answer .content")
    shown = answer.inner_text()
    page.get_by_role("button", name="Continue").click()
    expect(answer).not_to_have_text(shown)
    wait_until_idle(page)
    expect(answer).not_to_contain_text("<|im_end|>")
    text = answer.inner_text()
    page.reload()
    expect(answer).to_have_text(text)


def test_a_complete_answer_that_the_model_does_not_continue_is_said_to_be_one(
    page: Page, client: httpx.Client
) -> None:
    open_complete_answer(page, client, "complete")
    before = texts(client, "complete")
    settings(page, temperature="0", repeat_penalty="1")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#status")).to_contain_text("The answer is complete")
    assert texts(client, "complete") == before


def test_an_earlier_message_is_asked_otherwise_in_a_branch(
    page: Page, client: httpx.Client
) -> None:
    name = start(page)
    box(page).fill("And of Italy?")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(2)
    before = texts(client, name)
    page.get_by_role("button", name="Edit").last.click()
    page.locator("dialog [name=text]").fill("And of Spain?")
    page.locator("dialog button.main").click()
    expect(page.locator(".question").last).to_contain_text("And of Spain?")
    expect(turns(page)).to_have_count(2)
    branch = page.url.rpartition("/")[2]
    assert branch != name
    assert texts(client, name) == before
    assert "".join(texts(client, branch)).count("And of Italy?") == 0
    page.go_back()
    expect(page.locator(".question").last).to_contain_text("And of Italy?")


def test_an_answer_is_stopped_and_the_chat_goes_on(page: Page, client: httpx.Client) -> None:
    page.goto("/#/")
    box(page).fill("Write a long story about a ship.")
    box(page).press("Enter")
    expect(page.locator(".open .markdown").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(turns(page)).to_have_count(1)
    name = page.url.rpartition("/")[2]
    assert not client.get(f"/v1/sessions/{name}").json()["busy"]
    settings(page, max_tokens="4")
    box(page).fill("Stop.")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(2)


def test_conversations_are_searched_renamed_and_deleted(page: Page, client: httpx.Client) -> None:
    name = start(page, "Name a river in Peru.")
    side = page.locator("#conversations")
    item = side.locator("li", has=page.locator(f'[data-name="{name}"]'))
    expect(item).to_contain_text("Name a river in Peru.")
    item.hover()
    item.get_by_role("button", name="Rename").click()
    page.locator("dialog [name=title]").fill("  ")
    page.keyboard.press("Enter")
    expect(page.locator("dialog [name=title]:invalid")).to_be_visible()
    page.locator("dialog [name=title]").fill("Rivers")
    page.locator("dialog button.main").click()
    expect(item).to_contain_text("Rivers")
    expect(item.get_by_role("link")).to_be_focused()
    assert client.get(f"/v1/sessions/{name}").json()["title"] == "Rivers"
    expect(page.locator("h1")).to_have_text("Rivers")
    page.get_by_role("link", name="Operations").click()
    expect(page.get_by_role("heading", name="Operations")).to_be_visible()
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    expect(page.locator("#content")).to_be_focused()
    page.keyboard.press("Control+k")
    page.keyboard.type("no such thing")
    expect(item).to_have_count(0)
    expect(side).to_contain_text("No title has these words.")
    page.get_by_label("Search titles").fill("rivers")
    page.keyboard.press("Enter")
    expect(item.get_by_role("link")).to_have_attribute("aria-current", "page")
    item.hover()
    item.get_by_role("button", name="Delete").click()
    page.keyboard.press("Escape")
    expect(item.get_by_role("link")).to_be_focused()
    item.get_by_role("button", name="Delete").click()
    page.locator("dialog button.main").click()
    expect(item).to_have_count(0)
    expect(page.locator("h1")).to_have_text("New chat")
    expect(box(page)).to_be_focused()
    assert client.get(f"/v1/sessions/{name}").status_code == 404


def test_text_files_are_attached(page: Page, client: httpx.Client) -> None:
    settings(page, temperature="0", max_tokens="4")
    files = [
        {
            "name": "notes.md",
            "mimeType": "text/markdown",
            "buffer": b"The password is ```swordfish```.",
        },
        {"name": "data.bin", "mimeType": "application/octet-stream", "buffer": b"\x00\x01"},
    ]
    page.get_by_label("Files to attach").set_input_files(files)  # type: ignore[arg-type]
    expect(page.locator("#status")).to_contain_text("data.bin is not a text file")
    expect(page.locator(".chips li")).to_have_count(1)
    box(page).fill("What is the password?")
    box(page).press("Enter")
    expect(turns(page)).to_have_count(1)
    text = "".join(texts(client, page.url.rpartition("/")[2]))
    question = page.locator(".question .content")
    expect(question.locator(".code pre")).to_have_text("The password is ```swordfish```.")
    expect(question.locator(".plain")).to_have_text(["notes.md", "What is the password?"])
    assert "notes.md\n````\nThe password is ```swordfish```.\n````\n\nWhat is the password?" in text


def test_answers_are_markdown_without_scripts(page: Page, client: httpx.Client) -> None:
    """Other clients' sessions too, with reasoning and tool calls folded."""
    answer = (
        "<think>Two plus two.</think>It is **four**.\n\n```python\nprint(2 + 2)\n```\n"
        "<img src=x onerror=alert(1)><script>alert(2)</script>[a](javascript:alert(3))"
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    )
    prompt = f"<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    body = {"text": prompt, "special": True}
    client.post("/v1/sessions", json={"name": "an-agent"}).raise_for_status()
    client.post("/v1/sessions/an-agent/feed", json=body).raise_for_status()
    page.goto("/#/chat/an-agent")
    shown = page.locator(".answer")
    expect(shown.locator("strong")).to_have_text("four")
    expect(shown.locator("pre code .hljs-built_in")).to_have_text("print")
    expect(shown.locator("summary")).to_have_text(["Reasoning", "Tool call: add"])
    expect(shown.locator("img, script, [onerror]")).to_have_count(0)
    assert page.locator(".answer a[href^=javascript]").count() == 0


def test_an_agents_session_is_watched_while_it_runs(
    page: Page, client: httpx.Client, server: RunningServer
) -> None:
    """It appears in the list; its text and its strip grow, and at the end it can be answered."""
    body = {"content": "Count.", "max_tokens": 100_000, "stream": True, "temperature": 2}
    bias = {"logit_bias": {str(server.service.model.end_token_ids[0]): -100}}
    item = page.locator("#conversations li", has=page.locator('[data-name="watched"]'))
    expect(page.locator("#conversations")).not_to_contain_text("watched")
    session = {"name": "watched", "max_kv_size": 8192}  # does not fill while it is watched
    client.post("/v1/sessions", json=session).raise_for_status()
    with client.stream("POST", "/v1/sessions/watched/turns", json=body | bias) as response:
        lines = response.iter_lines()  # closing it disconnects
        next(lines)
        expect(item).to_contain_text("working")
        item.get_by_role("link").click()
        expect(page.locator(".question")).to_contain_text("Count.")
        for _ in range(2):
            sizes = page.evaluate(_SIZES)
            grown = f"(sizes) => {_SIZES}.every((size, at) => size > sizes[at])"
            wait_until(page, grown, sizes)
    expect(item).not_to_contain_text("working")
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


# The length of what is shown of an answer, and the cells that its turn has in the strip.
_SIZES = """[
    document.querySelector(".log").textContent.length,
    parseInt(document.querySelector(".turn-bars button:last-of-type").title.split(", ")[1]),
]"""


def test_a_server_that_is_gone_is_said_and_messages_are_kept(page: Page) -> None:
    start(page, tokens=4)
    page.route("**/v1/events", lambda route: route.abort())
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    expect(turns(page)).to_have_count(1)
    page.route("**/v1/sessions/**", lambda route: route.abort())
    box(page).fill("Are you there?")
    box(page).press("Enter")
    wait_until_idle(page)
    expect(page.locator("#status")).to_have_text("The server does not answer.")
    expect(box(page)).to_have_value("Are you there?")
    page.unroute_all()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator("#status")).to_be_empty()
    box(page).press("Enter")
    expect(turns(page)).to_have_count(2)


def test_a_deletion_stops_an_answer_and_escape_in_a_dialog_does_not(
    page: Page, client: httpx.Client
) -> None:
    page.goto("/#/")
    box(page).fill("Write a long story about a ship.")
    box(page).press("Enter")
    expect(page.locator(".open .markdown").first).to_be_visible()
    name, stopped = page.url.rpartition("/")[2], list[str]()
    page.on("requestfailed", lambda request: stopped.append(request.url))
    item = page.locator("#conversations li", has=page.locator(f'[data-name="{name}"]'))
    item.hover()
    item.get_by_role("button", name="Rename").click()
    expect(page.locator("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.wait_for_timeout(100)
    assert not stopped
    item.hover()
    item.get_by_role("button", name="Delete").click()
    page.locator("dialog button.main").click()
    expect(page.locator("#status")).to_contain_text("was deleted.")
    expect(page.locator("h1")).to_have_text("New chat")
    assert client.get(f"/v1/sessions/{name}").status_code == 404
