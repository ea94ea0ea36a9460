"""Take the picture that the README shows: ``make screenshot``."""

from browser import built, tools
from playwright.sync_api import sync_playwright

PAGE = "tutorials/layer-norm/01-layer-norm.html"


def main():
    """The last figure of the first tutorial, as a reader sees it."""
    with built.served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=tools.chromium(), args=["--no-sandbox"]
        )
        page = browser.new_page(
            base_url=f"{address}en/", viewport={"width": 1280, "height": 800}
        )
        page.goto(PAGE, wait_until="networkidle")
        figure = page.locator(".measured").last
        figure.scroll_into_view_if_needed()
        top = "figure => scrollBy(0, figure.getBoundingClientRect().top - 90)"
        figure.evaluate(top)
        figure.locator("img:visible").evaluate("image => image.decode()")
        page.locator("#pst-page-toc-nav a.active").wait_for()
        page.screenshot(path=built.ROOT / "docs/_static/screenshot.png")
        browser.close()


if __name__ == "__main__":
    main()
