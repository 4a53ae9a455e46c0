"""Take the pictures of the web UI that the documentation shows; needs Chromium and Pillow.

python tools/page_pictures.py docs/
"""

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from kvkeep import load_model

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from server.conftest import RunningServer, running_server  # noqa: E402

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Which river goes through it?")
SYSTEM = "You answer in one word, and you never explain. " * 14


def main(folder: Path) -> None:
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        running_server(load_model(), Path(tempfile.mkdtemp()), edits=True) as server,
        server.client() as client,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"]) as browser,
    ):
        create_sessions(client)
        with page(browser, server, "/#/chat/talk", 820) as shown:
            shown.locator(".turn-bars button[data-turn='turn 1']").click()
            take(shown, folder / "page-session.png")
            shown.set_viewport_size({"width": 390, "height": 820})
            take(shown, folder / "page-narrow.png")
        with page(browser, server, "/#/sessions/manual", 820, dark=True) as shown:
            take(shown, folder / "page-memory.png")
        with page(browser, server, "/#/sessions/compressed/heads", 620) as shown:
            shown.locator(".heads td button").nth(13).click()
            take(shown, folder / "page-heads.png")
        with page(browser, server, "/#/missed", 640) as shown:
            take(shown, folder / "page-missed.png")
        with page(browser, server, "/#/tree", 420) as shown:
            take(shown, folder / "page-tree.png")
        with page(browser, server, "/#/", 600) as shown:
            film(shown, folder / "page-chat.gif")


def film(shown: Page, file: Path) -> None:
    """Chat, pin a turn, remove it, and undo that, as an animated picture."""
    frames = [frame(shown)]

    def wait_and_take(count: int, milliseconds: int = 350) -> None:
        for _ in range(count):
            shown.wait_for_timeout(milliseconds)
            latest = frame(shown)
            if latest.tobytes() != frames[-1].tobytes():  # a slow machine takes the same more often
                frames.append(latest)

    shown.get_by_role("button", name="Settings").click()
    shown.locator("dialog [name=max_tokens]").fill("60")
    shown.locator("dialog button.main").click()
    for number, question in enumerate(("Tell me about Lima.", "And about Quito?"), 1):
        shown.get_by_label("Message", exact=True).fill(question)
        wait_and_take(1)
        shown.keyboard.press("Enter")
        while shown.locator(".turn:not(.open)").count() < number:
            wait_and_take(1)
    shown.locator(".turn-bars button[data-turn='turn 1']").click()
    wait_and_take(2)
    for button in ("Pin message", "Remove", "Undo remove"):
        shown.get_by_role("button", name=button, exact=True).click()
        wait_and_take(3)
    save_film(frames, file)
    print(file)


def frame(shown: Page) -> Image.Image:
    """Return what the page shows."""
    picture = Image.open(io.BytesIO(shown.screenshot())).convert("RGB")
    return picture.resize((960, 450))


def save_film(frames: list[Image.Image], file: Path) -> None:
    """Save frames with one palette, so that what two of them share is stored once."""
    width, height = frames[0].size
    sheet = Image.new("RGB", (width, height * len(frames)))
    for index, each in enumerate(frames):
        sheet.paste(each, (0, height * index))
    palette = sheet.quantize(256, method=Image.Quantize.FASTOCTREE)
    few = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in frames]
    durations = [400] * (len(few) - 1) + [2500]
    few[0].save(
        file, save_all=True, append_images=few[1:], duration=durations, loop=0, optimize=True
    )


def create_sessions(client: httpx.Client) -> None:
    """Create what the pictures show: a chat, long and compressed sessions, forks, prompts."""

    def post(path: str, **body: object) -> httpx.Response:
        return client.post(f"/v1/{path}", json=body, timeout=300).raise_for_status()

    def session(name: str, text: str, **settings: object) -> None:
        post("sessions", name=name, **settings)
        post(f"sessions/{name}/feed", text=text)

    for question in QUESTIONS[:2]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        post("chat/completions", messages=messages, max_tokens=4, temperature=0)
    post("sessions", name="talk", max_kv_size=256, keep=4)
    for number, question in enumerate(QUESTIONS):
        system = {} if number else {"system": "You are terse."}
        post("sessions/talk/turns", content=question, temperature=0, max_tokens=40, **system)
    answer = client.get("/v1/sessions/talk/memory").json()["spans"]["turn 1 answer"]
    post("sessions/talk/pin", start=answer["start"], end=answer["end"])
    post("sessions/talk/save")
    session("compressed", topics["typesseq"][:3600], policy="full", max_kv_size=2048)
    post("sessions/compressed/compress", ratio=4, method="kvzip", budget="heads")
    session("manual", topics["typesseq"], max_kv_size=512, keep=4)
    post("sessions/manual/pin", start=5500, end=5550)
    post("sessions/manual/snapshot", name="before")
    post("sessions/manual/fork", name="another-way")
    post("sessions/another-way/fork", name="a-third")


@contextmanager
def page(
    browser: Browser, server: RunningServer, path: str, height: int, dark: bool = False
) -> Iterator[Page]:
    scheme = "dark" if dark else "light"
    viewport = {"width": 1280, "height": height}
    context = browser.new_context(base_url=server.url, viewport=viewport, color_scheme=scheme)
    opened = context.new_page()
    opened.goto(path)
    opened.wait_for_timeout(1000)
    yield opened
    context.close()


def take(shown: Page, file: Path) -> None:
    shown.wait_for_timeout(500)
    shown.screenshot(path=file)
    print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
