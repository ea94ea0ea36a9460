"""The moving picture of the two stages: its model, drawing and controls."""

import itertools

import pytest
import torch
from browser import built
from browser.test_pages import VIEWS, WIDER, Watch, violations
from playwright.sync_api import expect

from tutorial import load

PAGE, PROGRAMS = "tutorials/layer-norm/03-lock.html", 4
SIZES = list(itertools.product((1, 2, 3, 5, 8, 9, 16), (1, 2, 4), (4, 8)))
RUN = """(options) => {
  const states = [twoStages.start(options)];
  while (!twoStages.isDone(states.at(-1))) {
    const before = JSON.stringify(states.at(-1));
    states.push(twoStages.step(states.at(-1)));
    if (JSON.stringify(states.at(-2)) !== before) throw Error("changed");
    if (states.length > 200) throw Error("no end");
  }
  return states;
}"""

TO_THE_END = """(figure) => {
  const step = figure.querySelector('[data-do=step]');
  const sentences = [];
  while (step.getAttribute('aria-disabled') === 'false') {
    step.click();
    sentences.push(figure.querySelector('[aria-live]').textContent);
  }
  return sentences;
}"""


class Picture:
    """The picture of a page, as a reader finds it."""

    def __init__(self, page):
        self.page = page
        page.goto(PAGE)
        self.figure = page.locator("figure.bp-stages")
        self.said = self.figure.locator("[aria-live=polite]")
        self.rows = self.figure.get_by_role("slider", name="Rows, M")
        self.buffers = self.figure.get_by_role("slider", name="Buffers")
        self.barrier = self.figure.get_by_role("switch")
        expect(self.figure).to_be_visible()

    def button(self, name):
        return self.figure.get_by_role("button", name=name, exact=True)

    def step(self, times=1):
        for _ in range(times):
            self.button("Step").click()

    def to_the_end(self):
        """Step until nothing is left: every sentence on the way."""
        return self.figure.evaluate(TO_THE_END)

    def sums(self, kind):
        cells = self.figure.locator(f"td[data-sum={kind}]")
        return cells.all_inner_texts()

    def shown(self):
        return self.figure.locator("svg").inner_html()


# The model -----------------------------------------------------------------


def run_model(page, rows, buffers, programs, barrier):
    options = dict(
        rows=rows, buffers=buffers, programs=programs, barrier=barrier
    )
    return page.evaluate(RUN, options)


@pytest.mark.parametrize("barrier", [True, False])
def test_model_loses_updates_without_the_barrier_only(page, barrier):
    page.goto(PAGE)
    for rows, buffers, programs in SIZES:
        states = run_model(page, rows, buffers, programs, barrier)
        last = states[-1]
        assert last["late"] == []
        found = [
            s + lost for s, lost in zip(last["db"], last["lost"], strict=True)
        ]
        assert found == [rows, rows]
        shared = min(rows, programs) > buffers
        assert last["lost"][0] == 0
        assert (last["lost"][1] > 0) == (shared and not barrier)
        used = min(rows, programs, buffers)
        assert last["locks"] == [2] * used + [0] * (buffers - used)
        for state in states:
            check_state(state, barrier)


def check_state(state, barrier):
    """What holds at any time, with the barrier or without it."""
    holding = [p for p in state["programs"] if p["state"] == "holds"]
    buffers = [p["buffer"] for p in holding]
    assert len(set(buffers)) == len(buffers)  # one program has a lock
    for buffer, lock in enumerate(state["locks"]):
        assert (lock == 1) == (buffer in buffers)
        cells = state["memory"][buffer]
        if barrier and lock != 1:
            assert sorted(cells[0]["rows"]) == sorted(cells[1]["rows"])
            assert cells[1]["known"] == (lock == 2)
    if barrier:
        assert state["late"] == []
        assert state["lost"] == [0, 0]


def test_model_does_what_the_kernels_do(page):
    """The kernels of the page, run here, leave the same rows and locks."""
    page.goto(PAGE)
    tutorial = load(built.stem(PAGE))
    for rows, buffers in itertools.product((1, 3, 4, 7), (1, 2, 4)):
        last = run_model(page, rows, buffers, PROGRAMS, True)[-1]
        sums, db, locks = run_kernels(
            tutorial, rows, buffers, len(last["programs"])
        )
        expected = [
            [sum(2**row for row in cell["rows"]) or -1 for cell in cells]
            for cells in last["memory"]
        ]
        assert sums.tolist() == expected
        assert locks.tolist() == last["locks"]
        assert db.tolist() == [2**rows - 1] * 2
        assert last["db"] == [rows] * 2


def run_kernels(tutorial, rows, buffers, programs):
    """Buffers, db and locks; -1 is what nobody has written. There are two
    columns, and each row has a bit of its own."""
    dy = (2.0 ** torch.arange(rows))[:, None].expand(rows, 2).contiguous()
    x, w = torch.randn(rows, 2), torch.ones(2)
    mean, rstd, dx = torch.zeros(rows), torch.ones(rows), torch.empty(rows, 2)
    locks = torch.zeros(buffers, dtype=torch.int32)
    sums, grads = torch.full((buffers, 2, 2), -1.0), torch.empty(4)
    tutorial._layer_norm_bwd[(programs,)](
        *(dy, x, w, mean, rstd, dx, sums, locks, rows, buffers, 2, 2)
    )
    used = min(buffers, programs)
    tutorial._layer_norm_bwd_add_up[(1,)](sums, grads, used, 4, 8, 4)
    return sums[:, 1], grads[2:], locks


# Controls ------------------------------------------------------------------


def test_step_back_and_reset(page):
    picture = Picture(page)
    first, sentence = picture.shown(), picture.said.inner_text()
    assert "Nothing has run yet" in sentence
    expect(picture.button("Back")).to_have_attribute("aria-disabled", "true")
    picture.step()
    expect(picture.said).to_contain_text("0, 1, 2, and 3 read the rows")
    second = picture.shown()
    assert second != first
    picture.step()
    expect(picture.said).to_contain_text("write 1 to their locks")
    picture.button("Back").click()
    assert picture.shown() == second
    picture.button("Reset").click()
    expect(picture.said).to_have_text(sentence)
    assert picture.shown() == first


def test_without_the_barrier_an_update_is_lost(page):
    picture = Picture(page)
    picture.barrier.uncheck()
    sentences = picture.to_the_end()
    lost = [s for s in sentences if "these updates are lost" in s]
    assert len(lost) == 1
    assert not any("barrier" in s for s in sentences)
    assert "4 in the columns of warp 0 but 2" in sentences[-1]
    assert picture.sums("right") == ["4", "4"]
    assert picture.sums("buffers") == ["4", "2"]
    assert picture.sums("lost") == ["0", "2"]
    expect(picture.figure.locator("td.bp-wrong")).to_have_text("2")
    expect(picture.figure.locator("svg .bp-wrong")).to_have_count(3)


def test_play_pause_and_play_again(page):
    page.clock.install()
    picture = Picture(page)
    picture.button("Play").click()  # the first step comes at once
    expect(picture.said).to_contain_text("read the rows")
    page.clock.run_for(2000)
    expect(picture.said).to_contain_text("write 1 to their locks")
    picture.button("Pause").click()
    page.clock.run_for(20_000)
    expect(picture.said).to_contain_text("write 1 to their locks")
    picture.button("Play").click()
    page.clock.run_for(60_000)
    expect(picture.said).to_contain_text("that is right")
    picture.button("Play").click()  # at the end: from the beginning
    expect(picture.said).to_contain_text("read the rows")
    picture.step()  # takes over
    expect(picture.button("Play")).to_be_visible()
    page.clock.run_for(20_000)
    expect(picture.said).to_contain_text("write 1 to their locks")


def test_sliders_change_the_model(page):
    picture = Picture(page)
    groups = picture.figure.locator
    picture.step(2)
    most = int(picture.rows.get_attribute("max"))
    picture.rows.fill(str(most))
    expect(picture.said).to_contain_text("Nothing has run yet")
    expect(picture.rows).to_have_attribute("aria-valuetext", str(most))
    expect(groups("svg .bp-row")).to_have_count(most)
    expect(groups("svg .bp-program")).to_have_count(PROGRAMS)
    for step, buffers in enumerate((1, 2, 4)):
        picture.buffers.fill(str(step))
        expect(picture.buffers).to_have_attribute(
            "aria-valuetext", str(buffers)
        )
        expect(groups("svg .bp-buffer")).to_have_count(buffers)
    picture.to_the_end()
    assert picture.sums("buffers") == [str(most)] * 2
    picture.rows.fill("1")
    expect(groups("svg .bp-program")).to_have_count(1)


# How it is shown -----------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "moves"),
    [
        ({"reduced_motion": "reduce"}, False),
        ({"reduced_motion": "no-preference"}, True),
    ],
)
def test_motion_is_reduced_on_request(page, view, moves):
    picture = Picture(page)
    count = """() => {
      document.querySelector('[data-do=step]').click();
      return document.querySelector('.bp-stages')
        .getAnimations({subtree: true}).length;
    }"""
    assert (page.evaluate(count) > 0) == moves
    expect(picture.said).to_contain_text("read the rows")


@pytest.mark.parametrize("view", [{"java_script_enabled": False}])
def test_without_javascript_the_drawing_is_there(page, view):
    page.goto(PAGE)
    expect(page.locator("figure.bp-stages")).to_be_hidden()
    # The theme shows the light form by a script; both are on the page.
    words = "Four rows add to two buffers"
    drawing = page.locator(f"img.bp-figure[alt*='{words}']")
    expect(drawing).to_have_count(2)
    assert drawing.first.is_visible()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_lost_update_in_every_view(page, view):
    watch = Watch(page)
    picture = Picture(page)
    picture.barrier.uncheck()
    picture.rows.fill(picture.rows.get_attribute("max"))
    picture.to_the_end()
    assert page.evaluate(WIDER) <= 0
    theme = page.locator("html").get_attribute("data-theme")
    assert theme == view["color_scheme"]
    inside = picture.figure.evaluate(
        """f => { const out = f.getBoundingClientRect();
          return [...f.querySelectorAll('svg *')].every(e => {
            const b = e.getBoundingClientRect();
            return b.left >= out.left && b.right <= out.right; }); }"""
    )
    assert inside
    found = [*watch.faults]
    if view is not VIEWS["phone"]:
        found += violations(page)
    assert not found, "\n".join(found)
