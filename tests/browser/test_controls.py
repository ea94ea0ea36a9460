"""What a reader does with mouse and keyboard."""

import re

import pytest
from browser import built
from browser.test_pages import VIEWS
from playwright.sync_api import expect
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

FIRST = "tutorials/layer-norm/01-layer-norm.html"
on_first = pytest.mark.parametrize("name", [FIRST])


def test_an_old_address_leads_on(page):
    page.goto("../tutorials/01-layer-norm.html")
    page.wait_for_url("**/en/tutorials/layer-norm/01-layer-norm.html")


@on_first
@pytest.mark.parametrize("view", [{}, VIEWS["phone"]], ids=["desk", "phone"])
def test_theme_switch(page, view, name):
    page.goto(name)
    html = page.locator("html")
    figure = page.locator("div.measured").first
    button = page.locator(".theme-switch-button:visible").first
    if not button.count():  # a phone has it in its menu
        page.locator(".primary-toggle").click()
        button = page.locator(".theme-switch-button:visible").first
    for theme in ("dark", "light", "dark"):
        button.click()
        page.locator(f"button[data-mode={theme}]:visible").first.click()
        expect(html).to_have_attribute("data-theme", theme)
        other = {"dark": "light", "light": "dark"}[theme]
        expect(figure.locator(f"img.only-{theme}").first).to_be_visible()
        expect(figure.locator(f"img.only-{other}").first).to_be_hidden()
    page.reload()  # it is remembered
    expect(html).to_have_attribute("data-theme", "dark")


# The first button is clicked with the mouse, which takes seconds; the others
# by a script, which may copy for 5 s after a reader has touched anything.
COPY = """async button => {
  await navigator.clipboard.writeText('');
  button.click();
  return (await navigator.clipboard.readText()).trim();
}"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == FIRST else pytest.mark.long)
        for name in built.TUTORIALS
    ],
)
@pytest.mark.parametrize(
    "view", [{"permissions": ["clipboard-read", "clipboard-write"]}]
)
def test_copy_buttons(page, view, name):
    """Every cell of the script, and nothing else, can be copied."""
    page.goto(name)
    page.evaluate("document.querySelectorAll('details').forEach(d=>d.open=1)")
    script = built.ROOT / "tutorials" / f"{built.stem(name)}.py"
    cells = [
        block.content.strip()
        for block in split_code_and_text_blocks(script)[1]
        if block.type == "code" and block.content.strip()
    ]
    page.locator("button.copybtn").first.wait_for(state="attached")
    buttons = page.locator(".highlight-Python button.copybtn")
    buttons.first.click()
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.strip() == cells[0]
    copied = []
    for button in buttons.element_handles():
        page.keyboard.press("Shift")
        copied.append(button.evaluate(COPY))
    assert copied == cells


# What the focused element is, and whether it is marked: by an outline, on
# the card around it if it is drawn there, or a look that goes with the focus.
FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const looks = () => {
    const s = getComputedStyle(e);
    return [s.boxShadow, s.backgroundColor, s.borderColor, s.color,
            s.textDecoration].join();
  };
  const box = e.getBoundingClientRect();
  const outline = [null, '::after'].map(part => getComputedStyle(e, part))
    .some(style => style.content !== 'none' && style.outlineStyle !== 'none'
      && parseFloat(style.outlineWidth) > 0);
  const before = looks();
  let marked = outline;
  if (!outline) { e.blur(); marked = looks() !== before;
                  e.focus({preventScroll: true}); }
  const kinds = WANTED.filter(([, css]) => e.matches(css)).map(([k]) => k);
  return {kinds, marked, html: e.outerHTML.slice(0, 160),
          seen: box.width > 0 && box.height > 0
            && box.bottom > 0 && box.top < innerHeight};
}"""
EVERYWHERE = {
    "skip link": ".skip-link a",
    "search": "button.search-button__button",
    "theme switch": "button.theme-switch-button",
    "navigation": "nav a.nav-link",
}


def walk(page, wanted):
    """Press Tab until the focus leaves the page: each element it was on."""
    pairs = [list(pair) for pair in wanted.items()]
    script = FOCUSED.replace("WANTED", repr(pairs))
    stops = []
    for _ in range(600):
        page.keyboard.press("Tab")
        stop = page.evaluate(script)
        if stop is None:
            return stops
        stops.append(stop)
    raise AssertionError("Tab never leaves the page")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (
            "index.html",
            {"line": ".bp-step a"},
        ),
        (
            "tutorials/index.html",
            {"card": ".bp-card a", "download": "article a.download"},
        ),
        *(
            (
                name,
                {
                    "copy": "button.copybtn[tabindex='0']",
                    "numbers": ".bp-numbers summary",
                    "solution": ".bp-solution summary",
                    "download": ".bp-downloads a[download]",
                    "next or previous": ".prev-next-area a",
                },
            )
            for name in [FIRST]
        ),
    ],
)
def test_tab_reaches_everything(page, name, more):
    wanted = EVERYWHERE | more
    page.goto(name)
    page.wait_for_load_state("load")
    stops = walk(page, wanted)
    for kind, css in wanted.items():
        reached = sum(kind in stop["kinds"] for stop in stops)
        if kind == "skip link":
            assert kind in stops[0]["kinds"], stops[0]
        there = page.locator(f"{css}:visible").count()
        assert reached >= max(there, 1), f"{kind}: {reached} of {there}"
    faults = [
        f"{'not marked' if stop['seen'] else 'not seen'}: {stop['html']}"
        for stop in stops
        if not (stop["marked"] and stop["seen"])
    ]
    assert not faults, "\n".join(faults)


@on_first
def test_arrows_lead_from_a_copy_button_to_the_next(page, name):
    page.goto(name)
    buttons = page.locator("article button.copybtn:visible")
    first = page.locator("button.copybtn[tabindex='0']")
    page.keyboard.press("Tab")  # what is focused now is so by the keyboard
    first.focus()
    expect(buttons.nth(0)).to_be_focused()
    # It is said, in sight and to a screen reader.
    words = page.locator(f"#{first.get_attribute('aria-describedby')}")
    shown = first.evaluate(
        "e => [getComputedStyle(e, '::after').visibility, e.dataset.keys]"
    )
    assert shown == ["visible", words.text_content()]
    assert "↓" in shown[1]
    page.keyboard.press("ArrowDown")
    expect(buttons.nth(1)).to_be_focused()
    expect(page.locator("button.copybtn[tabindex='0']")).to_have_count(1)
    page.keyboard.press("ArrowUp")
    expect(buttons.nth(0)).to_be_focused()


def test_skip_link_leads_to_the_text(page):
    page.goto("index.html")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#main-content$"))
