// A side bar that is a drawer closes when its button or an entry is tapped.
document.addEventListener("click", (event) => {
  const drawer = event.target.closest("dialog[open]");
  if (drawer && event.target.closest(".bp-close, a")) drawer.close();
});
