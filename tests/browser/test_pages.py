"""Every page, in light and dark, wide and narrow: nothing is wrong."""

from urllib.parse import urlsplit

import pytest
from browser import built, tools
from playwright.sync_api import expect

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
VIEWS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": PHONE},
}
# Of code, how many blocks have a line in more than one row, which then stands
# left of its own indentation; and the size of the smallest letters.
CODE = """(() => {
  const all = [...document.querySelectorAll('article .highlight pre')]
    .filter(e => e.checkVisibility());
  const wraps = e => {
    const {lineHeight, paddingTop, paddingBottom} = getComputedStyle(e);
    const padding = parseFloat(paddingTop) + parseFloat(paddingBottom);
    const rows = (e.scrollHeight - padding) / parseFloat(lineHeight);
    return Math.round(rows) > e.textContent.trimEnd().split('\\n').length;
  };
  return [all.filter(wraps).length, all.length,
          Math.min(...all.map(e => parseFloat(getComputedStyle(e).fontSize)))];
})()"""
# How often a reader presses Tab to come to the next page, with all folded.
STOPS = """() => {
  const next = document.querySelector('a.right-next, a.left-prev');
  return [...document.querySelectorAll('a[href], button, input, summary, ' +
    '[tabindex]')].filter(e => e.tabIndex >= 0 && !e.disabled
      && e.checkVisibility({visibilityProperty: true})
      && next?.compareDocumentPosition(e) & Node.DOCUMENT_POSITION_PRECEDING
    ).length;
}"""
# A page of plain words has some fifteen headings, twenty folded cells, and
# forty words that lead to the glossary, each of whose entries leads on.
MOST_STOPS = 150
# The glossary is a list of links.
MOST_IN_THE_GLOSSARY = 200
WIDER = "document.documentElement.scrollWidth - window.innerWidth"
# The page hides what does not fit in its width.
CUT = """[...document.querySelectorAll('article *')]
  .find(e => e.getBoundingClientRect().right > innerWidth + 1
    && e.checkVisibility()
    && !e.closest('pre, svg, div.math, .pst-scrollable-table-container')
  )?.outerHTML.slice(0, 120)"""
# What is folded is a part of the page.
UNFOLD = """document.querySelectorAll('article details')
    .forEach(d => d.open = true)"""
# What says nothing new to axe, which takes seconds for it: a word of code in a
# color that stood in such a block before; of a table all rows between the
# second and the last; panels like the first.
PRUNE = """{
  const seen = new Set();
  for (const span of document.querySelectorAll('pre span:not([id])')) {
    const blocks = [];
    for (let e = span; e.localName !== 'article' && e.parentElement;
         e = e.parentElement)
      blocks.push(e.localName + '.' + e.className + e.style.cssText);
    const kind = blocks.join();
    if (seen.has(kind)) span.replaceWith(span.textContent);
    seen.add(kind);
  }
  for (const body of document.querySelectorAll('article tbody'))
    [...body.rows].slice(2, -1).forEach(row => row.remove());
  [...document.querySelectorAll('article .bp-xray')].slice(1)
    .forEach(panel => panel.remove());
}"""
# Only what fails: describing what passes takes most of the time.
AXE = "axe.run(document, {resultTypes: ['violations']})"
# Media queries change before a frame is drawn.
DRAWN = """new Promise(
  done => requestAnimationFrame(() => requestAnimationFrame(done)))"""
# Nothing else depends on the theme.
AXE_COLORS = AXE.replace(
    "{", "{runOnly: ['color-contrast', 'link-in-text-block'], "
)


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


def violations(page, axe=AXE):
    page.evaluate(tools.npm_file(tools.AXE).read_text(encoding="utf-8"))
    for found in page.evaluate(axe)["violations"]:
        for node in found["nodes"]:
            summary = " ".join(node["failureSummary"].split())
            target = node["target"]
            yield f"axe {found['id']}: {target} {node['html'][:120]} {summary}"


def dark(page):
    """List what is wrong with the colors when a reader's system turns dark."""
    page.emulate_media(color_scheme="dark")
    page.evaluate(DRAWN)
    theme = page.locator("html").get_attribute("data-theme")
    if theme != "dark":
        yield f"in the dark the theme is {theme!r}"
    yield from violations(page, AXE_COLORS)


def sideways(page, state):
    for view in DESK, PHONE:
        page.set_viewport_size(view)
        if (pixels := page.evaluate(WIDER)) > 0:
            width = view["width"]
            yield f"{state}, {width} px wide, it scrolls {pixels} px sideways"
        if cut := page.evaluate(CUT):
            yield f"{state}, {view['width']} px wide, this is cut: {cut}"
        if view == PHONE:
            yield from small_code(*page.evaluate(CODE))
    page.set_viewport_size(DESK)


def small_code(wrapped, blocks, size):
    """What makes code hard to read on a phone."""
    if wrapped:
        yield f"on a phone {wrapped} of {blocks} code blocks wrap lines"
    if blocks and size < 13:
        yield f"on a phone code has {size} px"


def faults(page, name):
    """Load a page, and list what is wrong with it in each view."""
    watch = Watch(page)
    response = page.goto(name)
    found = watch.faults
    if response.status != 200:
        found.append(f"HTTP status {response.status}")
    found.extend(sideways(page, "folded"))
    most = MOST_IN_THE_GLOSSARY if name == "glossary.html" else MOST_STOPS
    if (stops := page.evaluate(STOPS)) > most:
        found.append(f"{stops} stops of the Tab key before the next page")
    page.evaluate(UNFOLD)
    found.extend(sideways(page, "unfolded"))
    page.evaluate(PRUNE)
    found.extend(violations(page))
    found.extend(dark(page))
    return found


@pytest.mark.parametrize("name", built.PAGES)
def test_page(page, name):
    found = faults(page, name)
    assert not found, "\n".join(found)


LINKS = '<a href="#">here</a>' * MOST_STOPS
BAD = f"""<!doctype html><html lang="en" data-theme="light"><title>Bad</title>
<main><h1>Bad</h1><p style="color: #999; width: 3000px">pale</p>
<pre><span style="color: #aaa">pale</span></pre>
<article class="highlight"><p style="width: 600px">cut</p>
<div class="highlight"><pre style="font: 12px/18px monospace;
white-space: pre-wrap">
{"wide " * 40}</pre></div></article>
<img alt="" src="http://other.invalid/x.png"></main>
<img alt="" src="no-such-picture.png">{LINKS}
<button>one more</button><a class="right-next" href="#">Next</a>
<script>throw new Error("broken")</script>"""


def test_faults_are_found(page):
    """Each kind of fault, on a page that has them all."""
    context = page.context
    context.route("**/bad.html", lambda route: route.fulfill(body=BAD))
    context.route("http://other.invalid/**", lambda route: route.abort())
    found = "\n".join(faults(page, "bad.html"))
    for fault in (
        "script error broken",
        "asks another host: http://other.invalid/x.png",
        "HTTP 404: ",
        "console: ",
        "on a phone 1 of 1 code blocks wrap lines",
        "on a phone code has 12 px",
        f"{MOST_STOPS + 1} stops of the Tab key",
        "in the dark the theme is 'light'",
        "folded, 390 px wide, it scrolls",
        "unfolded, 1280 px wide, it scrolls",
        '390 px wide, this is cut: <p style="width: 600px">',
        ">pale</p> Fix any",
        ">pale</span> Fix any",
    ):
        assert fault in found, found


def test_unknown_address_far_down_shows_a_whole_page(page):
    """The 404 page finds its styles from any depth."""
    watch = Watch(page)
    response = page.goto("tutorials/no/such/page.html")
    assert response.status == 404
    bad = [f for f in watch.faults if "no/such/page.html" not in f]
    # The browser reports the address itself as an error, without its name.
    bad = [f for f in bad if not f.startswith("console: Failed to load")]
    assert not bad, "\n".join(bad)
    # It has no contents, and no drawer for them.
    expect(page.locator(".secondary-toggle")).to_have_count(0)
    home = page.locator("a.navbar-brand").first
    home.click()
    page.wait_for_url("**/index.html")
