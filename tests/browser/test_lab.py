"""JupyterLab in a real browser, as `minidist lab` starts it: lesson 1 runs, a slider obeys the keyboard, its figure follows,
screen readers get names, and text can be read in both themes. Loopback only; nothing is left running.

`MINIDIST_SCREENSHOTS=DIR` keeps pictures to look at; `MINIDIST_BROWSER_LESSON=05` opens another lesson.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from minidist.course.pytest_plugin import leftovers

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LESSON = next(ROOT.glob(f"lessons/{os.environ.get('MINIDIST_BROWSER_LESSON', '01')}_*.ipynb")).name
WAIT_MS = 60_000  # a limit, not a measure: alone on two cores all of this takes half a minute
MOVES = 2
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

HAVE_RUN = """() => {
    const prompts = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputPrompt')].map(e => e.textContent.trim());
    return prompts.length > 5 && prompts.every(text => /^\\[\\d+\\]:$/.test(text));
}"""
# Of every text that our outputs, controls and prose show: how its colour stands against the colour behind it.
CONTRAST = """() => {
    const parse = text => { const c = text.match(/[\\d.]+/g).map(Number); return c.length < 4 ? [...c, 1] : c; };
    const bright = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
        if (c[3] > 0.5) return c; } return [255, 255, 255, 1]; };
    const places = '.jp-OutputArea-output pre, .widget-label, .widget-dropdown select, .widget-text input, ' +
        '.jp-RenderedMarkdown :is(p, li, td, th, h1, h2, h3, a, code)';
    return [...document.querySelectorAll('.jp-Notebook :is(' + places + ')')]
        .filter(e => e.offsetParent && (e.textContent || e.value || '').trim())
        .map(e => { const [a, b] = [bright(parse(getComputedStyle(e).color)), bright(behind(e))];
            const what = e.tagName + ' ' + (e.textContent || e.value).slice(0, 40);
            return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), what]; });
}"""


@pytest.fixture(scope="module")
def sync_playwright():
    """Chromium and its driver. A learner's machine may lack them; where CI is set they must be there."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    missing = [name for name, there in (("chromium", CHROMIUM), ("playwright", sync_playwright)) if not there]
    if missing and os.environ.get("CI"):
        pytest.fail(f"no {' and no '.join(missing)} on a machine that is to test the browser", pytrace=False)
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}: apt-get install chromium, pip install playwright")
    return sync_playwright


@contextmanager
def jupyter(folder: Path):
    """`minidist lab` in a home of its own; yields its address, and ends it with its kernels and their ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mark = f"browser-{os.getpid()}"
    ours = {"HOME": str(folder), "MINIDIST_HOME": str(folder / "cache"), "MINIDIST_NOTEBOOK": mark, "PYTHONPATH": str(ROOT)}
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MINIDIST_", "JUPYTER_"))} | ours
    words = [sys.executable, "-m", "minidist", "lab", "--dir", str(folder / "course"), "--no-browser", "--port", str(port)]
    log = folder / "log"
    with log.open("w") as out:
        server = subprocess.Popen(words, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        deadline = time.monotonic() + WAIT_MS / 1e3
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/lab/\S*token=\S+", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield found[0]
    finally:
        server.send_signal(signal.SIGTERM)  # Jupyter ends its kernels, and with a kernel go its ranks
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    assert leftovers(mark, grace_s=10) == []


class Lab:
    """A lesson, open and run, and what the browser noticed on the way."""

    def __init__(self, page):
        self.page, self.asked, self.complaints = page, [], []
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, address: str) -> None:
        self.page.goto(re.sub(r"/tree/[^?]+", f"/tree/lessons/{LESSON}", address))
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        self.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()  # before that, Run All asks for a kernel

    def menu(self, *names: str) -> None:
        for name in names:
            self.page.locator(".lm-MenuBar-item, .lm-Menu-item").get_by_text(name, exact=True).last.click()

    def run_all(self) -> None:
        self.menu("Run", "Run All Cells")
        self.page.wait_for_function(HAVE_RUN)

    def picture(self, name: str, selector: str) -> None:
        if folder := os.environ.get("MINIDIST_SCREENSHOTS"):
            for number, what in enumerate(self.page.locator(selector).all()):
                what.scroll_into_view_if_needed()
                self.page.wait_for_timeout(200)
                self.page.screenshot(path=Path(folder, f"{LESSON[:2]}-{name}-{number}.png"))

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of everything that assistive technology is told about."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Accessibility.enable")
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        text = lambda node, key: str(node.get(key, {}).get("value", ""))  # noqa: E731
        return [(text(node, "role"), text(node, "name")) for node in nodes if not node.get("ignored")]


@pytest.fixture(scope="module")
def lab(sync_playwright, tmp_path_factory):
    with jupyter(tmp_path_factory.mktemp("home")) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        lab = Lab(browser.new_page(viewport={"width": 1400, "height": 1000}))
        lab.open(address)
        lab.run_all()
        yield lab
        browser.close()


def test_run_all_runs_to_the_end_without_an_error(lab):
    shown = lab.page.locator(".jp-OutputArea-output[data-mime-type*=error], .jp-OutputArea-output [class*=ansi-red-fg]")
    assert shown.all_text_contents() == []
    assert "has run to its end; no rank is left" in lab.page.locator(".jp-CodeCell").last.text_content()
    assert lab.page.get_by_text("✗").count() == 0


def test_a_slider_obeys_the_keyboard_and_its_figure_and_words_follow(lab):
    handle = lab.page.locator(".widget-slider [role=slider]").first
    picture = lab.page.locator(".widget-vbox .widget-html img").first
    drawn = [("", "")]
    low, now, high = (float(handle.get_attribute(f"aria-value{what}")) for what in ("min", "now", "max"))
    key = "ArrowRight" if now < (low + high) / 2 else "ArrowLeft"
    for _ in range(MOVES):
        before = handle.get_attribute("aria-valuenow")
        handle.focus()
        handle.press(key)
        lab.page.wait_for_function("([e, v]) => e.getAttribute('aria-valuenow') != v", arg=[handle.element_handle(), before])
        lab.page.wait_for_function(
            "old => { const i = document.querySelector('.widget-vbox .widget-html img'); return i && i.src != old; }",
            arg=drawn[-1][0],
        )
        drawn.append((picture.get_attribute("src"), picture.get_attribute("alt")))
    assert len({words for _, words in drawn}) == MOVES + 1
    box = lab.page.locator(".widget-text input").first  # linked: the number box shows where the slider is
    assert float(box.input_value()) == float(handle.get_attribute("aria-valuenow"))
    assert lab.page.locator(".widget-vbox .widget-html figcaption").first.text_content() == picture.get_attribute("alt")


def test_assistive_technology_is_told_what_every_control_and_picture_is(lab):
    told = set()
    for place in lab.page.locator(
        ".jp-OutputArea img, .widget-slider"
    ).all():  # off the screen, Lab leaves cells out of the tree
        place.scroll_into_view_if_needed()
        told |= set(lab.tree())
    for role in ("slider", "spinbutton"):
        names = [name for found, name in told if found == role]
        assert names and all(len(name) > 2 for name in names), (role, names)
    alts = lab.page.locator(".jp-OutputArea img").evaluate_all("all => all.map(img => img.alt)")
    named = {" ".join(name.split()) for role, name in told if role in ("image", "img")}
    assert alts and {" ".join(alt.split()) for alt in alts} <= named
    assert all(len(alt) > 20 for alt in alts)
    levels = lab.page.evaluate(
        "[...document.querySelectorAll('.jp-RenderedMarkdown :is(h1,h2,h3,h4)')].map(e => +e.tagName[1])"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels)), levels
    assert lab.page.evaluate("[...document.querySelectorAll('.jp-RenderedMarkdown table')].every(t => t.querySelector('th'))")


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_text_can_be_read_in_both_themes(lab, theme):
    lab.menu("Settings", "Theme", theme)
    light = "true" if "Light" in theme else "false"
    lab.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
    lab.page.wait_for_timeout(500)  # the new style sheet is on its way
    lab.picture(theme.split()[1].lower(), ".jp-OutputArea-output img")
    found = lab.page.evaluate(CONTRAST)
    assert len(found) > 30
    assert [what for what in found if what[0] < 4.5] == []


def test_nothing_but_this_machine_was_asked_and_nothing_complained(lab):
    elsewhere = {url for url in lab.asked if not re.match(r"(https?|ws)://127\.0\.0\.1:|data:|blob:", url)}
    assert elsewhere == set()
    assert lab.complaints == []
