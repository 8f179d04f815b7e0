"""The report in a real browser: no error, no request, tabs and map work by mouse, finger and keyboard, at any width."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from roadmap.experiments.sheet import Cell, Sheet, row
from roadmap.report import report

from ..waiting import PATIENCE, until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def address(trained: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("browser") / "report.html"
    report(list(trained.values()), path, queries=2)
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1e3 * PATIENCE)
        yield opened
        opened.close()


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """The page; afterwards nothing may have been said in the console or asked of the network."""
    context = browser.new_context(**options)
    context.set_default_timeout(1e3 * PATIENCE)
    page = context.new_page()
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: heard.append(f"dialog {dialog.message}"))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("#map-box[data-view]")
    yield page
    context.close()
    assert heard == []
    assert [url for url in asked if not url.startswith("data:")] == [address]


def view(page: Any) -> list[float]:
    """Where the map is: the middle of what is seen, and the zoom. Drawing waits for the next frame."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return [float(part) for part in page.eval_on_selector("#map-box", "box => box.dataset.view").split()]


def test_tabs_show_one_group_at_a_time(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        tabs, panels = page.locator("[role=tab]"), page.locator("#queries .panel")
        titles = tabs.all_text_contents()
        assert titles[:3] == ["Random", "Hardest", "Most improved"]
        assert any("corrects" in title for title in titles)
        seen = lambda: [panels.nth(i).is_visible() for i in range(tabs.count())]  # noqa: E731
        assert seen() == [True] + [False] * (tabs.count() - 1)
        tabs.nth(1).click()
        assert seen()[:3] == [False, True, False]
        page.keyboard.press("ArrowRight")
        assert seen()[:3] == [False, False, True]
        page.emulate_media(media="print")
        assert all(seen())  # on paper all of them


def test_the_map_moves_by_mouse_and_keyboard(browser: Any, address: str) -> None:
    with opened(browser, address, viewport={"width": 1000, "height": 900}) as page:
        canvas = page.locator("#map-box canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        assert view(page) == [0, 0, 1]
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 60, y + 30, steps=3)
        page.mouse.up()
        right, up, zoom = view(page)
        assert (right < 0, up > 0, zoom) == (True, True, 1)  # what was under the mouse went with it
        page.mouse.wheel(0, -400)  # which does not wait for what comes of it
        until(page, "document.getElementById('map-box').dataset.view.split(' ')[2] > 1.5")
        canvas.focus()
        page.keyboard.press("0")
        assert view(page) == [0, 0, 1]
        page.keyboard.press("ArrowRight")
        assert view(page)[0] > 0
        page.keyboard.press("+")
        assert view(page)[2] == pytest.approx(1.3)
        page.locator("#map-whole").click()
        assert view(page) == [0, 0, 1]


def test_the_map_moves_by_one_finger_and_grows_by_two(browser: Any, address: str) -> None:
    """Touches as the screen of a phone sends them, by the browser's own protocol."""
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with opened(browser, address, **phone) as page:
        canvas = page.locator("#map-box canvas")
        canvas.scroll_into_view_if_needed()
        box, screen = canvas.bounding_box(), page.context.new_cdp_session(page)
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

        def touch(kind: str, *places: tuple[float, float]) -> None:
            points = [{"x": middle[0] + x, "y": middle[1] + y, "id": n} for n, (x, y) in enumerate(places)]
            screen.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        began, scrolled = view(page), page.evaluate("window.scrollY")
        touch("touchStart", (0, 0))
        for step in range(1, 5):
            touch("touchMove", (10 * step, 5 * step))
        touch("touchEnd")
        moved = view(page)
        assert moved[0] < began[0]  # the map follows the finger, so its middle goes the other way
        assert moved[1] != began[1]
        assert moved[2] == began[2]
        touch("touchStart", (-20, 0), (20, 0))
        for step in range(1, 5):
            touch("touchMove", (-20 - 10 * step, 0), (20 + 10 * step, 0))
        touch("touchEnd")
        assert view(page)[2] == pytest.approx(3 * moved[2], rel=0.1)  # from 40 pixels apart to 120
        assert page.evaluate("window.scrollY") == scrolled  # the page stays where it is


def test_a_point_shows_its_picture_and_marks_its_class(browser: Any, address: str) -> None:
    with opened(browser, address, viewport={"width": 1000, "height": 900}) as page:
        canvas = page.locator("#map-box canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        data = page.evaluate("JSON.parse(document.getElementById('map-data').textContent)")
        wide, high = (max(abs(at) for one in data["maps"] for at in one["at"][axis::2]) for axis in (0, 1))
        reach = min((box["width"] - 72) / wide, (box["height"] - 72) / high) / 2
        x = box["x"] + box["width"] / 2 + data["maps"][0]["at"][0] * reach
        y = box["y"] + box["height"] / 2 - data["maps"][0]["at"][1] * reach
        page.mouse.move(x, y)
        view(page)
        assert page.locator("#map-label").text_content() == data["classes"][data["class"][0]] + data["files"][0]
        page.mouse.down()
        page.mouse.up()
        assert page.locator("#map-class").input_value() == str(data["class"][0])
        page.locator("#map-model").select_option("2")
        page.locator("#map-class").select_option("-1")
        assert view(page) == [0, 0, 1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser: Any, address: str, scheme: str) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    with opened(browser, address, color_scheme=scheme, **phone) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.locator("[role=tab]").nth(1).tap()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        # letters stand out from what they are on, by WCAG's measure for text
        ratio = page.evaluate(
            """() => { const shine = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
                 .map((x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
                 return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
               const paper = shine(getComputedStyle(document.body).backgroundColor);
               return Math.min(...[...document.querySelectorAll('p, th, td, h1, h2, h3, .chart text, a')].map((one) => {
                 const style = getComputedStyle(one), ink = shine(one.closest('svg') ? style.fill : style.color);
                 return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); })); }"""
        )
        assert ratio >= 4.5


def test_a_class_stands_on_the_line_of_its_numbers(browser: Any, address: str) -> None:
    """Also where what it is mistaken for takes several lines, as on a phone."""
    with opened(browser, address, viewport={"width": 390, "height": 844}) as page:
        tops = page.evaluate("""() => {
            const row = document.querySelector("table.classes tbody tr");
            row.lastElementChild.innerHTML = "of<br>three<br>lines";
            const top = (cell) => {
                const range = document.createRange();
                range.selectNodeContents(cell);
                return [...range.getClientRects()].at(-1).top;
            };
            return [top(row.cells[0]), top(row.cells[1])];
        }""")
        assert abs(tops[0] - tops[1]) < 2


def test_it_can_be_printed(browser: Any, address: str, tmp_path: Path) -> None:
    with opened(browser, address) as page:
        page.pdf(path=str(tmp_path / "report.pdf"), format="A4")
        assert (tmp_path / "report.pdf").read_bytes().count(b"/Type /Page\n") >= 4
        assert page.locator("details:not(.long)").first.get_attribute("open") is None  # folded again on the screen


@pytest.mark.parametrize(("media", "width"), [("screen", 1280), ("print", 1047)])  # A4 across, less its margins
def test_a_table_of_compared_runs_fits_a_screen_and_a_sheet_of_paper(
    browser: Any, tmp_path: Path, media: Any, width: int
) -> None:
    tested = ["95 %", "to the best", "effect", "p, seeds", "p, classes"]
    columns = ("group", "runs", "R@1", *tested, "p, McNemar", "mAP@R", *tested)
    values = ["86.32 to 91.94", "-3.77", "-2.19", "0.2", "0.00021"]
    cells = ["loss=smoothap", "2", Cell("85.36 ± 1.41", True), *values, "< 0.0001", "63.16 ± 0.86", *values]
    Sheet("glyphs, the last epoch", columns, (row(cells), row(cells)), ("a remark",)).write(tmp_path / "table.html")
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    page.emulate_media(media=media)
    page.goto((tmp_path / "table.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    table = page.locator("table")
    assert table.evaluate("table => table.scrollWidth - table.clientWidth") == 0  # nothing to the right of what is seen
    context.close()
