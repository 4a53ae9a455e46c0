"""Times the frames of the web UI in Chromium while a long session is scrolled.

    python -m benchmarks.page_scroll --out page-scroll.json

A small random model with the default model's tokenizer prefills the session: a pasted document, and
exchanges whose answers are Markdown. Chromium scrolls the chat, the chat's strip of turns, and the
tokens of the inspector, and its trace says what each frame took on the renderer's main thread.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.command import Measurement, check_outputs, out_option, write_record
from benchmarks.figures import rounded
from benchmarks.serving import running_server
from benchmarks.trace import CATEGORIES, Frame, drawn_per_second, frames_of
from kvkeep.errors import KvkeepError
from kvkeep.evaluate.haystack import manual_text

SERVER = "python -m tests.scripted_server {script} --port {port} --allow-edit"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DOCUMENT = 24_000  # characters of the pasted document
PIXELS_PER_SECOND = 2400
BUDGET_MS = 1000 / 60
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Scene:
    """A part of the page to scroll.

    path: of the view; `{name}` is the session. moves: pixels, of each gesture; they are horizontal
    if `is_horizontal`. is_pointed_at: whether the pointer moves over it first, which lights turns.
    """

    title: str
    path: str
    selector: str
    moves: tuple[int, ...]
    is_horizontal: bool = False
    is_pointed_at: bool = False


SCENES = (
    Scene("chat", "/#/chat/{name}", ".log", (12_000, -8_000, 4_000)),
    Scene("strip", "/#/chat/{name}", ".turn-bars", (-2_000, 2_000, -2_000), True, True),
    Scene("inspector", "/#/sessions/{name}", ".text", (6_000, -6_000, 3_000)),
)


@dataclass(frozen=True)
class SceneResult:
    """Milliseconds of the renderer's main thread per frame. parts: medians by kind of work.
    late: frames of more than 1/60 second. drawn_per_second: by wall-clock time, pauses between
    gestures included.
    """

    scene: str
    width: int
    frames: int
    median_ms: float
    p95_ms: float
    most_ms: float
    late: int
    drawn_per_second: float
    parts: dict[str, float]


def exchanges() -> Iterator[str]:
    """Yield questions and answers in ChatML without end: the sections of the documentation."""
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    sections = [text for page in pages for text in page.split("\n## ") if 300 < len(text) < 2500]
    for section in cycle(sections):
        question = f"Explain: {section.splitlines()[0].strip('# ')}"
        yield (
            f"<|im_start|>user\n{question}<|im_end|>\n"
            f"<|im_start|>assistant\n## {section}<|im_end|>\n"
        )


def create_session(url: str, name: str, tokens: int) -> int:
    """Create a session of at least so many tokens; return how many it has."""
    with httpx.Client(base_url=url, timeout=600) as client:

        def post(path: str, **body: object) -> None:
            client.post(f"/v1/sessions{path}", json=body).raise_for_status()

        post("", name=name, title="A long conversation", policy="sliding", max_kv_size=4096)
        post(f"/{name}/turns", content=manual_text()[:DOCUMENT], max_tokens=8)
        size = client.get(f"/v1/sessions/{name}").json()["tokens"]
        for text in exchanges():
            if size >= tokens:
                return int(size)
            post(f"/{name}/feed", text=text, special=True)
            size = client.get(f"/v1/sessions/{name}").json()["tokens"]
    raise AssertionError


def measure(browser: Browser, url: str, name: str, scene: Scene, width: int) -> SceneResult:
    """Scroll one scene in a view of its own, and return what its frames took."""
    viewport = {"width": width, "height": 900}
    context = browser.new_context(base_url=url, viewport=viewport)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(scene.path.format(name=name))
    page.locator(scene.selector).wait_for()
    page.wait_for_timeout(3000)  # all is drawn, and nothing else to do
    browser.start_tracing(page=page, categories=list(CATEGORIES))
    scroll(page, scene)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    context.close()
    return summary(scene.title, width, list(frames_of(events)), drawn_per_second(events))


def scroll(page: Page, scene: Scene) -> None:
    """Scroll as a mouse wheel does, at a steady speed, with the pointer over what is scrolled."""
    page.locator(scene.selector).scroll_into_view_if_needed()
    box = page.locator(scene.selector).bounding_box()
    if box is None:
        raise KvkeepError(f"{scene.selector} is not shown")
    left, right, middle = box["x"], box["x"] + box["width"], box["y"] + box["height"] / 2
    if scene.is_pointed_at:
        page.mouse.move(left, middle)
        page.mouse.move(right, middle, steps=120)
    devtools = page.context.new_cdp_session(page)
    axis = "xDistance" if scene.is_horizontal else "yDistance"
    for move in scene.moves:
        gesture = {
            "x": (left + right) / 2,
            "y": middle,
            axis: -move,
            "speed": PIXELS_PER_SECOND,
            "gestureSourceType": "mouse",
        }
        devtools.send("Input.synthesizeScrollGesture", gesture)


def summary(title: str, width: int, frames: Sequence[Frame], drawn: float) -> SceneResult:
    """Return the median, the 95th percentile and the most of the frames' milliseconds."""
    times = sorted(frame.milliseconds for frame in frames)
    if not times:
        raise KvkeepError(f"the trace of {title} has no frame")

    def quantile(values: list[float], share: float) -> float:
        return rounded(values[min(len(values) - 1, int(share * len(values)))])

    kinds = {kind for frame in frames for kind in frame.parts}
    parts = {
        kind: quantile(sorted(frame.parts.get(kind, 0.0) for frame in frames), 0.5)
        for kind in sorted(kinds)
    }
    late = sum(time > BUDGET_MS for time in times)
    figures = quantile(times, 0.5), quantile(times, 0.95), rounded(times[-1])
    return SceneResult(title, width, len(times), *figures, late, rounded(drawn), parts)


@click.command(cls=Measurement)
@click.option("--tokens", default=20_000, show_default=True, help="Of the session.")
@click.option("--width", "widths", multiple=True, type=int, default=(1440, 390), show_default=True)
@out_option
def main(tokens: int, widths: tuple[int, ...], out: Path | None) -> None:
    """Time the frames of the web UI in Chromium while a long session is scrolled.

    A frame's time is the thread CPU time of the renderer's main thread, so that other programs on
    the machine do not count; 60 frames per second allow 16.7 ms.
    """
    check_outputs(out)
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    results = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps([{"write": "It is a manual."}]))
        with (
            running_server(SERVER, script=script) as url,
            playwright.chromium.launch(executable_path=path, args=arguments) as browser,
        ):
            size = create_session(url, "long", tokens)
            click.echo(f"{size} tokens")
            for width in widths:
                for scene in SCENES:
                    results.append(measure(browser, url, "long", scene, width))
                    click.echo(line(results[-1]))
            version = browser.version
    values: dict[str, Any] = {"tokens": size, "chromium": version, "budget_ms": BUDGET_MS}
    write_record(out, "scripted", **values, scenes=list(map(asdict, results)))


def line(result: SceneResult) -> str:
    """Return a scene's result in words."""
    parts = ", ".join(f"{kind} {time}" for kind, time in result.parts.items())
    return (
        f"{result.scene} at {result.width} px: {result.frames} frames, main thread"
        f" {result.median_ms} ms (95% within {result.p95_ms}, most {result.most_ms}),"
        f" {result.late} beyond 16.7 ms; {result.drawn_per_second} drawn per second;"
        f" medians: {parts}"
    )


if __name__ == "__main__":
    main()
