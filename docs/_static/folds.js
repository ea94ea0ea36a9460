// A side bar that is a drawer closes when its button or an entry is tapped.
document.addEventListener("click", (event) => {
  const drawer = event.target.closest("dialog[open]");
  if (drawer && event.target.closest(".bp-close, a")) drawer.close();
});

// What scrolls sideways needs a tab stop. The theme looks when the window
// changes; what is unfolded gets its size later.
const sizes = new ResizeObserver((changed) => {
  for (const { target, contentRect } of changed)
    if (contentRect.width)
      target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
});
for (const each of document.querySelectorAll(
  "article pre, .pst-scrollable-table-container",
))
  sizes.observe(each);

