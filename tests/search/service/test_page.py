"""The page in a real browser: upload, paste, drop, crop, click through, filter, compare, why, errors.

Runs where Chromium is installed. ROADMAP_SCREENSHOTS names a folder to keep screenshots in.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roadmap.search.service import application, running

from ...waiting import PATIENCE, until
from .worlds import COLOURS, ColourEncoder, drawn, encoded, halves, make_index, patient

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
DROP = """([content, type]) => {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], "dropped", { type }));
    for (const name of ["dragover", "drop"])
        document.getElementById("drop").dispatchEvent(
            new DragEvent(name, { dataTransfer: data, bubbles: true, cancelable: true }));
}"""
SQUARE = """() => [...document.querySelectorAll(".frame")].every(
    (frame) => Math.abs(frame.clientHeight - frame.clientWidth) <= 1 && frame.querySelector("img").naturalWidth > 0)"""
SHOWN = "() => document.getElementById('picture').decode().catch(() => {})"
COPY = """async (content) => {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    await navigator.clipboard.write([new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) })]);
}"""


class Screen:
    """A page that is open, with everything that went wrong in it and every host that it asked."""

    def __init__(self, page: Any, address: str, shots: Path) -> None:
        self.page, self.address, self.shots = page, address, shots
        self.wrong: list[str] = []
        self.hosts: set[str] = set()
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", self._note)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.goto(address)
        page.wait_for_selector(".card")

    def _note(self, message: Any) -> None:
        if message.type == "error" and "responded with a status of 4" not in message.text:  # refusals are shown
            self.wrong.append(message.text)

    def settle(self) -> None:
        """Wait until the answer is there."""
        until(self.page, "!document.getElementById('status').textContent.includes('…')")

    def upload(self, path: Path, field: str = "#file") -> None:
        """Until the answer is there and the picture is shown, for which the answer does not wait."""
        self.page.set_input_files(field, path)
        self.settle()
        self.page.evaluate(SHOWN)

    def found(self, index: str = "birds") -> list[str]:
        return list(self.page.locator(f"[data-index={index}] .card .id").all_inner_texts())

    def expect_first(self, start: str, index: str = "birds") -> None:
        wanted = f"document.querySelector('[data-index={index}] .card .id')?.textContent.startsWith('{start}')"
        until(self.page, wanted)

    def shoot(self, name: str) -> None:
        self.page.wait_for_load_state("networkidle")
        self.page.screenshot(path=self.shots / f"{name}.png")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    halves().resize((640, 320)).save(folder / "halves.png")
    drawn(COLOURS["green"], 50).save(folder / "green.png")
    drawn(COLOURS["blue"], 51).save(folder / "blue.tiff")
    (folder / "broken.png").write_bytes(encoded(drawn(COLOURS["red"], size=(300, 300)))[:5000])
    (folder / "notes.txt").write_text("no picture")
    (folder / "large.bmp").write_bytes(b"BM" + b"\0" * 300_000)
    return folder


@pytest.fixture(scope="module")
def address(files: Path) -> Iterator[str]:
    encoder = ColourEncoder()
    birds = make_index(files / "birds", files / "pictures", encoder)
    other = make_index(files / "other", files / "others", encoder)
    other.remove([f"red/{i}.png" for i in range(5)])
    drawn(COLOURS["green"], 3, (40, 120)).save(files / "others/green/7.png")  # shown as it is now: upright
    limits = patient(rate=0, upload=250_000)
    with running(application({"birds": birds, "other": other}, encoder, limits)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # the sandbox needs rights that containers and root do not have
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1e3 * PATIENCE)
        yield opened
        opened.close()


def opened(browser: Any, address: str, shots: Path, **context: Any) -> Screen:
    made = browser.new_context(viewport={"width": 1200, "height": 800}, **context)
    made.set_default_timeout(1e3 * PATIENCE)
    kept = os.environ.get("ROADMAP_SCREENSHOTS")
    folder = Path(kept) if kept else shots
    folder.mkdir(parents=True, exist_ok=True)
    return Screen(made.new_page(), address, folder)


@pytest.fixture
def screen(browser: Any, address: str, tmp_path: Path) -> Iterator[Screen]:
    made = opened(browser, address, tmp_path, permissions=["clipboard-read", "clipboard-write"])
    yield made
    assert made.wrong == []
    assert made.hosts == {address.removeprefix("http://")}  # nothing from outside
    made.page.context.close()


def drag(screen: Screen, start: float, stop: float) -> None:
    """A box from one share of the width to another, almost the whole height."""
    screen.page.evaluate(SHOWN)
    frame = screen.page.locator("#stage").bounding_box()
    mouse, y = screen.page.mouse, frame["y"]
    mouse.move(frame["x"] + start * frame["width"], y + 0.05 * frame["height"])
    mouse.down()
    mouse.move(frame["x"] + stop * frame["width"], y + 0.95 * frame["height"], steps=4)
    mouse.up()


def test_upload_crop_click_through_and_back(screen: Screen, files: Path) -> None:
    screen.upload(files / "green.png")
    assert screen.found()[0].startswith("green/")
    assert float(screen.page.locator(".card .score b").first.inner_text()) > 0.99
    assert "of which embedding" in screen.page.locator("#status").inner_text()
    screen.upload(files / "halves.png")
    drag(screen, 0.55, 0.95)
    screen.expect_first("red/")
    drag(screen, 0.45, 0.05)  # from right to left
    screen.expect_first("blue/")
    assert screen.page.locator("#box").is_visible()
    screen.shoot("crop-light")
    screen.page.click("#whole")
    screen.settle()
    assert screen.page.locator("#box").is_hidden()
    screen.page.locator(".card").filter(has_text="blue/2.png").click()
    screen.expect_first("blue/2.png")
    assert screen.page.locator(".card .score b").first.inner_text() == "1.000"
    until(screen.page, "document.getElementById('picture').naturalWidth === 48")
    drag(screen, 0.1, 0.6)  # a part of a picture of the index
    screen.settle()
    screen.expect_first("blue/")
    screen.page.go_back()
    until(screen.page, "document.getElementById('picture').naturalWidth === 640")
    screen.page.go_back()
    screen.expect_first("green/")
    screen.page.click("#clear")
    screen.expect_first("red/0.png")  # everything, in the order it came
    assert screen.page.locator("#stage").is_hidden()


def test_paste_and_drop(screen: Screen) -> None:
    picture = base64.b64encode(encoded(drawn(COLOURS["blue"], 60))).decode()
    screen.page.evaluate(COPY, picture)
    screen.page.keyboard.press("Control+v")
    screen.expect_first("blue/")
    picture = base64.b64encode(encoded(drawn(COLOURS["green"], 61), "JPEG")).decode()
    screen.page.evaluate(DROP, [picture, "image/jpeg"])
    screen.expect_first("green/")


def test_a_picture_that_the_browser_cannot_show_is_searched_by(screen: Screen, files: Path) -> None:
    screen.upload(files / "blue.tiff")
    screen.expect_first("blue/")
    screen.page.locator("#unseen").wait_for()
    assert screen.page.locator("#stage").is_hidden()
    assert screen.page.locator("#clear").is_visible()
    screen.upload(files / "green.png")
    screen.page.locator("#stage").wait_for()
    assert screen.page.locator("#unseen").is_hidden()


def test_by_keyboard_alone(screen: Screen, files: Path) -> None:
    screen.upload(files / "halves.png")
    screen.page.focus("#stage")
    press = screen.page.keyboard.press
    press("b")
    screen.settle()
    assert screen.page.locator("#box").is_visible()
    for _ in range(12):
        press("ArrowRight")
    press("Enter")
    screen.expect_first("red/")
    for _ in range(30):
        press("ArrowLeft")
    for _ in range(3):
        press("Shift+ArrowDown")
    press("Enter")
    screen.expect_first("blue/")
    press("Escape")
    screen.settle()
    assert screen.page.locator("#box").is_hidden()
    screen.page.locator(".card").nth(1).focus()
    name = screen.found()[1]
    press("Enter")
    screen.expect_first(name)
    press("Tab")  # what had the focus is gone; it is where the answers are
    assert screen.page.evaluate("document.activeElement === document.querySelector('.card')")
    screen.page.focus("#clear")
    press("Enter")
    assert screen.page.evaluate("document.activeElement.id") == "file"
    screen.page.focus("#filter summary")
    press("Enter")
    screen.page.wait_for_selector(".condition")
    screen.page.focus(".condition button")
    press("Enter")
    assert screen.page.evaluate("document.activeElement.id") == "addcondition"


def test_filter_compare_and_why(screen: Screen, files: Path) -> None:
    screen.upload(files / "halves.png")
    drag(screen, 0.55, 0.95)
    screen.expect_first("red/")
    screen.page.click("#filter summary")
    screen.page.fill(".condition input", "2005")
    screen.page.locator(".condition select").first.select_option("year")
    screen.page.locator(".condition select").nth(1).select_option(">=")
    until(screen.page, "document.querySelectorAll('[data-index=birds] .card').length === 9")
    screen.page.click("#addcondition")
    screen.page.locator(".condition input").nth(1).fill("green")
    screen.page.click("h1")
    until(screen.page, "document.querySelectorAll('[data-index=birds] .card').length === 3")  # both must hold
    assert {name.split("/")[0] for name in screen.found()} == {"green"}
    screen.page.locator(".condition button").nth(1).click()
    until(screen.page, "document.querySelectorAll('[data-index=birds] .card').length === 9")
    screen.page.select_option("#second", "other")
    screen.page.wait_for_selector("[data-index=other] .card")
    assert len(screen.found("other")) == 9
    assert screen.page.locator("#second option").all_inner_texts() == ["nothing", "other"]
    until(screen.page, SQUARE)
    screen.page.click("#why summary")
    screen.page.fill("#expect", "red/1.png")
    screen.page.keyboard.press("Enter")
    screen.page.wait_for_selector("#verdict p")
    verdict, other = screen.page.locator("#verdict p").all_inner_texts()
    assert other == "red/1.png is not in other."
    assert "of 9, score 1.000, in birds" in verdict
    assert "The filter leaves it out" in verdict
    screen.shoot("compare-light")
    screen.page.locator(".condition button").click()
    until(screen.page, "document.querySelectorAll('[data-index=birds] .card').length === 24")
    until(screen.page, "!document.querySelector('#verdict').textContent.includes('filter')")
    assert "expected" in (screen.page.locator(".card").filter(has_text="red/1.png").get_attribute("class") or "")


def test_errors_are_words(browser: Any, address: str, files: Path, tmp_path: Path) -> None:
    screen = opened(browser, address, tmp_path)
    problem = screen.page.locator("#problem")
    for name, words in {
        "broken.png": "The picture cannot be searched by: truncated or corrupt",
        "large.bmp": "at most 250,000 bytes are allowed",
    }.items():
        screen.page.set_input_files("#file", files / name)
        problem.get_by_text(words).wait_for()
        assert screen.page.locator(".card").count() == 0
    screen.shoot("error-light")
    screen.page.evaluate(DROP, [base64.b64encode(b"x").decode(), "text/plain"])
    problem.get_by_text("dropped is not a picture").wait_for()
    screen.page.evaluate(
        "window.dispatchEvent(new DragEvent('drop', { dataTransfer: new DataTransfer(), cancelable: true }))"
    )
    problem.get_by_text("That was no file. Save the picture, and drop the file.").wait_for()
    screen.upload(files / "green.png")
    screen.expect_first("green/")
    assert problem.is_hidden()
    screen.page.click("#filter summary")
    screen.page.fill(".condition input", "soon")
    screen.page.locator(".condition select").first.select_option("year")
    problem.get_by_text("holds whole numbers").wait_for()
    screen.page.fill(".condition input", str(2**53 + 1))  # a browser would ask for another number
    screen.page.click("h1")
    problem.get_by_text("9007199254740993 has more digits than a browser can compare").wait_for()
    screen.page.fill(".condition input", "3000")
    screen.page.click("h1")
    screen.page.locator("#status").get_by_text("Nothing was found.").wait_for()
    assert screen.page.locator(".empty").inner_text() == "Nothing passes the filter."
    screen.page.route("**/api/**", lambda route: route.abort())
    screen.page.fill(".condition input", "2001")
    screen.page.click("h1")
    problem.get_by_text("The service cannot be reached. Is it running?").wait_for()
    screen.page.context.close()


def test_a_key_is_asked_for(browser: Any, files: Path, tmp_path: Path) -> None:
    encoder = ColourEncoder()
    index = make_index(tmp_path / "birds", tmp_path / "pictures", encoder)
    with running(application({"birds": index}, encoder, patient(), key="geheim")) as address:
        context = browser.new_context()
        context.set_default_timeout(1e3 * PATIENCE)
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#keydialog[open]")
        page.keyboard.press("Escape")
        page.locator("#problem").get_by_text("This service asks for a key. Load the page again to give one.").wait_for()
        page.reload()
        for key, wrong in (("wrong", False), ("geheim", True)):
            page.wait_for_selector("#keydialog[open]")
            until(page, f"document.getElementById('wrongkey').hidden === {str(not wrong).lower()}")
            page.fill("#key", key)
            page.keyboard.press("Enter")
        page.wait_for_selector(".card img[src^=blob]")
        until(page, "document.querySelector('.card img').naturalWidth > 0")
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(browser: Any, address: str, files: Path, tmp_path: Path, scheme: str) -> None:
    screen = opened(browser, address, tmp_path, color_scheme=scheme, has_touch=True, is_mobile=True)
    screen.page.set_viewport_size({"width": 390, "height": 844})
    assert screen.page.locator("#photograph").is_visible()
    screen.upload(files / "halves.png", "#camera")
    frame = screen.page.locator("#stage").bounding_box()
    finger = screen.page.context.new_cdp_session(screen.page)
    for kind, share in (("touchStart", 0.55), ("touchMove", 0.7), ("touchMove", 0.95), ("touchEnd", None)):
        y = frame["y"] + (0.1 if kind == "touchStart" else 0.9) * frame["height"]
        points = [] if share is None else [{"x": frame["x"] + share * frame["width"], "y": y}]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    screen.expect_first("red/")
    assert screen.page.locator("#box").is_visible()
    screen.page.select_option("#second", "other")
    screen.page.wait_for_selector("[data-index=other] .card")
    assert screen.page.evaluate("document.documentElement.scrollWidth") <= 390
    screen.shoot(f"phone-{scheme}")
    assert screen.wrong == []
    screen.page.context.close()
