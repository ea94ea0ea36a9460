"""The site in a real browser."""

import pytest
from browser import built, tools
from playwright.sync_api import expect, sync_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PATIENCE = 60_000  # ms: a busy machine is slow, and that is no fault
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session", autouse=True)
def built_site():
    if not built.PAGES:
        pytest.fail(built.NO_SITE, pytrace=False)


@pytest.fixture(scope="session")
def base(built_site):
    """The address of the site, served from this machine."""
    with built.served() as address:
        yield f"{address}{built.prefix().lstrip('/')}"


@pytest.fixture(scope="session")
def browser():
    path = tools.chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def view():
    """What a test may change about the window."""
    return {}


@pytest.fixture
def page(browser, base, view):
    """A new window on the site, with nothing stored."""
    settings = {
        "base_url": base,
        "viewport": {"width": 1280, "height": 900},
        "color_scheme": "light",
        "reduced_motion": "reduce",
    }
    context = browser.new_context(**settings | view)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    yield page
    context.close()
