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
