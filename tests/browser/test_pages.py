"""Every page, in light, in dark and on a phone: nothing is wrong with it."""

from urllib.parse import urlsplit

import pytest
from browser import built, tools
from playwright.sync_api import TimeoutError as TooLate

VIEWS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {
        "color_scheme": "light",
        "viewport": {"width": 390, "height": 844},
    },
}
UNDRAWN = """[...document.querySelectorAll('.math')]
    .filter(e => !e.querySelector('mjx-container')).length"""
WIDER = "document.documentElement.scrollWidth - window.innerWidth"


# Only what fails: describing what passes takes most of the time.
AXE = "axe.run(document, {resultTypes: ['violations']})"


class Watch:
    """Notes what goes wrong in a page while it loads and runs."""

    def __init__(self, page):
        self.faults = []
        page.on("pageerror", lambda error: self.note(f"script error {error}"))
        page.on("console", self.console)
        page.on("request", self.request)
        page.on("response", self.response)
        page.on("requestfailed", lambda r: self.note(f"failed: {r.url}"))

    def note(self, fault):
        self.faults.append(fault)

    def console(self, message):
        if message.type == "error":
            self.note(f"console: {message.text}")

    def request(self, request):
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob", "about") and (
            parts.hostname != "127.0.0.1"
        ):
            self.note(f"asks another host: {request.url}")

    def response(self, response):
        if not response.ok and response.status != 304:
            self.note(f"HTTP {response.status}: {response.url}")


def draw_formulas(page):
    """Wait for the formulas; how many are not drawn."""
    try:
        page.wait_for_function(f"{UNDRAWN} === 0", timeout=30_000)
    except TooLate:
        return page.evaluate(UNDRAWN)
    page.evaluate("window.MathJax?.startup?.promise?.then(() => true)")
    return 0


def violations(page):
    page.evaluate(tools.npm_file(tools.AXE).read_text(encoding="utf-8"))
    for found in page.evaluate(AXE)["violations"]:
        for node in found["nodes"]:
            summary = " ".join(node["failureSummary"].split())
            target = node["target"]
            yield f"axe {found['id']}: {target} {node['html'][:120]} {summary}"


@pytest.mark.parametrize("name", built.PAGES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_page(page, view, name):
    watch = Watch(page)
    response = page.goto(name)
    assert response.status == 200
    faults = watch.faults
    if undrawn := draw_formulas(page):
        faults.append(f"{undrawn} formulas are not drawn")
    theme = page.locator("html").get_attribute("data-theme")
    if theme != view["color_scheme"]:
        faults.append(f"the theme is {theme!r}")
    if (pixels := page.evaluate(WIDER)) > 0:
        faults.append(f"scrolls {pixels} px sideways")
    faults.extend(violations(page))
    assert not faults, "\n".join(faults)


def test_unknown_address_far_down_shows_a_whole_page(page):
    """The 404 page finds its styles from any depth."""
    watch = Watch(page)
    response = page.goto("tutorials/no/such/page.html")
    assert response.status == 404
    bad = [f for f in watch.faults if "no/such/page.html" not in f]
    # The browser reports the address itself as an error, without its name.
    bad = [f for f in bad if not f.startswith("console: Failed to load")]
    assert not bad, "\n".join(bad)
    home = page.locator("a.navbar-brand").first
    home.click()
    page.wait_for_url("**/index.html")
