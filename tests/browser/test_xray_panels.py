"""X-ray panels, opened by keyboard; test_pages.py unfolds all of them."""

import pytest
from browser import built
from playwright.sync_api import expect

# Panels are made alike: make test tries the first page of each section. A
# model has no kernels of its own.
WITH_KERNELS = [name for name in built.TUTORIALS if "/model/" not in name]
FIRST = [name for name in WITH_KERNELS if "/01-" in name]
OTHERS = [name for name in WITH_KERNELS if name not in FIRST]


@pytest.mark.parametrize(
    "name",
    [*FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)],
)
def test_a_panel_is_opened_and_its_target_chosen_by_keyboard(page, name):
    page.goto(name)
    panels = page.locator("details.bp-xray")
    first, last = panels.first, panels.last
    first.locator("summary").focus()
    page.keyboard.press("Enter")
    shown = first.locator(".sd-tab-content:visible")
    expect(shown).to_contain_text("NVIDIA H200")
    page.keyboard.press("Tab")  # to the tabs, which arrows go through
    page.keyboard.press("ArrowRight")
    expect(shown).to_contain_text("NVIDIA B200")
    last.locator("summary").click()
    # The target is chosen for all panels of a page.
    expect(last.locator(".sd-tab-content:visible")).to_contain_text("B200")
