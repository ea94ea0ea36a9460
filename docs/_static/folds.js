// A side bar that is a drawer closes when its button or an entry is tapped.
document.addEventListener("click", (event) => {
  const drawer = event.target.closest("dialog[open]");
  if (drawer && event.target.closest(".bp-close, a")) drawer.close();
});

// The theme looks what scrolls, and so needs a tab stop, when the window
// changes; what is unfolded may scroll too.
document.addEventListener(
  "toggle",
  () => dispatchEvent(new Event("resize")),
  true,
);
