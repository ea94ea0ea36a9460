"""What a page loads, what it shows without a script, and on a phone."""

import re

import pytest
from browser import built
from browser.test_pages import VIEWS
from playwright.sync_api import expect

FIRST = "tutorials/layer-norm/01-layer-norm.html"
PHONE = VIEWS["phone"]
each_page = pytest.mark.parametrize("name", built.PAGES)


@each_page
def test_a_page_is_light(name):
    soup = built.soup(name)
    sheets = soup.select("head > link[rel=stylesheet]")
    assert "_static/all.css?v=" in sheets[0]["href"]
    # Beside it a page has that of its moving picture alone.
    assert len(sheets) == 1 + bool(soup.select("figure.bp-stages"))
    for script in soup.select("script[src]"):
        if "documentation_options.js" in script["src"]:
            continue
        assert {"defer", "async"} & script.attrs.keys(), script
        assert "mathjax" not in script["src"].lower()
    for image in soup.select("article img"):
        assert image["loading"] == "lazy"
        assert int(image["width"]) > 0 < int(image["height"])
    if name in built.TUTORIALS:
        assert not soup.select(".highlight-Python span.n")


@each_page
def test_icons_are_drawn(name):
    """The font that the theme has for them is not there."""
    css = (built.ROOT / "docs/_static/site.css").read_text("utf-8")
    for icon in built.soup(name).select(".fa-solid, .fa-brands"):
        kinds = set(icon["class"]) - {"fa-solid", "fa-brands", "fa-lg"}
        assert any(
            re.search(rf"\.{kind}\b[^{{}}]*\{{ --bp-icon:", css)
            for kind in kinds
        ), icon


def test_the_stylesheet_has_no_icon_font():
    css = (built.SITE / "_static/all.css").read_text("utf-8")
    assert ".bd-article h1" in css and ".sd-tab-set" in css
    assert "{--fa:" not in css  # of some 2,000 letters
    assert not re.search(r"@font-face\s*\{[^}]*Awesome", css)


# Scrolls by what stands in the window, so that all of a page comes by.
SCROLL = """async () => {
  for (let y = 0; y < document.documentElement.scrollHeight; y += 600) {
    scrollTo({top: y, behavior: 'instant'});
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
  }
}"""
SEEN = """() => [...document.querySelectorAll('article img')]
  .filter(e => e.checkVisibility() && !e.closest('details:not([open])'))
  .filter(e => !(e.complete && e.naturalWidth)).length"""


@pytest.mark.parametrize("name", ["tutorials/layer-norm/index.html", FIRST])
def test_only_the_figures_of_the_theme_are_loaded(page, name):
    loaded = []
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(name)
    figures = page.locator("article img.only-light").count()
    page.evaluate(SCROLL)
    page.wait_for_function(f"({SEEN})() === 0")
    pictures = {url for url in loaded if "/_images/" in url}
    assert 0 < len(pictures) <= figures
    assert not [url for url in pictures if url.endswith("_dark.svg")]
    assert not [url for url in loaded if "webfonts" in url]
    loaded.clear()
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.evaluate(SCROLL)
    page.wait_for_function(f"({SEEN})() === 0")
    later = {url for url in loaded if "/_images/" in url}
    assert {url.replace("_dark.svg", ".svg") for url in later} == pictures


# How a reader sees the page; null where there is no such thing.
LOOKS = """() => Object.fromEntries(CSS.map(css => {
  const e = document.querySelector(css);
  const style = e && getComputedStyle(e);
  return [css, e && [style.color, style.backgroundColor, style.fill,
    style.display, Math.round(e.getBoundingClientRect().top)]];
}))""".replace(
    "CSS",
    repr(
        [
            *("body", "#pst-header", ".navbar-brand img", "h1", "article p"),
            *(".bp-actions a", ".bp-passes", ".bp-passes .bp-kernel"),
            *("article img.only-light", "article img.only-dark", "pre .k"),
        ]
    ),
)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", FIRST])
def test_without_a_script_a_page_looks_the_same(browser, base, name, theme):
    looks = []
    for script in True, False:
        context = browser.new_context(
            base_url=base, color_scheme=theme, java_script_enabled=script
        )
        page = context.new_page()
        page.goto(name)
        if script:
            page.wait_for_function(
                "document.documentElement.dataset.theme !== 'auto'"
            )
        looks.append(page.evaluate(LOOKS))
        if not script:
            assert page.locator(".pst-js-only:visible").count() == 0
            folded = page.locator("details.bp-folded").first
            if folded.count():
                folded.locator("summary").click()
                expect(folded.locator("pre").first).to_be_visible()
        context.close()
    assert looks[0] == looks[1]


@pytest.mark.parametrize("view", [PHONE | {"java_script_enabled": False}])
def test_without_a_script_a_phone_has_the_menu_below(page, view):
    page.goto(FIRST)
    expect(page.locator(".primary-toggle")).to_be_hidden()
    link = page.locator("#pst-primary-sidebar a:visible").first
    article = page.locator("article").bounding_box()
    assert link.bounding_box()["y"] > article["y"] + article["height"]
    page.get_by_role("link", name="Menu").click()  # at the top of the page
    expect(link).to_be_in_viewport()


def test_with_a_script_there_is_one_menu(page):
    page.goto(FIRST)
    expect(page.locator(".bp-menu")).to_be_hidden()


@pytest.mark.parametrize(
    "view", [PHONE | {"has_touch": True, "is_mobile": True}]
)
def test_a_drawer_on_a_phone(page, view):
    page.goto(FIRST)
    copy = page.locator("button.copybtn").first
    expect(copy).to_have_css("opacity", "1")
    drawer = page.locator("#pst-secondary-sidebar-modal")
    page.locator(".secondary-toggle").tap()
    expect(drawer).to_be_visible()
    drawer.get_by_role("button", name="Close").tap()
    expect(drawer).to_be_hidden()
    page.locator(".secondary-toggle").tap()
    entry = drawer.locator("nav a").nth(2)
    target = page.locator(entry.get_attribute("href"))
    entry.tap()
    expect(drawer).to_be_hidden()
    expect(target).to_be_in_viewport()
    page.locator(".primary-toggle").tap()
    menu = page.locator("#pst-primary-sidebar-modal")
    menu.get_by_role("button", name="Close").tap()
    expect(menu).to_be_hidden()


def test_a_screen_reader_is_given_the_formulas(page):
    page.goto(FIRST)
    tree = page.context.new_cdp_session(page)
    found = tree.send("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in found if "role" in node]
    formulas = len(built.soup(FIRST).select("math"))
    assert formulas > 0
    assert sum(role in ("math", "MathMLMath") for role in roles) == formulas
    assert "MathMLFraction" in roles
