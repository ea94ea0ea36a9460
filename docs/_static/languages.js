// The switch of languages: it leads to the section that a reader looks at, and
// what was chosen is remembered, so that the root of the site sends nobody on.

const menus = document.querySelectorAll(".bp-languages");

// The one that the address names, if it is in the window, or the last one that
// begins at the upper edge or above it.
const EDGE = 160;
const section = () => {
  const begins = (each) => each.getBoundingClientRect().top;
  const shown = [...document.querySelectorAll("article section section[id]")].filter(
    (each) => each.getClientRects().length,
  );
  const named = shown.find((each) => location.hash === `#${each.id}`);
  if (named && begins(named) >= 0 && begins(named) < innerHeight) return named.id;
  return shown.filter((each) => begins(each) < EDGE).at(-1)?.id ?? "";
};

for (const menu of menus) {
  for (const link of menu.querySelectorAll("a")) {
    for (const event of ["pointerdown", "focus", "click"])
      link.addEventListener(event, () => (link.hash = section()));
    link.addEventListener("click", () => {
      try {
        localStorage.setItem("language", link.dataset.language);
      } catch {
        // Then the root asks the browser.
      }
    });
  }
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}
document.addEventListener("click", (event) => {
  for (const menu of menus) if (!menu.contains(event.target)) menu.open = false;
});
