/* The entry of the contents that the theme marks, after a jump: the theme
   looks at headings that pass by, and a dragged scrollbar passes none. */

(() => {
  const contents = document.getElementById("pst-page-toc-nav");
  if (!contents) return;
  const links = [...contents.querySelectorAll("a")];
  const sections = links.map((link) =>
    document.getElementById(decodeURIComponent(link.hash.slice(1))),
  );

  function mark(right) {
    for (const link of links) {
      link.classList.toggle("active", link === right);
      if (link === right) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    for (const entry of contents.querySelectorAll(".toc-entry"))
      entry.classList.toggle("active", entry.contains(right ?? null));
  }

  function check() {
    const tops = sections.map((each) => each.getBoundingClientRect().top);
    const marked = links.findIndex((link) => link.matches(".active"));
    const end = tops[marked + 1] ?? Infinity;
    // What is in sight is right: a link that was followed, say.
    if (marked >= 0 && tops[marked] < innerHeight && end > 0) return;
    // The top third of the window counts, as it does for the theme.
    mark(links[tops.findLastIndex((top) => top < innerHeight / 3)]);
  }

  let wait;
  addEventListener("scroll", () => {
    clearTimeout(wait);
    wait = setTimeout(check, 100);
  });
})();

/* Copy buttons take one stop of the Tab key together, and links in code
   another; from there the arrow keys lead on. A page has dozens, and one
   end. */

addEventListener("load", () => {
  // sphinx-copybutton knows few languages: the page says its words.
  const { copy, success, failure } = document.getElementById("bp-copy").dataset;
  if (typeof messages === "object") {
    messages[locale].copy_success = success;
    messages[locale].copy_failure = failure;
  }
  const keys = document.getElementById("bp-copy-keys");
  for (const button of document.querySelectorAll("button.copybtn")) {
    button.dataset.tooltip = copy;
    button.dataset.keys = keys.textContent;
    button.setAttribute("aria-describedby", keys.id);
  }

  for (const kind of ["button.copybtn", ".highlight a.bp-reference"])
    oneStop(`.bd-article ${kind}`);
  // What it would fold is the section that is read.
  for (const arrow of document.querySelectorAll(".bd-sidebar-primary summary"))
    arrow.tabIndex = -1;

  function oneStop(selector) {
    const shown = () =>
      [...document.querySelectorAll(selector)].filter((each) =>
        each.checkVisibility(),
      );
    const stop = (one) => {
      for (const each of document.querySelectorAll(selector))
        each.tabIndex = each === one ? 0 : -1;
    };
    stop(shown()[0]);
    document.addEventListener("focusin", ({ target }) => {
      if (target.matches(selector)) stop(target);
    });
    document.addEventListener("keydown", (event) => {
      if (!event.target.matches(selector)) return;
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const all = shown();
      all[all.indexOf(event.target) + step]?.focus();
    });
  }
});
