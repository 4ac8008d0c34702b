// What a keyboard or a screen reader needs and the theme leaves out: the search has a name, what scrolls takes the focus.
document$.subscribe(() => setTimeout(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .rg-output, .rg-picture, .retrograd .scroll")) box.tabIndex = 0;
}));
