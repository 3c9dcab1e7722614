// A tour of the pages. The start page offers it on the first visit; it is a dialog of its own and changes nothing. That it
// was seen or refused is kept in the browser.
const TOUR_SEEN = "lora_fp8_tour";
const endTour = () => {
  localStorage.setItem(TOUR_SEEN, "seen");
  for (const offer of document.querySelectorAll(".tour-offer")) offer.hidden = true;
};
const showTour = () => {
  document.querySelector("#tour")?.remove();
  const dialog = document.createElement("dialog");
  dialog.id = "tour";
  dialog.setAttribute("aria-label", TOUR.name);
  const make = (kind, parent, text = "") => {
    const element = parent.appendChild(document.createElement(kind));
    element.textContent = text;
    return element;
  };
  const title = make("h2", dialog);
  const text = make("p", dialog);
  const place = make("span", dialog);
  const row = make("div", dialog);
  const [back, next, close] = [TOUR.back, TOUR.next, TOUR.close].map((name) => make("button", row, name));
  const go = make("a", row, TOUR.begin);
  go.href = TOUR.steps[0].link;
  for (const button of [back, next, close]) button.type = "button";
  let at = 0;
  const paint = () => {
    const step = TOUR.steps[at];
    const last = at === TOUR.steps.length - 1;
    [title.textContent, text.textContent] = [step.title, step.text];
    place.textContent = TOUR.place.replace("{step}", at + 1).replace("{steps}", TOUR.steps.length);
    back.disabled = at === 0;
    next.hidden = last;
    go.hidden = !last;
    for (const link of document.querySelectorAll(".site-header nav a"))
      link.classList.toggle("tour-here", dialog.open && link.getAttribute("href") === step.link);
    (last ? go : next).focus();
  };
  const move = (by) => {
    at = Math.min(TOUR.steps.length - 1, Math.max(0, at + by));
    paint();
  };
  back.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  close.addEventListener("click", () => dialog.close());
  go.addEventListener("click", endTour);
  dialog.addEventListener("keydown", ({ key }) => {
    if (key === "ArrowLeft") move(-1);
    if (key === "ArrowRight") move(1);
  });
  const before = document.activeElement;
  dialog.addEventListener("close", () => {
    endTour();
    paint();
    dialog.remove();
    before?.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  paint();
};
const offerTour = () => {
  if (localStorage.getItem(TOUR_SEEN)) return;
  for (const offer of document.querySelectorAll(".tour-offer[hidden]:not([data-offered])")) {
    offer.dataset.offered = "";
    offer.hidden = false;
  }
};
document.addEventListener("click", ({ target }) => {
  if (target.closest?.("[data-tour=show]")) showTour();
  if (target.closest?.("[data-tour=skip]")) endTour();
});
document.addEventListener("DOMContentLoaded", () => {
  if (localStorage.getItem(TOUR_SEEN)) return;
  offerTour();
  new MutationObserver(offerTour).observe(document.body, { childList: true, subtree: true });
});
